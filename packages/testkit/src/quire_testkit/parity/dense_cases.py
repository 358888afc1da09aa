"""Parity cases of dense decoder-only architectures."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase

__all__ = ["DENSE_CASES"]

DENSE_CASES: dict[str, ParityCase] = {
    "LlamaForCausalLM": ParityCase(config="LlamaConfig"),
    "MistralForCausalLM": ParityCase(config="MistralConfig", fields={**LLAMA_FIELDS, "sliding_window": 20}),
    "Qwen2ForCausalLM": ParityCase(
        config="Qwen2Config",
        fields={**LLAMA_FIELDS, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "Qwen3ForCausalLM": ParityCase(config="Qwen3Config", fields={**LLAMA_FIELDS, "head_dim": 16}),
}
