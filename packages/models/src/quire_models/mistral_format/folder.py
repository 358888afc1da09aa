"""A folder in Mistral AI's own format opened as a checkpoint of Transformers. Free of torch.

Everything that reads checkpoints reads config.json; so what params.json says is written once as that, into the user's
cache, beside links to weights and tokenizer, and found there by the files' place, size and time.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire_interfaces import CheckpointError, Fields, read_json
from quire_models.config import ModelConfig
from quire_models.made_folder import PARAMS, WEIGHTS, made_folder, write_made_folder
from quire_models.mistral_format.config import config_values, in_names_of_params

__all__ = ["INDEX", "MISTRAL_FILES", "mistral_folder", "mistral_notes"]

INDEX = "consolidated.safetensors.index.json"
_VERSION = "1"
"""Of what is written; another one makes a new folder."""
_NOTES = "params_notes.json"
MISTRAL_FILES = (PARAMS, _NOTES)
"""What says of weights in this format what they are."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_OURS = ("config.json", "model.safetensors.index.json")
_SENTENCEPIECE = "tokenizer.model"
_BESIDE = ("*.json", "tokenizer.model*", "*.jinja", "*.txt", WEIGHTS)


def mistral_folder(folder: Path) -> Path:
    """The folder that stands for one of this format, written when there is none yet.

    Raises:
        CheckpointError: no network that is known, files that cannot be read, or no place to write to.
    """
    folder = folder.absolute()
    if (folder / _NOTES).is_file():
        return folder
    params, weights = folder / PARAMS, sorted(folder.glob(WEIGHTS))
    if not params.is_file() or not weights:
        raise CheckpointError(
            f"{folder} is not in Mistral's own format, which is {PARAMS} beside {WEIGHTS}; leave load_format 'mistral' "
            "out"
        )
    beside = {path.name: path for pattern in _BESIDE for path in sorted(folder.glob(pattern))}
    links = {name: path for name, path in beside.items() if name not in _OURS}
    versioned = sorted(name for name in links if name.startswith(f"{_SENTENCEPIECE}.v"))
    if versioned:  # as tokenizers of sentencepiece are called beside params.json
        links.setdefault(_SENTENCEPIECE, links[versioned[-1]])
    made = made_folder("mistral", _VERSION, links.values(), folder.name or "model")
    if (made / _NOTES).exists():
        return made
    found = config_values(Fields(read_json(params), str(params)))
    try:
        ModelConfig.from_dict(found.values, source=str(params))
    except CheckpointError as error:
        raise CheckpointError(in_names_of_params(str(error))) from error
    contents = {
        "config.json": {**found.values, "dtype": _stored_dtype(weights[0])},
        _NOTES: {"unread": found.unread, "towers": found.towers},
    }
    write_made_folder(made, contents, {PARAMS: params, **links}, _NOTES)
    return made


def mistral_notes(folder: Path) -> list[str]:
    """What params.json says and the network does not do, of a folder that was made of one; nothing of others."""
    if not (folder / _NOTES).is_file():
        return []
    said = read_json(folder / _NOTES)
    notes = [f"fields of {PARAMS} that are not read: {', '.join(said['unread'])}"] if said["unread"] else []
    if said["towers"]:
        notes.append(
            f"media are not served: towers of {PARAMS} ({', '.join(said['towers'])}) are not read; texts are served"
        )
    return notes


def _stored_dtype(file: Path) -> str:
    """The dtype that most of a file's norms and biases are kept in, which is that of what is not quantized."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        dtypes = [entry["dtype"] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; download the file again") from error
    known = [_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES and dtype != "F32"]
    return max(set(known), key=known.count) if known else "float32"
