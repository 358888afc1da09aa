"""Which GGUF file of several is meant: of a folder, or of a repository on the hub.

Knows how files are named: `NAME-Q4_K_M.gguf`, `Q4_K_M/NAME-00001-of-00003.gguf`, and what lies beside models.
Free of torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from quire_interfaces import CheckpointError, read_json
from quire_models.gguf.header import first_part

__all__ = ["chosen_file", "holds_weights", "is_gguf_folder", "model_files", "parts_of", "quantization_of"]

_BESIDE_MODELS = ("mmproj", "imatrix")
"""What names of GGUF files begin with that are no models."""
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|FP32|MXFP4\w*))(?=[-./]|$)", re.IGNORECASE
)
_PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def model_files(names: Iterable[str]) -> list[str]:
    """Of these files those that hold a model, each by its first part."""
    paths = (PurePosixPath(name) for name in names)
    models = (path for path in paths if path.suffix == ".gguf" and not path.name.lower().startswith(_BESIDE_MODELS))
    return sorted({str(path.with_name(first_part(Path(path.name)).name)) for path in models})


def parts_of(first: str, names: Iterable[str]) -> list[str]:
    """Of these files the parts of one, the first included."""
    return [name for name in names if name.endswith(".gguf") and model_files([name]) == [first]]


def quantization_of(name: str) -> str:
    """ "x-Q4_K_M.gguf" -> "Q4_K_M"; the folder's where the file's name has none, "" where neither has."""
    path = PurePosixPath(name)
    for text in (_PART_SUFFIX.sub("", path.stem), path.parent.name):
        if found := _QUANTIZATION.findall(text):
            return str(found[-1]).upper()
    return ""


def chosen_file(where: str, files: list[str], tag: str | None) -> str:
    """The one file that a name means.

    Args:
        where: Name of the repository or folder.
        files: Its models, as `model_files` gives them.
        tag: Quantization or file that was named behind the colon, None where none was.

    Raises:
        CheckpointError: It is none of them, or could be several; the message lists them.
    """
    found = files if tag is None else _named(files, tag)
    if len(found) == 1:
        return found[0]
    kinds = sorted({quantization_of(name) for name in files} - {""})
    if found and len({quantization_of(name) for name in found}) < len(found):  # several of one quantization
        raise CheckpointError(
            f"{where} has {len(found)} GGUF files that this may mean: {', '.join(found)}; name one, for example "
            f"{where}:{found[0]}"
        )
    wanted = "" if tag is None else f", and none of {tag!r}"
    listed = ", ".join(kinds) or ", ".join(files)
    raise CheckpointError(
        f"{where} has {len(files)} GGUF files{wanted}: {listed}; name one, for example {where}:{(kinds or files)[0]}"
    )


def _named(files: list[str], tag: str) -> list[str]:
    def equals(name: str) -> bool:
        return tag in (name, PurePosixPath(name).name, PurePosixPath(name).stem)

    upper = tag.upper()
    exact = [name for name in files if equals(name) or quantization_of(name) == upper]
    return exact or [name for name in files if quantization_of(name).endswith(f"-{upper}")]


def holds_weights(folder: Path) -> bool:
    """Whether a folder has weights in another form than GGUF."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS)


def is_gguf_folder(folder: Path) -> bool:
    """Whether a folder was made from a GGUF file (`quire_models.gguf.folder`)."""
    path = folder / "config.json"
    quantization = read_json(path).get("quantization_config") if path.is_file() else None
    return isinstance(quantization, dict) and quantization.get("quant_method") == "gguf"
