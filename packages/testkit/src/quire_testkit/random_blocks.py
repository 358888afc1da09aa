"""Random weights in blocks, as op `block_linear` takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_ops.block_formats import BLOCK_FORMATS, block_header

__all__ = ["random_blocks"]

_HALVES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}
"""Format -> where a block has numbers in float16."""


def random_blocks(form: str, outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any bits, with scales of moderate size: weight [outputs, bytes of a row] uint8, header."""
    generator, layout = torch.Generator().manual_seed(seed), BLOCK_FORMATS[form]
    weight = torch.randint(0, 256, (outputs, layout.row_bytes(inputs)), dtype=torch.uint8, generator=generator)
    blocks = weight.view(-1, layout.num_bytes)
    scales = torch.rand(len(blocks), 2, generator=generator) * 0.01
    constants = None
    if form == "MXFP4":
        blocks[:, 0] = torch.randint(112, 120, (len(blocks),), generator=generator, dtype=torch.uint8)
    elif form == "NVFP4":
        blocks[:, :2] = (scales * 300).to(torch.float8_e4m3fn).view(torch.uint8)
        constants = torch.tensor([0.013, 0.0] if seed % 2 else [77.0, 1.0])
    elif form == "TABLE4":
        blocks[:, :4] = scales[:, :1].contiguous().view(torch.uint8)
        constants = torch.linspace(-1, 1, 16) ** 3
    elif form == "IQ1_M":  # four bits of the scale on top of each of four words
        words, bits = blocks[:, 48:].contiguous().view(torch.int16), scales[:, 0].half().view(torch.int16)
        top = torch.stack([bits << 12, bits << 8, bits << 4, bits], dim=1) & -4096
        blocks[:, 48:] = (words & 4095 | top).view(torch.uint8)
    else:
        for number, begin in enumerate(_HALVES_AT.get(form, (0,))):
            blocks[:, begin : begin + 2] = scales[:, number].half()[:, None].view(torch.uint8)
    if layout.grid:
        entries = torch.randint(1, 63, (2048 if form.startswith("IQ1") else 1024, layout.grid), generator=generator)
        constants = entries.to(torch.int8).flatten().view(torch.float32)
    return weight, block_header(form, constants)
