"""Other engines that can be measured beside Quire: what each needs, whether it is here, how to get it.

Each is a program of `programs/` that runs in a process of its own, and in another interpreter where its libraries would
not go together with Quire's. Nothing of them is installed or shipped with this package.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire_interfaces import ConfigError

__all__ = ["OURS", "PEERS", "TASKS", "Engine", "PeerOptions", "PeerSpec", "find_engine", "find_peers", "has_module"]

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """What is known about an engine before looking for it."""

    programs: Mapping[str, str]
    """Task -> file in `programs/`."""
    install: str
    """How to get it, one line."""
    module: str | None = None
    """The Python package that must be there."""
    task_modules: Mapping[str, str] = field(default_factory=dict)
    """Task -> the package in the place of `module`."""
    executable: str | None = None
    """The command that must be there."""
    file_flag: str | None = None
    """The flag that names the checkpoint in this engine's own format, where it reads no other."""
    conversions: Mapping[str, str] = field(default_factory=dict)
    """Task -> how to make that file, one line."""


OURS = "quire"
TASKS = {
    "text": "text",
    "vision": "messages with images",
    "embed": "embeddings",
    "serve": "streams over HTTP",
    "speech": "recordings",
}
"""Task -> what a peer without a program for it does not do here."""
_OUR_PROGRAMS = {
    "text": "run_quire.py",
    "vision": "run_quire_vision.py",
    "embed": "run_quire_embed.py",
    "serve": "run_quire_server.py",
    "speech": "run_quire_speech.py",
}
_GGUF = dict.fromkeys(("text", "serve"), "convert the checkpoint with llama.cpp's convert_hf_to_gguf.py")

PEERS = {
    "transformers": PeerSpec(
        programs={
            "text": "run_transformers.py",
            "vision": "run_transformers_vision.py",
            "embed": "run_transformers_embed.py",
            "speech": "run_transformers_speech.py",
        },
        module="transformers",
        install="pip install transformers",
    ),
    "sentence-transformers": PeerSpec(
        programs={"embed": "run_sentence_transformers_embed.py"},
        module="sentence_transformers",
        install="pip install sentence-transformers",
    ),
    "onnxruntime": PeerSpec(
        programs={"embed": "run_onnxruntime_embed.py"},
        module="onnxruntime",
        install="pip install onnxruntime",
        file_flag="--onnx-model",
        conversions={"embed": "benchmarks/export_onnx.py CHECKPOINT FILE"},
    ),
    "vllm": PeerSpec(
        programs={
            "text": "run_vllm.py",
            "vision": "run_vllm_vision.py",
            "embed": "run_vllm_embed.py",
            "serve": "run_vllm_server.py",
        },
        module="vllm",
        install="install vLLM's build for processors as its documentation says",
    ),
    "llama.cpp": PeerSpec(
        programs={"text": "run_llama_cpp.py"},
        module="llama_cpp",
        install="pip install llama-cpp-python numpy (it compiles llama.cpp)",
        file_flag="--gguf",
        conversions=_GGUF,
    ),
    "llama-server": PeerSpec(
        programs={"text": "run_llama_server.py", "serve": "run_llama_server_streams.py"},
        executable="llama-server",
        install="build llama.cpp and put its llama-server on the PATH",
        file_flag="--gguf",
        conversions=_GGUF,
    ),
    "openvino": PeerSpec(
        programs={
            "text": "run_openvino.py",
            "vision": "run_openvino_vision.py",
            "embed": "run_openvino_embed.py",
            "speech": "run_openvino_speech.py",
        },
        module="openvino_genai",
        task_modules={"embed": "openvino"},
        install="pip install openvino-genai",
        file_flag="--openvino-model",
        conversions={
            "text": "optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past FOLDER",
            "vision": "optimum-cli export openvino --model CHECKPOINT --task image-text-to-text FOLDER",
            "embed": "optimum-cli export openvino --model CHECKPOINT --task feature-extraction FOLDER, or an ONNX file",
            "speech": "optimum-cli export openvino --model CHECKPOINT FOLDER",
        },
    ),
    "faster-whisper": PeerSpec(
        programs={"speech": "run_faster_whisper.py"},
        module="faster_whisper",
        install="pip install faster-whisper",
    ),
    "whisper.cpp": PeerSpec(
        programs={"speech": "run_whisper_cpp.py"},
        module="pywhispercpp",
        install="pip install pywhispercpp",
    ),
}
"""By the name that the command line takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """Where a user says that peers and their files are.

    Raises:
        ConfigError: a file, a folder or an interpreter that does not exist, or a peer that nobody knows.
    """

    pythons: Mapping[str, str] = field(default_factory=dict)
    """Peer -> interpreter that has it; this one where nothing is said."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Flag ("--gguf", "--onnx-model", "--openvino-model") -> file or folder."""

    def __post_init__(self) -> None:
        for flag, path in self.files.items():
            if not Path(path).exists():
                raise ConfigError(f"{flag} {path}: there is no such file or folder", field=flag.lstrip("-"))
        for name, python in self.pythons.items():
            if name not in PEERS:
                raise ConfigError(
                    f"--peer-python names {name!r}, but the peers are {', '.join(PEERS)}", field="peer_python"
                )
            if shutil.which(python) is None:
                raise ConfigError(f"--peer-python {name}={python}: there is no such program", field="peer_python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that is here and can be started."""

    name: str
    command: tuple[str, ...]
    file: str | None = None
    """The checkpoint in the engine's own format; None when it reads the checkpoint itself."""
    executable: str | None = None
    quantization: str | None = None
    """How Quire stores weights; None as the comparison says."""
    beside: str = OURS
    """The engine of ours that a peer is compared with."""

    @property
    def is_ours(self) -> bool:
        return self.name == self.beside


def find_engine(name: str, options: PeerOptions, task: str = "text") -> Engine | str:
    """The engine, or, in one line, what is missing and how to get it.

    Args:
        name: `OURS`, or a key of `PEERS`.
        task: A key of `TASKS`.
    """
    if name == OURS:
        return Engine(name=name, command=(sys.executable, str(PROGRAMS / _OUR_PROGRAMS[task])))
    spec = PEERS[name]
    if task not in spec.programs:
        return f"has no program for {TASKS[task]} here"
    python = options.pythons.get(name, sys.executable)
    executable = None
    module = spec.task_modules.get(task, spec.module)
    if module is not None and not _has_module(python, module):
        where = "" if python == sys.executable else f" in {python}"
        return f"not installed{where}; {spec.install}, or name an interpreter with --peer-python {name}=PYTHON"
    if spec.executable is not None:
        executable = shutil.which(spec.executable)
        if executable is None:
            return f"not installed; {spec.install}"
    file = None
    if spec.file_flag is not None:
        file = options.files.get(spec.file_flag)
        if file is None:
            return f"reads its own format only; {spec.conversions[task]}, and give it with {spec.file_flag}"
    command = (python, str(PROGRAMS / spec.programs[task]))
    return Engine(name=name, command=command, file=file, executable=executable)


def find_peers(
    names: list[str] | None, options: PeerOptions, task: str = "text"
) -> tuple[list[Engine], dict[str, str]]:
    """Peers to measure.

    Args:
        names: Those that must be there; None takes all that are.
        options: Where to look.
        task: A key of `TASKS`.

    Returns:
        Peers that are here, and peer -> what is missing for the others.

    Raises:
        ConfigError: an unknown name, or a named peer that is not here.
    """
    found: list[Engine] = []
    missing: dict[str, str] = {}
    for name in PEERS if names is None else dict.fromkeys(names):
        if name not in PEERS:
            raise ConfigError(f"peer must be one of {', '.join(PEERS)}, got {name!r}", field="peers")
        engine = find_engine(name, options, task)
        if isinstance(engine, Engine):
            found.append(engine)
        elif names is not None:
            raise ConfigError(f"the peer {name} cannot be measured: {engine}", field="peers")
        else:
            missing[name] = engine
    return found, missing


def has_module(name: str, options: PeerOptions) -> bool:
    """Whether the package of a peer that is one is here.

    Args:
        name: A key of `PEERS`.
        options: Where to look.
    """
    module = PEERS[name].module
    return module is not None and _has_module(options.pythons.get(name, sys.executable), module)


def _has_module(python: str, module: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", script], capture_output=True, timeout=60, check=False).returncode == 0
