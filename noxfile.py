"""Every task of the workspace: `uv run nox -l` lists them, `uv run nox -s NAME` runs one.

Sessions run in the environment that `uv run` keeps in step with the workspace; only the `alone-*` sessions make a clean
environment of their own, to prove that a package works with nothing but what it declares.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
MEMBERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
PACKAGES = {Path(member).name: member for member in MEMBERS}
TYPED = [
    "interfaces",
    "attention",
    "kv-cache",
    "kv-transfer",
    "scheduler",
    "sampling",
    "lora",
    "pooling",
    "distributed",
    "ops",
    "quantization",
    "renderers",
    "structured-output",
    "multimodal",
    "speech",
    "engine",
    "llm",
    "observability",
    "runner",
    "spec-decode",
    "testkit",
    "models",
    "server",
    "kernels-cpu",
    "kernels-cuda",
    "kernels-rocm",
]
PYTHONS = ("3.11", "3.12", "3.13")
"""Versions that wheels are tried with."""
ALONE_TOOLS = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]

# Images of Python often set it. Then each of the thousand processes that tests start compiles torch and Transformers
# anew, and pytest rewrites every test file for every worker: a third of the processors' time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "imports", "types", "tests"]


def python(session: nox.Session, *args: str, **env: str) -> None:
    session.run(sys.executable, *args, env={**os.environ, **env}, external=True)


@nox.session
def serve(session: nox.Session) -> None:
    """Serve a model: `nox -s serve -- MODEL --port 8000`."""
    python(session, "-m", "quire_server.cli", "serve", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, floors, types, then every test of every package."""
    lint(session)
    imports(session)
    types(session)
    # Workers with one thread each: torch's own threads would fight over small machines. Where tests ask for more, one
    # that spun at a barrier would keep the other from its core. A third of the time tests wait for processes and
    # timers, so that three workers fill two cores.
    arguments = ("-m", "pytest", "-n", "3", "--dist", "worksteal", *session.posargs)
    python(session, *arguments, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")


def _package_tests(name: str, member: str) -> None:
    @nox.session(name=f"tests-{name}")
    def run(session: nox.Session) -> None:
        python(session, "-m", "pytest", member, *session.posargs)

    @nox.session(name=f"alone-{name}", venv_backend="uv")
    def alone(session: nox.Session) -> None:
        project = tomllib.loads((ROOT / member / "pyproject.toml").read_text())
        groups = project.get("dependency-groups", {})
        if "tests" in groups:
            session.install("--group", f"{member}/pyproject.toml:tests", "-c", "requirements.lock")
        session.install(f"./{member}", *ALONE_TOOLS, "-c", "requirements.lock")
        session.run("python", "-m", "pytest", "--confcutdir", member, member, *session.posargs)


for _name, _member in PACKAGES.items():
    _package_tests(_name, _member)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types of the public packages."""
    modules = [next((ROOT / PACKAGES[name] / "src").iterdir()).name for name in TYPED]
    python(session, "-m", "mypy", *(f"-p={module}" for module in modules))


@nox.session
def imports(session: nox.Session) -> None:
    """Who may import whom (the contracts stand in pyproject.toml)."""
    session.run("lint-imports", external=True)


@nox.session(name="kernels-cpu")
def kernels_cpu(session: nox.Session) -> None:
    """Compare the CPU kernels with their references: every build, emulated where this processor does not run it."""
    compiling = ("-m", "quire_kernels_cpu.compiler", "supported")  # a source tree has only the best of them
    session.run(sys.executable, *compiling, external=True, success_codes=[0, 1])  # 1: there is no compiler
    asked = "from quire_kernels_cpu.builds import build_name; print(build_name())"
    runs: dict[str, str] = {}  # what is tested -> what QUIRE_CPU_KERNELS says of it
    for build in ("avx2", "avx512", "avx512vnni", "avx512bf16", "amx"):
        environment = {**os.environ, "QUIRE_CPU_KERNELS": build}
        best = session.run(sys.executable, "-c", asked, env=environment, external=True, silent=True)
        if best is not None and best.strip() == build:
            runs[f"the build {build}"] = build
    emulation = runpy.run_path(str(ROOT / "kernels-cpu/tests/kernels_cpu_emulation.py"))
    others = [build for build in emulation["EMULATED"] if build not in runs.values()]
    if "avx2" not in runs.values():
        session.log(f"emulating {', '.join(others)} needs a processor that runs the build avx2")
    elif others and shutil.which("g++") is None:
        session.log(f"emulating {', '.join(others)} needs g++")
    else:
        compiled = emulation["compile_builds"](others, Path(session.create_tmp()))
        runs |= {f"the build {build}, emulated": str(path) for build, path in compiled.items()}
    for what, chosen in runs.items():
        session.log(what)
        # Of the ops' own tests those whose backend is "cpu": experts and states have no others.
        tested = ("kernels-cpu", "packages/ops", "-k", "cpu")
        arguments = ("-m", "pytest", "-n", "2", "--dist", "worksteal", *tested, *session.posargs)
        # Tests have two threads each: while one spun at a barrier, the one that it waits for would have no core.
        python(session, *arguments, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", QUIRE_CPU_KERNELS=chosen)


@nox.session(name="kernels-cpu-aarch64")
def kernels_cpu_aarch64(session: nox.Session) -> None:
    """Cross-compile the CPU kernels for 64-bit Arm and compare them with plain loops under an emulator."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        session.skip(
            "needs aarch64-linux-gnu-g++ and qemu-aarch64-static (Debian: g++-aarch64-linux-gnu, qemu-user-static)"
        )
    folder, program = ROOT / "kernels-cpu", Path(session.create_tmp()) / "check_kernels"
    sources = [folder / "src/quire_kernels_cpu/csrc/kernels.cpp", folder / "tests/check_kernels.cpp"]
    recipe = runpy.run_path(str(folder / "src/quire_kernels_cpu/compilation.py"))
    for build, target in recipe["AARCH64_BUILDS"].items():
        session.log(f"the build {build}")
        flags = [*recipe["FLAGS"], *target, "-Wall", "-Wextra", "-Werror"]
        session.run(compiler, *flags, *map(str, sources), "-o", str(program), external=True)
        # The emulator's processor with vectors of 256 bits: 2 times 128.
        processor = [emulator, "-cpu", "max,sve-max-vq=2", "-L", "/usr/aarch64-linux-gnu"]
        session.run(*processor, str(program), env={"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}, external=True)


def _gpu_kernels(session: nox.Session, name: str) -> None:
    """Tests of a package of GPU kernels, on a GPU if there is one, else under Triton's interpreter; then the builds."""
    package = f"quire_{name.replace('-', '_')}"
    python(session, "-m", "pytest", "-n", "2", "--dist", "worksteal", name, *session.posargs, OMP_NUM_THREADS="1")
    python(session, "-m", f"{package}.ahead_of_time", "--changed")


@nox.session(name="kernels-cuda")
def kernels_cuda(session: nox.Session) -> None:
    """Prove the kernels for NVIDIA GPUs: against references, and built for every target."""
    _gpu_kernels(session, "kernels-cuda")


@nox.session(name="kernels-rocm")
def kernels_rocm(session: nox.Session) -> None:
    """Prove the kernels for AMD GPUs: against references, and built for every target."""
    _gpu_kernels(session, "kernels-rocm")


GPU_MACHINE = ("3.12", "torch==2.11.*", "triton==3.6.*")
"""Python, torch and Triton of the machine that `gpu_check.py` was first run on (docs/gpu.md)."""


@nox.session(name="gpu-check")
def gpu_check(session: nox.Session) -> None:
    """Run the kernels' tests as `gpu_check.py` does on a GPU that is lent for a short time: in a bare checkout, with
    that machine's versions, under Triton's interpreter. Downloads gigabytes, so it is not part of CI; skipped where the
    versions cannot be had. Arguments go to `uv pip install`: `nox -s gpu-check -- --torch-backend cpu` saves most."""
    version, *packages = GPU_MACHINE
    environment = Path(session.create_tmp()) / "environment"
    interpreter = environment / "bin/python"
    # Triton 3.6's interpreter makes numbers of arrays with one element, which NumPy 2.4 refuses.
    tools = ["transformers>=5", "numpy<2.4", "safetensors", "pytest", "pytest-xdist", "hypothesis"]
    try:
        session.run("uv", "venv", "--quiet", "--clear", "--python", version, str(environment), external=True)
        install = ["uv", "pip", "install", "--quiet", "--python", str(interpreter), *packages, *tools]
        session.run(*install, *session.posargs, external=True)
    except nox.command.CommandFailed:
        session.skip(f"Python {version} with {' and '.join(packages)} cannot be had here")
    command = ["apps/bench/benchmarks/gpu_check.py", "tests", "--device", "cpu", "--tests-limit-s", "3000"]
    bare = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    session.run(str(interpreter), *command, env=bare, external=True)


@nox.session
def hosts(session: nox.Session) -> None:
    """Ranks on two network namespaces as two hosts, alone and of a served model, over links that are delayed, lossy and
    cut; needs root."""
    python(session, "packages/distributed/tests/two_hosts.py", *session.posargs)
    python(session, "apps/server/tests/two_hosts_served.py")


@nox.session
def examples(session: nox.Session) -> None:
    """Run the examples and every README's python blocks."""
    python(session, "-m", "pytest", "tests/test_readme_examples.py", "tests/test_examples.py", *session.posargs)


@nox.session(venv_backend="uv")
def docs(session: nox.Session) -> None:
    """Build the documentation site into build/site; `nox -s docs -- serve` shows it while you write."""
    session.install("--group", "docs", "-c", "requirements.lock")
    asked = session.posargs or ["build"]
    session.run("python", "-m", "mkdocs", asked[0], "--strict", *asked[1:], env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def agents(session: nox.Session) -> None:
    """Run today's coding agents, from the npm registry, against a server whose model is scripted. Needs Node.js and the
    registry: without them the scenarios are skipped, which is said aloud."""
    scenarios = ("apps/server/agents", "-o", "python_files=*_scenarios.py")
    python(session, "-m", "pytest", *scenarios, *session.posargs, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")


def _install_browser(session: nox.Session) -> None:
    """Chromium and its driver, as packages of Debian or Ubuntu; skips the session where they cannot be had."""
    if shutil.which("chromedriver") is not None:
        return
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        session.skip("NO BROWSER: install chromium and chromedriver (apt-get, as root, would have been asked for them)")
    options = ("-qq", "-y", "--no-install-recommends")
    session.run(apt, "update", "-qq", external=True, success_codes=range(256))
    session.run(apt, "install", *options, "chromium", "chromium-driver", external=True, success_codes=range(256))
    if shutil.which("chromedriver") is None:
        session.skip("NO BROWSER: apt-get did not install chromium and chromium-driver")


@nox.session
def browser(session: nox.Session) -> None:
    """Test the chat page in headless Chromium, which is installed first where apt-get may; otherwise skipped, aloud."""
    _install_browser(session)
    arguments = ("-m", "pytest", "apps/server/tests/browser", *session.posargs)
    python(session, *arguments, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", QUIRE_REQUIRE_BROWSER="1")


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks: `nox -s bench -- throughput --help`."""
    python(session, "-m", "quire_server.cli", "bench", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every wheel, install all in a clean environment of each Python that is here, and let the demo model answer;
    not part of CI. Arguments go to `uv pip install`: `nox -s wheels -- --torch-backend cpu` saves gigabytes."""
    folder = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    for member in MEMBERS:
        session.run("uv", "build", "--quiet", "--wheel", member, "--out-dir", str(folder), external=True)
    built = sorted(map(str, folder.glob("*.whl")))
    served = []
    for version in PYTHONS:
        environment = Path(session.create_tmp()) / f"python-{version}"
        shutil.rmtree(environment, ignore_errors=True)
        made = session.run(
            "uv", "venv", "--quiet", "--python", version, str(environment), external=True,
            success_codes=[0, 1, 2], silent=True,
        )  # fmt: skip
        python_there = environment / "bin" / "python"
        if not python_there.exists():
            session.warn(f"NO PYTHON {version}, so that the wheels are not tried with it: {made}")
            continue
        install = ("uv", "pip", "install", "--quiet", "--python", str(python_there), *session.posargs, *built)
        session.run(*install, external=True)
        session.run(str(python_there), "-I", "tests/wheels_serve.py", "8769", external=True)
        shutil.rmtree(environment)  # each takes as much disk as torch does
        served.append(version)
    if not served:
        session.error(f"none of Python {', '.join(PYTHONS)} is here")


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve the newest versions; write them to requirements.lock (hashes, no index addresses) and pyproject.toml."""
    constraints = re.compile(r"(?<=^constraint-dependencies = \[\n).*?(?=^\])", re.MULTILINE | re.DOTALL)
    project = ROOT / "pyproject.toml"
    kept = project.read_text()
    project.write_text(constraints.sub("", kept))
    try:
        session.run("uv", "lock", "--quiet", "--upgrade", external=True)
        session.run(
            "uv", "export", "--quiet", "--all-packages", "--all-groups", "--no-emit-workspace", "--no-annotate",
            "--no-header", "--output-file", "requirements.lock", external=True,
        )  # fmt: skip
    except BaseException:
        project.write_text(kept)
        raise
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.removesuffix(" \\") for line in lines if not line.startswith(" ")]
    project.write_text(constraints.sub(lambda _: "".join(f'    "{pin}",\n' for pin in pins), kept))
    session.run("uv", "lock", "--quiet", external=True)


@nox.session
def mutants(session: nox.Session) -> None:
    """Whether each package's tests notice the mutations of tests/mutants/mutations.toml; not part of CI."""
    python(session, "tests/mutants/run.py", *session.posargs)


@nox.session
def schemathesis(session: nox.Session) -> None:
    """Requests bred from the API's own document, to every operation of a server of the demo model: none may end in a
    5xx or a hang. `nox -s schemathesis -- 10000` sends as many; tests/fuzz/run.py says what else it takes."""
    python(session, "tests/fuzz/run.py", *session.posargs)
