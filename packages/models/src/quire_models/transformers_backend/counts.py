"""What the files of a checkpoint hold that Transformers runs, for planners. Free of torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from quire_models.config import ModelConfig
from quire_models.stored_linears import plain_parameters, quantized_linears, stored_linears, with_files
from quire_models.transformers_backend.config import stored_parameters

__all__ = ["with_counts"]


def with_counts(model: ModelConfig, folder: Path) -> ModelConfig:
    """The model with the number of its weights, its linear layers, and in which form each is stored.

    Raises:
        CheckpointError: A file cannot be read, or holds quantized layers of which no configuration says how.
    """
    linears = stored_linears(folder, model.vocab_size, model.language_names)
    quantization = with_files(model.quantization, folder)
    if quantization is None or not quantization.held:
        counted = stored_parameters(folder)
        return replace(model, quantization=quantization, stored_parameters=counted, stored_linears=linears)
    quantized = quantized_linears(quantization)
    plain = {name: shape for name, shape in linears.items() if quantization.held[name].is_plain}
    counted = plain_parameters(quantization, folder) + sum(map(math.prod, quantized.values()))
    kept = {name: shape for name, shape in quantized.items() if name.rpartition(".")[2] != "lm_head"}
    return replace(model, quantization=quantization, stored_parameters=counted, stored_linears={**plain, **kept})
