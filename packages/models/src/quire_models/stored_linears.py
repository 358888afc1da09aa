"""What the headers of a checkpoint's files say and its config.json does not. Free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from quire_interfaces import CheckpointError, read_json
from quire_models.composite import LanguageNames
from quire_models.made_folder import is_mistral_format
from quire_models.quantization_config import QuantizationConfig
from quire_models.spec import NetworkSpec
from quire_models.stored_modules import StoredModule, TensorHeader, stored_modules

__all__ = [
    "check_towers",
    "has_tensor",
    "is_router",
    "plain_parameters",
    "quantized_linears",
    "stored_linears",
    "tower_parameters",
    "with_files",
    "with_stored_head",
]


_ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Names of parts that choose experts."""


def stored_linears(folder: Path, vocab_size: int, names: LanguageNames | None = None) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of every matrix that may be a linear layer's of the language model; embeddings, LM
    head and routed experts aside.

    Args:
        names: What the language model calls the tensors of a checkpoint of several modalities.
    """
    return {
        name.removesuffix(".weight"): (header.shape[0], header.shape[1])
        for name, header in _headers(folder)
        if name.endswith(".weight") and ".experts." not in name and "embed" not in name
        if len(header.shape) == 2 and header.shape[0] != vocab_size
        if names is None or names(name) is not None
    }


def is_router(name: str) -> bool:
    """Whether a layer chooses experts, or is a part of what does ("mlp.gate.wg"): whoever rounds its weights chooses
    others."""
    return not _ROUTERS.isdisjoint(name.split("."))


def quantized_linears(quantization: QuantizationConfig) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of every matrix that the files hold quantized, routed experts included."""
    forms = {name: quantization.of_layer(name) for name in quantization.held}
    return {name: quantization.held[name].matrix_shape(form) for name, form in forms.items() if form is not None}


def plain_parameters(quantization: QuantizationConfig, folder: Path) -> int:
    """Weights in the files that belong to no quantized layer, but for their biases."""
    quantized = {name for name, module in quantization.held.items() if not module.is_plain}
    total = 0
    for name, header in _headers(folder):
        module, _, part = name.partition(".weight.") if ".weight." in name else name.rpartition(".")
        if module not in quantized or part == "bias":
            total += math.prod(header.shape)
    return total


def has_tensor(folder: Path, name: str) -> bool:
    """Whether a file of the checkpoint has a tensor of this name; False where there are no files yet."""
    return any(found == name for found, _ in _headers(folder))


def with_stored_head(network: NetworkSpec, folder: Path, names: LanguageNames) -> NetworkSpec:
    """The network with an LM head of its own where a checkpoint of several modalities has one, and with the embedding
    as its head where it has none; as it is where there are no files yet. Such a checkpoint need not say which it is:
    each class begins with its own.

    Args:
        names: What the language model calls the tensors.
    """
    modules = {network.checkpoint.rename(names(name) or "").rpartition(".")[0] for name, _ in _headers(folder)}
    tied = network.head.name not in modules
    return replace(network, head=replace(network.head, tied=tied)) if modules else network


def tower_parameters(folder: Path, names: LanguageNames) -> int:
    """Weights in the files of a checkpoint of several modalities that are not the language model's.

    Args:
        names: What the language model calls its tensors.
    """
    return sum(math.prod(header.shape) for name, header in _headers(folder) if names(name) is None)


def check_towers(folder: Path, names: LanguageNames) -> None:
    """Have the towers of a checkpoint in floating point.

    Args:
        names: What the language model calls its tensors; the others are those of towers.

    Raises:
        CheckpointError: One is quantized; it is named.
    """
    for name, header in _headers(folder):
        if header.dtype in _NARROW and names(name) is None and name.endswith("weight"):
            raise CheckpointError(
                f"{folder}: {name} is quantized ({header.dtype}), and towers are read as they are; use a checkpoint "
                "whose towers are not quantized, or language_model_only"
            )


def with_files(
    quantization: QuantizationConfig | None,
    folder: Path,
    names: LanguageNames | None = None,
    rename: Callable[[str], str] | None = None,
) -> QuantizationConfig | None:
    """What the configuration says, with what the files hold.

    Args:
        names: What the language model calls the tensors of a checkpoint of several modalities; those of towers are left
            out.
        rename: Name of a tensor in the files -> what the network calls it, where these differ; modules are known under
            both.

    Raises:
        CheckpointError: The files hold quantized layers, and no configuration says how; or a file cannot be read.
    """
    if quantization is not None and quantization.layout == "gguf":
        return quantization
    headers = list(_headers(folder))
    if names is not None:
        headers = [(own, header) for name, header in headers if (own := names(name)) is not None]
    held = stored_modules(headers)
    if rename is not None and quantization is not None:
        held |= stored_modules((rename(name), header) for name, header in headers)
    if quantization is not None:
        if headers and not any(header.dtype in _NARROW for _, header in headers):
            return None  # a configuration that was kept when weights were widened, or one of how to load them
        return replace(quantization, held=held)
    quantized = next(((name, module) for name, module in held.items() if _is_quantized(module)), None)
    if quantized is not None:
        raise CheckpointError(
            f"{folder}: {quantized[0]} is quantized ({quantized[1]}), but neither quantization_config of config.json "
            f"nor a file beside it ({', '.join(QUANTIZATION_FILES)}) says how; get that file, too, or use the "
            "unquantized model"
        )
    return None


_NARROW = frozenset({"I32", "U32", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
"""Dtypes of quantized weights."""
_TOLD_APART = ("gptq", "awq", "packed", "torchao", "nvfp4", "mxfp4", "bitsandbytes4", "bitsandbytes8")
"""Layouts that nobody takes for a weight alone."""


def _is_quantized(module: StoredModule) -> bool:
    return not module.is_plain and any(module.fits(layout) for layout in _TOLD_APART)


QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Beside config.json, where GPTQ's, AWQ's and ModelOpt's tools wrote how a checkpoint is quantized."""


def _headers(folder: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Name of each tensor that is loaded, and what is said of it. CheckpointError: a file cannot be read."""
    return _mistral_headers(folder) if is_mistral_format(folder) else _stored_headers(folder)


def _mistral_headers(folder: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Under the names of Transformers."""
    from quire_models.mistral_format.names import checkpoint_name  # most starts do without

    return ((known, header) for name, header in _stored_headers(folder) if (known := checkpoint_name(name)))


def _stored_headers(folder: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Name of each tensor as it is in the files, and what is said of it. CheckpointError: a file cannot be read."""
    for file in _files(folder):
        try:
            with file.open("rb") as stream:
                num_bytes = int.from_bytes(stream.read(8), "little")
                if num_bytes > file.stat().st_size:
                    raise ValueError("its header is longer than the file")
                header = json.loads(stream.read(num_bytes))
            found = [(name, TensorHeader(entry["dtype"], tuple(entry["shape"])))
                     for name, entry in header.items() if name != "__metadata__"]  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; download the file again") from error
        yield from found


def _files(folder: Path) -> list[Path]:
    """The files that are loaded, as far as they are there: others may lie beside them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        names = names.values() if isinstance(names, dict) else ()
        listed = {folder / name for name in names if isinstance(name, str) and Path(name).name == name}
        return sorted(file for file in listed if file.is_file())
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
