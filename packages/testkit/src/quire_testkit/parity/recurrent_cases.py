"""Parity cases of architectures with recurrent layers: state space, linear attention, short convolution, and hybrids.

Their logits are held to 1e-3: a prompt's tokens go through the state one by one or in chunks, which Transformers and
Quire cut differently, and every later token reads what was rounded on the way.
"""

from __future__ import annotations

from quire_testkit.parity.case import ParityCase

__all__ = ["RECURRENT_CASES"]

RECURRENT_CASES: dict[str, ParityCase] = {
    "Mamba2ForCausalLM": ParityCase(
        config="Mamba2Config",
        fields={
            "vocab_size": 200,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 2,
            "chunk_size": 32,
        },
        tolerance=1e-3,
    ),
}
