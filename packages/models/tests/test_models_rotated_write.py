"""Networks give the same where an attention backend norms, rotates and writes in one as where the ops do it apart."""

from __future__ import annotations

import pytest
import torch
from models_paged_driver import PagedDriver

from quire_attention import Attention
from quire_models import ModelConfig, build_model

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FUSED = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Gemma3ForCausalLM": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    "StableLmForCausalLM": {"partial_rotary_factor": 0.5},
}
"""Architecture -> the rest of its configuration."""
CALLS = {"SmolLM3ForCausalLM": 1, "StableLmForCausalLM": 0}
"""How many layers can: those that rotate whole heads. Else both."""


def logits(architecture: str, backend: str) -> torch.Tensor:
    config = ModelConfig.from_dict({"architectures": [architecture], **SIZES, **FUSED[architecture]})
    model = build_model(config, dtype="float32", attention_backend=backend)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters:
        parameter.tensor = torch.randn(parameter.shape, generator=generator) * 0.4
    model.finish_loading()
    driver = PagedDriver(model, block_size=4, shuffle=True, num_tokens=64)
    sequence = driver.add([3, 14, 15, 9, 2, 6, 5, 3, 5, 8])
    driver.run(sequence, chunk=4)
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("architecture", FUSED)
def test_fused_is_apart(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = Attention.rope_and_write_kv

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(None)
        return fused(*args, **kwargs)

    monkeypatch.setattr(Attention, "rope_and_write_kv", counted)
    apart = logits(architecture, "torch")
    assert not calls
    together = logits(architecture, "reference")
    steps = 3
    assert len(calls) == CALLS.get(architecture, 2) * steps
    assert (together - apart).abs().max() <= 2e-5 * apart.abs().max()
