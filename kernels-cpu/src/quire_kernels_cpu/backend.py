"""What the kernels have in common as backends of ops: `@backend_for(op)` makes a function one of them."""

from __future__ import annotations

from typing import Any

from quire_interfaces import FP8_DS_MLA
from quire_kernels_cpu.dtypes import DTYPES
from quire_ops import BackendSet, SizeRule

__all__ = [
    "ATTENTION_FACTS",
    "LAYER_FACTS",
    "MAX_HEAD_DIM",
    "MAX_KEY_HEAD_DIM",
    "MAX_QUERIES_PER_KV_HEAD",
    "MAX_TAPS",
    "backend_for",
]

MAX_HEAD_DIM = 256
MAX_QUERIES_PER_KV_HEAD = 64
MAX_KEY_HEAD_DIM = 256
"""Of the delta rule: kMaxKey of `csrc/recurrent.h`."""
MAX_TAPS = 8
"""Of a convolution: kMaxTaps there."""
ATTENTION_FACTS: dict[str, Any] = {
    "sizes": {
        "head_dim": SizeRule(maximum=MAX_HEAD_DIM),
        "queries_per_kv_head": SizeRule(maximum=MAX_QUERIES_PER_KV_HEAD),
    },
    "cache_dtypes": frozenset({"fp8_e4m3", "fp8_e5m2", "int8", "int4"}),
}
"""Fields of `OpBackend` for whatever attends over a paged cache of keys and values."""

LAYER_FACTS: dict[str, Any] = {
    **ATTENTION_FACTS,
    "sizes": ATTENTION_FACTS["sizes"]
    | {"taps": SizeRule(maximum=MAX_TAPS), "key_head_dim": SizeRule(maximum=MAX_KEY_HEAD_DIM)},
    "cache_dtypes": ATTENTION_FACTS["cache_dtypes"] | {FP8_DS_MLA},
}
"""Fields of `OpBackend` for whatever computes whole layers: of the largest that the kernels of each mixer take."""

backend_for = BackendSet("cpu", priority=10, devices=frozenset({"cpu"}), dtypes=frozenset(DTYPES), batch_invariant=True)
"""The result of a row depends neither on how many rows there are nor on its place among them."""
