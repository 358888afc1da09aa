"""Tiny configurations of architectures that turn images into tokens of their vocabulary."""

from __future__ import annotations

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.media_parts import text

__all__ = ["IMAGE_TOKEN_CASES"]

_CODES = range(16)
_EMU3_TOKENS = {"<image>": 190, "<|extra_200|>": 189, **{f"<|visual token {code:06d}|>": 100 + code for code in _CODES}}
_CHAMELEON_TOKENS = {
    "<image>": 190, **{f"IMGIMG{''.join(chr(65 + int(digit)) for digit in str(code))}Z": 100 + code for code in _CODES}
}  # fmt: skip

IMAGE_TOKEN_CASES: dict[str, ParityCase] = {
    "Emu3ForConditionalGeneration": ParityCase(
        config="Emu3Config",
        fields={
            "vocabulary_map": _EMU3_TOKENS,
            "text_config": text("emu3_text_model", attention_dropout=0.0),
            "vq_config": {
                "codebook_size": 16,
                "embed_dim": 4,
                "latent_channels": 4,
                "base_channels": 32,
                "channel_multiplier": [1, 2, 2],
                "num_res_blocks": 1,
                "attn_resolutions": [],
                "hidden_size": 64,
                "temporal_downsample_factor": 2,
            },
        },
    ),
    "ChameleonForConditionalGeneration": ParityCase(
        config="ChameleonConfig",
        fields={
            **text("chameleon"),
            "vocabulary_map": _CHAMELEON_TOKENS,
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 16,
                "latent_channels": 8,
                "resolution": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 2, 2],
                "num_res_blocks": 1,
            },
        },
    ),
}
"""Architecture -> its case."""
