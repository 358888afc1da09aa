"""Llama under other names: as first converted, and as Yi (01.AI 2024, arXiv:2403.04652) was first published."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.families.llama import spec
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec_of_first", "spec_of_yi"]


def spec_of_first(config: Fields) -> NetworkSpec:
    """`LLaMAForCausalLM`, whose context may be called `max_sequence_length`."""
    if config.get("max_position_embeddings") is None and config.get("max_sequence_length") is not None:
        config = config.named(max_position_embeddings="max_sequence_length")
    return spec(config)


def spec_of_yi(config: Fields) -> NetworkSpec:
    """`YiForCausalLM`, whose norms are called ln1 and ln2."""
    renamed = ((".ln1.", ".input_layernorm."), (".ln2.", ".post_attention_layernorm."))
    return replace(spec(config), checkpoint=CheckpointNames(renamed=renamed))
