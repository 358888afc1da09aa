"""Which attention backend is chosen, and what the report says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from quire_attention import AttentionBackend, attention_backend_names, select_attention_backend
from quire_interfaces import ConfigError
from quire_ops import OpRequest, builtin_table, op_table, ops

REQUEST = OpRequest(
    sizes={"head_dim": 64, "queries_per_kv_head": 2, "block_size": 16},
    features=frozenset({"sliding_window", "soft_cap", "sinks", "alibi"}),
)

UNAVAILABLE = {
    backend.name: backend.unavailable
    or (None if backend.devices is None or "cpu" in backend.devices else "runs on cuda, not on cpu")
    for backend in op_table().backends(ops.paged_attention)
}
"""Name -> why it cannot work in this process, or not on the CPU, or None."""


def test_fused_backend_comes_first() -> None:
    choice = select_attention_backend(REQUEST)
    available = [name for name in attention_backend_names() if UNAVAILABLE[name] is None]
    assert choice.backend.name == available[0] != "reference"
    assert choice.refused["reference"].startswith(f"{choice.backend.name} comes first (priority")


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
        AttentionBackend("fast", op_table())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (replace(REQUEST, dtype=torch.int8), "torch: takes bfloat16, float16, float32, not int8"),
        (replace(REQUEST, dtype=torch.float64), "torch: takes bfloat16, float16, float32, not float64"),
    ],
)
def test_nothing_can_serve(request_: OpRequest, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as raised:
        select_attention_backend(request_, "torch")
    assert raised.value.field == "attention_backend"


def test_functions_are_those_of_the_ops() -> None:
    table = builtin_table()
    torch_backend = AttentionBackend("torch", table)
    assert torch_backend.paged_attention is table.named(ops.paged_attention, "torch").function
    assert torch_backend.write_kv_cache is table.named(ops.write_kv_cache, "torch").function
    assert torch_backend.rope_and_write_kv is None
    assert AttentionBackend("reference", table).rope_and_write_kv is ops.rope_and_write_kv.reference
