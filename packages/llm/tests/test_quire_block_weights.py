"""Whether the plan counts weights in the blocks of their files: as the engine keeps them."""

from __future__ import annotations

import torch

from quire.block_weights import keeps_blocks
from quire.config import QuireConfig
from quire_ops import OpRequest, op_table, ops


def test_blocks_are_counted_where_they_are_kept() -> None:
    served = op_table().choose(ops.block_linear, OpRequest(dtype=torch.bfloat16)).name != "reference"
    assert keeps_blocks(QuireConfig.of(model="m")) == served
    assert not keeps_blocks(QuireConfig.of(model="m", disabled_linear_kernels=("block_linear",)))
    assert not keeps_blocks(QuireConfig.of(model="m", device="cuda"))
