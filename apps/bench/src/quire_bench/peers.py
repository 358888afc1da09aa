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

__all__ = ["OURS", "PEERS", "Engine", "PeerOptions", "PeerSpec", "find_engine", "find_peers"]

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """What is known about an engine before looking for it."""

    program: str
    """File in `programs/`."""
    install: str
    """How to get it, one line."""
    module: str | None = None
    """The Python package that must be there."""
    executable: str | None = None
    """The command that must be there."""
    file_flag: str | None = None
    """The flag that names the checkpoint in this engine's own format, where it reads no other."""
    convert: str = ""
    """How to make that file, one line."""
    vision_program: str = ""
    """File in `programs/` that answers messages with an image; empty for none."""
    vision_convert: str = ""
    """How to make the file of a model that sees, one line."""


OURS = "quire"
GGUF = "convert the checkpoint with llama.cpp's convert_hf_to_gguf.py"

PEERS = {
    "transformers": PeerSpec(
        program="run_transformers.py",
        module="transformers",
        install="pip install transformers",
        vision_program="run_transformers_vision.py",
    ),
    "vllm": PeerSpec(
        program="run_vllm.py",
        module="vllm",
        install="install vLLM's build for processors as its documentation says",
        vision_program="run_vllm_vision.py",
    ),
    "llama.cpp": PeerSpec(
        program="run_llama_cpp.py",
        module="llama_cpp",
        install="pip install llama-cpp-python numpy (it compiles llama.cpp)",
        file_flag="--gguf",
        convert=GGUF,
    ),
    "llama-server": PeerSpec(
        program="run_llama_server.py",
        executable="llama-server",
        install="build llama.cpp and put its llama-server on the PATH",
        file_flag="--gguf",
        convert=GGUF,
    ),
    "openvino": PeerSpec(
        program="run_openvino.py",
        module="openvino_genai",
        install="pip install openvino-genai",
        file_flag="--openvino-model",
        convert="optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past FOLDER",
        vision_program="run_openvino_vision.py",
        vision_convert="optimum-cli export openvino --model CHECKPOINT --task image-text-to-text FOLDER",
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
    """Flag ("--gguf", "--openvino-model") -> file or folder."""

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


def find_engine(name: str, options: PeerOptions, task: str = "text") -> Engine | str:
    """The engine, or, in one line, what is missing and how to get it.

    Args:
        name: `OURS`, or a key of `PEERS`.
        task: "text", or "vision" for an engine that answers messages with an image.
    """
    sees = task == "vision"
    if name == OURS:
        program = "run_quire_vision.py" if sees else "run_quire.py"
        return Engine(name=name, command=(sys.executable, str(PROGRAMS / program)))
    spec = PEERS[name]
    if sees and not spec.vision_program:
        return "has no program for messages with images here"
    python = options.pythons.get(name, sys.executable)
    executable = None
    if spec.module is not None and not _has_module(python, spec.module):
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
            convert = spec.vision_convert if sees else spec.convert
            return f"reads its own format only; {convert}, and give it with {spec.file_flag}"
    program = spec.vision_program if sees else spec.program
    return Engine(name=name, command=(python, str(PROGRAMS / program)), file=file, executable=executable)


def find_peers(
    names: list[str] | None, options: PeerOptions, task: str = "text"
) -> tuple[list[Engine], dict[str, str]]:
    """Peers to measure.

    Args:
        names: Those that must be there; None takes all that are.
        options: Where to look.
        task: "text" or "vision", what they have to do.

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


def _has_module(python: str, module: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", script], capture_output=True, timeout=60, check=False).returncode == 0
