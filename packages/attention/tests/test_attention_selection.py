"""Which attention backend is chosen, and what the report says."""

from __future__ import annotations

import re

import pytest
import torch

from quire_attention import (
    AttentionAbilities,
    AttentionRequest,
    OpsAttentionBackend,
    attention_backend_names,
    select_attention_backend,
)
from quire_interfaces import ConfigError
from quire_ops import op_table, ops

REQUEST = AttentionRequest(
    head_dim=64, num_heads=4, num_kv_heads=2, sliding_window=True, soft_cap=True, sinks=True, alibi=True, block_size=16
)

UNAVAILABLE = {
    backend.name: backend.unavailable
    or (None if backend.devices is None or "cpu" in backend.devices else "does not run on cpu")
    for backend in op_table().backends(ops.paged_attention)
}
"""Name -> why it cannot work in this process, or not on the CPU, or None."""


def test_fused_backend_comes_first() -> None:
    choice = select_attention_backend(REQUEST)
    available = [name for name in attention_backend_names() if UNAVAILABLE[name] is None]
    assert choice.backend.name == available[0] != "reference"
    assert choice.refused["reference"] == f"{choice.backend.name} comes first"


@pytest.mark.parametrize("name", attention_backend_names())
def test_backend_by_name(name: str) -> None:
    if (reason := UNAVAILABLE[name]) is not None:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            select_attention_backend(REQUEST, name)
        return
    choice = select_attention_backend(REQUEST, name)
    assert choice.backend.name == name
    assert set(choice.refused) == set(attention_backend_names()) - {name}


def test_unknown_name_lists_the_choices() -> None:
    with pytest.raises(
        ConfigError, match=f"no attention backend 'fast'; choose one of {', '.join(attention_backend_names())}"
    ):
        select_attention_backend(REQUEST, "fast")
    with pytest.raises(ConfigError, match="no backend 'fast'"):
        OpsAttentionBackend("fast", op_table())


def test_nothing_can_serve() -> None:
    request = AttentionRequest(head_dim=64, num_heads=4, num_kv_heads=2, dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"no attention backend can serve .*torch: does not compute in torch\.int8"):
        select_attention_backend(request)


@pytest.mark.parametrize(
    ("abilities", "reason"),
    [
        (AttentionAbilities(devices=frozenset({"cuda"})), "does not run on cpu"),
        (AttentionAbilities(dtypes=frozenset({torch.float16})), "does not compute in torch.float32"),
        (AttentionAbilities(cache_dtypes=frozenset({"float16"})), "does not read a float32 cache"),
        (AttentionAbilities(block_sizes=frozenset({32, 64})), "does not take block size 16, only 32, 64"),
        (AttentionAbilities(head_dims=frozenset({128})), "does not take head dimension 64, only 128"),
        (AttentionAbilities(sliding_window=False), "has no sliding window"),
        (AttentionAbilities(soft_cap=False), "has no soft cap"),
        (AttentionAbilities(sinks=False), "has no attention sinks"),
        (AttentionAbilities(alibi=False), "has no ALiBi slopes"),
        (AttentionAbilities(), None),
    ],
)
def test_abilities(abilities: AttentionAbilities, reason: str | None) -> None:
    assert abilities.refusal(REQUEST) == reason
