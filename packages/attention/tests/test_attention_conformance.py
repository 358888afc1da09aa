"""Both backends keep the contract of `AttentionBackend`."""

from __future__ import annotations

from quire_attention import AttentionBackend, select_attention_backend
from quire_ops import OpRequest
from quire_testkit.conformance.attention_backend import AttentionBackendSuite

REQUEST = OpRequest(sizes={"head_dim": 32, "queries_per_kv_head": 2})


class TestTorchBackend(AttentionBackendSuite):
    def make_backend(self) -> AttentionBackend:
        return select_attention_backend(REQUEST, "torch").backend


class TestReferenceBackend(AttentionBackendSuite):
    def make_backend(self) -> AttentionBackend:
        return select_attention_backend(REQUEST, "reference").backend
