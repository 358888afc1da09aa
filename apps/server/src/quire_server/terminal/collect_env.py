"""`quire collect-env`: what a report of a problem should say of the machine. Secrets are never shown."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire.available_memory import available_memory_bytes, control_group_bytes
from quire_interfaces import ConfigError
from quire_interfaces.platforms import GROUP, PLATFORMS, Platform, platform_of
from quire_interfaces.plugins import ALLOWED_VARIABLE, GROUPS, OWN_PACKAGES, installed_plugins, plugins_of

__all__ = ["collect", "print_environment", "shown_variables"]

LIBRARIES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "msgspec", "pyzmq",
    "llguidance", "fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "prometheus-client", "compressed-tensors",
    "gguf", "flashinfer-python", "flash-attn", "nixl", "lmcache", "ray", "vllm",
)  # fmt: skip
"""Distributions whose versions matter."""
CPU_FLAGS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""Instructions that kernels are compiled for."""
_PREFIXES = (
    "QUIRE_", "VLLM_", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_",
    "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TRITON_", "RAY_", "XDG_CACHE", "LD_", "MALLOC_",
    "PYTHON", "OTEL_", "TOKENIZERS_", "OPENAI_",
)  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASS|CREDENTIAL|AUTH|HEADERS|COOKIE", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
COMMAND_TIMEOUT_S = 10


def shown_variables(environ: dict[str, str]) -> dict[str, str]:
    """Environment variables that have an effect, those that hold secrets by their length alone."""
    shown = {}
    for name, value in sorted(environ.items()):
        if name.startswith(_PREFIXES):
            is_secret = _SECRET.search(name.replace("TOKENIZERS_", "")) is not None
            shown[name] = f"({len(value)} characters, hidden)" if is_secret else _USER_INFO.sub("...@", value)
    return shown


def collect() -> dict[str, dict[str, Any]]:
    """Section -> name -> value."""
    return {
        "Quire": _packages(),
        "Python": _python(),
        "system": _system(),
        "processor": _processor(),
        "memory": _memory(),
        "libraries": _libraries(),
        "plug-ins": _plugins(),
        "torch": _torch(),
        "kernels": _kernels(),
        "accelerators": _accelerators(),
        "environment": shown_variables(dict(os.environ)),
    }


def _packages() -> dict[str, str]:
    distributions = {each.name: each.version for each in importlib.metadata.distributions() if each.name}
    ours = sorted(name for name in distributions if name == "quire" or name.startswith("quire-"))
    versions: dict[str, list[str]] = {}
    for name in ours:
        versions.setdefault(distributions[name], []).append(name)
    return {version: ", ".join(names) for version, names in versions.items()}


def _python() -> dict[str, str]:
    return {
        "version": sys.version.replace("\n", " "),
        "executable": sys.executable,
        "is in a virtual environment": str(sys.prefix != sys.base_prefix),
    }


def _system() -> dict[str, str]:
    facts = {"system": platform.platform(), "machine": platform.machine(), "libc": " ".join(platform.libc_ver())}
    with contextlib.suppress(OSError):
        facts["distribution"] = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    for name in ("gcc", "clang", "cmake", "nvcc", "hipcc"):
        if shutil.which(name) is not None:
            facts[name] = next(iter(_output(name, "--version").splitlines()), "")
    return facts


def _processor() -> dict[str, str]:
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        found = dict(re.findall(r"^(model name|flags|Features|microcode)\s*:\s*(.*)$", text, re.MULTILINE))
        flags = set((found.get("flags") or found.get("Features") or "").split())
        facts["model"] = found.get("model name", platform.processor())
        facts["instructions"] = " ".join(flag for flag in CPU_FLAGS if flag in flags)
        facts["microcode"] = found.get("microcode", "")
    facts["cores"] = f"{os.cpu_count()}, {len(os.sched_getaffinity(0))} for this process"
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    for node in nodes:
        with contextlib.suppress(OSError):
            facts[f"NUMA {node.name}"] = f"cores {(node / 'cpulist').read_text().strip()}"
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind = (cache / "level").read_text().strip(), (cache / "type").read_text().strip()
            facts[f"cache L{level} {kind.lower()}"] = (cache / "size").read_text().strip()
    with contextlib.suppress(OSError):
        facts["governor"] = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    return {name: value for name, value in facts.items() if value}


def _memory() -> dict[str, str]:
    facts = {"available": _gib(available_memory_bytes())}
    with contextlib.suppress(OSError, ValueError):
        facts["installed"] = _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    left = control_group_bytes()
    facts["left to the control group"] = _gib(min(left)) if left else "no limit"
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        facts["shared memory"] = f"{_gib(usage.free)} of {_gib(usage.total)}"
        facts["huge pages"] = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    return facts


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _libraries() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _plugins() -> dict[str, str]:
    """Those of other packages; nothing of them is imported."""
    facts = {}
    for group in GROUPS:
        others = [each for each in plugins_of(group) if each.package not in OWN_PACKAGES]
        if others:
            facts[group] = ", ".join(
                f"{each.name} ({each.package} {each.version}"
                f"{'' if each.is_allowed else f'; {ALLOWED_VARIABLE} does not name it'})"
                for each in others
            )
    return facts or {"none": "no other package has any"}


def _torch() -> dict[str, str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"torch": f"cannot be imported: {error}"}
    return {
        "version": torch.__version__,
        "CUDA": str(torch.version.cuda or "not built with it"),
        "ROCm": str(torch.version.hip or "not built with it"),
        "threads": str(torch.get_num_threads()),
        "processor capability": torch.backends.cpu.get_cpu_capability(),
        "build": " ".join(line.strip() for line in torch.__config__.show().splitlines()),
    }


def _kernels() -> dict[str, str]:
    facts = {}
    for plugin in plugins_of("quire.ops"):
        spec = importlib.util.find_spec(plugin.point.module.partition(".")[0])
        folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
        builds = sorted(each.stem.removeprefix("kernels_") for folder in folders for each in folder.glob("*.so"))
        facts[plugin.name] = f"compiled: {', '.join(builds)}" if builds else "no compiled library"
    try:
        import torch

        from quire_ops import OpRequest, op_report
    except (ImportError, OSError) as error:
        return {**facts, "ops": f"unknown: {error}"}
    device = next((each.device_type for each in _platforms() if each.devices()), "cpu")
    by_backend: dict[str, list[str]] = {}
    refusals: dict[str, set[str]] = {}
    for choice in op_report(OpRequest(device=device, dtype=torch.bfloat16)):
        by_backend.setdefault(choice.backend, []).append(choice.op)
        if choice.backend in ("torch", "reference"):
            for name, reason in choice.refused.items():
                if name == "reference":
                    continue
                refusals.setdefault(name, set()).add(reason)
    facts |= {f"ops on {device} by {name}": ", ".join(ops) for name, ops in sorted(by_backend.items())}
    return facts | {f"not {name}": "; ".join(sorted(reasons)) for name, reasons in sorted(refusals.items())}


def _platforms() -> list[Platform]:
    """Those that have devices of their own. A plug-in that is broken is left out; it stands in another section."""
    found = [PLATFORMS["cuda"], PLATFORMS["rocm"]]
    for name in installed_plugins(GROUP):
        with contextlib.suppress(ConfigError):
            found.append(platform_of(name))
    return found


def _accelerators() -> dict[str, str]:
    facts = {}
    for tool, arguments in (
        ("nvidia-smi", ("--query-gpu=index,name,memory.total,driver_version,compute_cap", "--format=csv,noheader")),
        ("rocm-smi", ("--showproductname", "--showdriverversion")),
    ):
        if shutil.which(tool) is not None:
            facts[tool] = _output(tool, *arguments)
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        for platform in _platforms():
            facts |= platform.devices()
    return facts or {"none": "no GPU was found"}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return (done.stdout or done.stderr).strip()


def print_environment(*, as_json: bool) -> int:
    """Print all of it; the exit status."""
    sections = collect()
    if as_json:
        print(json.dumps(sections, indent=2))
        return 0
    for title, facts in sections.items():
        print(f"{title}:")
        for name, value in facts.items():
            print(f"  {name}: {value}")
        print()
    return 0
