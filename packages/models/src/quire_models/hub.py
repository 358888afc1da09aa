"""From a model's name to a folder: local ones as they are, names of the Hugging Face hub or of ModelScope downloaded.

Free of torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from quire_interfaces import CheckpointError, ConfigError
from quire_models.gguf.choice import chosen_file, holds_weights, is_gguf_folder, model_files, parts_of
from quire_models.gguf.folder import gguf_folder
from quire_models.made_folder import WEIGHTS, is_mistral_format
from quire_models.unsupported import nearest_path_hint

__all__ = ["HUB_FILE_PATTERNS", "resolve_model"]

HUB_FILE_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.model",
    "*.model.v*",
    "*.jinja",
    "*.txt",
)
"""What is downloaded: configuration, tokenizer, chat template and safetensors weights."""

PICKLED_FILE_PATTERNS = (*(name for name in HUB_FILE_PATTERNS if name != "*.safetensors"), "pytorch_model*.bin")
"""The same with PyTorch's own files in the place of safetensors."""

CODE_FILE_PATTERNS = ("*.py", "*.tiktoken")
"""Code of the checkpoint's own, and what its tokenizers read, beside these."""

BIN_NAME = "model.bin"
"""Of weights in the format of CTranslate2."""
_VOCABULARIES = ("vocabulary.txt", "vocabulary.json")
"""Files of repositories in the format of CTranslate2, whose weights are not PyTorch's."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|[A-Za-z0-9][\w.-]*")
_TAGGED = re.compile(r"(.+):([\w.-]+(?:/[\w.-]+)*)")
"""A name with a quantization, or a file, behind a colon."""


def resolve_model(
    name_or_path: str | Path,
    revision: str | None = None,
    *,
    modelscope: bool = False,
    pickled: bool = False,
    with_code: bool = False,
    mistral: bool = False,
) -> Path:
    """The folder of a model.

    Args:
        name_or_path: A folder; a GGUF file, which gets one in the user's cache (`quire_models.gguf.folder`); or the
            name of a model on the hub ("owner/name"), which is downloaded into the hub's own cache (or found there,
            without network). A repository or folder with several GGUF files takes the quantization behind a colon
            ("owner/name:Q4_K_M"), or the file's name.
        revision: Branch, tag or commit on the hub; a local folder has none.
        modelscope: The hub is ModelScope, by the package `modelscope-hub`, not Hugging Face's. HF_HUB_OFFLINE holds for
            both.
        pickled: Download PyTorch's own weight files, not safetensors.
        with_code: Download code that the checkpoint brings, too.
        mistral: Read params.json and consolidated.safetensors (`quire_models.mistral_format`) where there are files in
            other formats, too.

    Raises:
        CheckpointError: No such folder, and not a hub name or not to be had: the message says what to do.
        ConfigError: `modelscope`, and the package is not installed.
    """
    path = Path(name_or_path).expanduser()
    if str(name_or_path) and path.exists():
        if revision is not None:
            raise CheckpointError(f"{str(name_or_path)!r} is local, which has no revision {revision!r}")
        if (path / BIN_NAME).is_file() and _is_ctranslate2(path):
            return _of_ctranslate2(path)
        gguf = _gguf_file(path)
        folder = path if gguf is None else gguf_folder(gguf)
    else:
        patterns = list(PICKLED_FILE_PATTERNS if pickled else HUB_FILE_PATTERNS)
        patterns += CODE_FILE_PATTERNS if with_code else ()
        other = "model*.safetensors" if mistral else WEIGHTS
        folder = _named_model(str(name_or_path), revision, patterns, other, modelscope=modelscope)
    if not mistral and (pickled or not is_mistral_format(folder)):
        return folder
    from quire_models.mistral_format.folder import mistral_folder  # most starts do without

    return mistral_folder(folder)


def _named_model(name: str, revision: str | None, patterns: list[str], other: str, *, modelscope: bool) -> Path:
    """The folder of a model that no path names: of GGUF files with a tag, or on the hub. Raises as `resolve_model`.

    Args:
        patterns: The files to download.
        other: Weights that many repositories have a second time, in a format that is not read then.
    """
    asked, tag = name, None
    if tagged := _TAGGED.fullmatch(name):
        name, tag = tagged[1], tagged[2]
        folder = Path(name).expanduser()
        if folder.is_dir():
            return gguf_folder(folder / chosen_file(name, _models_in(folder), tag))
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{asked!r} is no folder or GGUF file here, nor the name of a model on the hub (owner/name)"
            f"{nearest_path_hint(Path(name).expanduser())}"
        )
    if modelscope:
        if tag is not None:
            raise CheckpointError(
                f"{name}:{tag}: GGUF files are chosen by their quantization on Hugging Face's hub only; download the "
                "file and give its path"
            )
        return _from_modelscope(name, revision, patterns)
    if tag is None:
        for ignored in (other, None):
            folder = _from_hugging_face(name, revision, patterns, ignored)
            if holds_weights(folder):
                return folder
        if any((folder / each).is_file() for each in _VOCABULARIES):
            return _of_ctranslate2(_from_hugging_face(name, revision, [*patterns, BIN_NAME]))
    files, cached = _files_on_hugging_face(name, revision)
    if tag is None and not model_files(files):
        return folder
    first = chosen_file(name, model_files(files), tag)
    return gguf_folder((cached or _from_hugging_face(name, revision, parts_of(first, files))) / first)


def _is_ctranslate2(folder: Path) -> bool:
    from quire_models.ctranslate2.header import is_ctranslate2  # most starts do without

    return is_ctranslate2(folder)


def _of_ctranslate2(folder: Path) -> Path:
    from quire_models.ctranslate2.folder import ctranslate2_folder  # most starts do without

    return ctranslate2_folder(folder)


def _models_in(folder: Path) -> list[str]:
    """Of the folder, or where it has none of the folders in it, as repositories have one for each quantization."""
    found = [*folder.glob("*.gguf")] or [*folder.glob("*/*.gguf")]
    return model_files(file.relative_to(folder).as_posix() for file in found)


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that a folder without other weights has as its only one."""
    if path.is_file():
        if path.suffix != ".gguf":
            folder = f", {str(path.parent)!r}" if (path.parent / "config.json").is_file() else ""
            raise CheckpointError(
                f"{path} is a file; give the folder of a checkpoint{folder}, or a file that ends in .gguf"
            )
        return path
    if holds_weights(path) or is_gguf_folder(path):
        return None
    files = _models_in(path)
    if len(files) > 1:
        raise CheckpointError(f"{path} has {len(files)} GGUF files; give the path of one of them: {', '.join(files)}")
    return path / files[0] if files else None


def _files_on_hugging_face(name: str, revision: str | None) -> tuple[list[str], Path | None]:
    """Names of the repository's files; without network those that are in the cache here, and the folder there."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        return list(HfApi().list_repo_files(name, revision=revision)), None
    except Exception as error:  # the hub client raises its own, httpx's and OSErrors alike
        cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
        reference = cache / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision or "main"
        folder = cache / "snapshots" / commit
        if not folder.is_dir():
            raise CheckpointError(_advice(name, revision, f"{type(error).__name__}: {error}")) from error
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()], folder


def _from_hugging_face(name: str, revision: str | None, patterns: list[str], ignored: str | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
    except LocalEntryNotFoundError as error:
        cause = "it is not in the hub's cache here, and the hub cannot be reached"
        raise CheckpointError(_advice(name, revision, cause)) from error
    except Exception as error:  # the hub client raises its own, httpx's and OSErrors alike
        raise CheckpointError(_advice(name, revision, f"{type(error).__name__}: {error}")) from error


def _from_modelscope(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants

    try:
        from modelscope_hub.compat import snapshot_download  # modelscope's own would import torch
    except ImportError as error:
        raise ConfigError(
            f"use_modelscope needs the package modelscope-hub, which cannot be imported ({error}): "
            "pip install 'quire-models[modelscope]', or leave the setting out",
            field="use_modelscope",
        ) from error
    advice = {"hub": "ModelScope", "token": "MODELSCOPE_API_TOKEN"}
    if not constants.HF_HUB_OFFLINE:
        try:
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        except ConnectionError:
            pass  # unreachable: what is in the cache will do, as with Hugging Face's hub
        except Exception as error:  # the client raises its own, those of requests and OSErrors alike
            raise CheckpointError(_advice(name, revision, f"{type(error).__name__}: {error}", **advice)) from error
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:
        cause = "it is not in ModelScope's cache here, and ModelScope cannot be reached"
        raise CheckpointError(_advice(name, revision, cause, **advice)) from error


def _advice(name: str, revision: str | None, cause: str, *, hub: str = "the hub", token: str = "HF_TOKEN") -> str:
    at = f" at revision {revision!r}" if revision else ""
    return (
        f"cannot get model {name!r}{at} from {hub}: {cause}. Check the name and the network (a gated model needs "
        f"{token}), or download it elsewhere and pass its folder; there is no folder of this name here"
        f"{nearest_path_hint(Path(name))}"
    )
