"""Which weights the plan counts in the blocks of their files: those that the engine keeps so."""

from __future__ import annotations

import torch

from quire.block_weights import kept_blocks
from quire.config import QuireConfig
from quire_models.quantization_config import BLOCK_BYTES, GRID_TYPES
from quire_ops import OpRequest, op_table, ops
from quire_ops.block_formats import BLOCK_FORMATS


def test_blocks_are_counted_where_they_are_kept() -> None:
    served = op_table().choose(ops.block_linear, OpRequest(dtype=torch.bfloat16)).name != "reference"
    assert kept_blocks(QuireConfig.of(model="m")) == frozenset(BLOCK_BYTES if served else ())
    assert not kept_blocks(QuireConfig.of(model="m", disabled_linear_kernels=("block_linear",)))


def test_gpus_keep_blocks_without_grids() -> None:
    kept = kept_blocks(QuireConfig.of(model="m", device="cuda"))
    assert {"mxfp4", "nvfp4", "bitsandbytes4", "Q4_K", "IQ4_XS"} <= kept
    assert "IQ2_XS" not in kept
    assert {name for name, layout in BLOCK_FORMATS.items() if not layout.planes} == GRID_TYPES
    assert not kept_blocks(QuireConfig.of(model="m", device="cuda", disabled_linear_kernels=("block_linear",)))
