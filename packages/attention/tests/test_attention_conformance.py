"""Both backends keep the contract of `AttentionBackend`."""

from __future__ import annotations

from quire_attention import AttentionBackend, AttentionRequest, select_attention_backend
from quire_testkit.conformance.attention_backend import AttentionBackendSuite

REQUEST = AttentionRequest(head_dim=32, num_heads=4, num_kv_heads=2)


class TestTorchBackend(AttentionBackendSuite):
    def make_backend(self) -> AttentionBackend:
        return select_attention_backend(REQUEST, "torch").backend


class TestReferenceBackend(AttentionBackendSuite):
    def make_backend(self) -> AttentionBackend:
        return select_attention_backend(REQUEST, "reference").backend
