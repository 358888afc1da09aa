"""Choosing backends: priorities, refusals with reasons, entry points, unknown names."""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint

import pytest
import torch

from quire_interfaces import ConfigError
from quire_interfaces.plugins import Plugin
from quire_ops import (
    BackendSet,
    OpBackend,
    OpRequest,
    SizeRule,
    backends,
    bind,
    builtin_table,
    implements,
    op,
    op_report,
    op_table,
    ops,
)
from quire_ops.ops import op_named


@op
def batch_norm(x: torch.Tensor) -> torch.Tensor:
    return x


def fast(**facts) -> OpBackend:
    return OpBackend(**{"op": ops.rms_norm, "name": "fast", "function": lambda x, w, eps: x, "priority": 10, **facts})


def test_formats_of_the_cache_are_part_of_a_request() -> None:
    plain = OpBackend(op=ops.paged_attention, name="x", function=print, cache_dtypes=frozenset({"int8"}))
    assert plain.refusal(OpRequest(dtype=torch.bfloat16)) is None
    assert plain.refusal(OpRequest(dtype=torch.bfloat16, cache_dtype="bfloat16")) is None
    assert plain.refusal(OpRequest(cache_dtype="int8")) is None
    assert plain.refusal(OpRequest(cache_dtype="fp8_e4m3")) == "reads no fp8_e4m3 KV cache"
    assert plain.refusal(OpRequest(cache_dtype="bfloat16")) == "reads no bfloat16 KV cache"
    every = OpBackend(op=ops.paged_attention, name="x", function=print)
    assert every.refusal(OpRequest(cache_dtype="int4")) is None


def test_every_op_has_a_reference_and_a_fast_backend() -> None:
    options = {"decoder_stack", "decode_step", "sample", "sample_masked", "fp8_linear", "penalize", "rope_and_write_kv"}
    options |= {"add_rms_norm_quant", "encoder_stack", "gate_quant", "gated_linear", "route_experts", "block_linear"}
    options |= {"edit_logits", "linear_add", "norm_linear"}
    for each in ops.OPS:
        expected = ["reference"] if each.name in options else ["torch", "reference"]
        assert [backend.name for backend in builtin_table().backends(each)] == expected
        assert each.__doc__


def test_highest_priority_is_chosen_and_the_report_says_why() -> None:
    table = builtin_table()
    assert table.add(fast()).name == "fast"
    report = table.report(ops.rms_norm, OpRequest())
    assert (report.op, report.backend) == ("rms_norm", "fast")
    assert set(report.refused) == {"torch", "reference"}
    assert all("fast comes first" in reason for reason in report.refused.values())


@pytest.mark.parametrize(
    ("facts", "request_", "reason"),
    [
        ({"devices": frozenset({"cuda"})}, OpRequest(), "runs on cuda, not on cpu"),
        ({"dtypes": frozenset({torch.float16})}, OpRequest(), "takes float16, not float32"),
        ({"sizes": {"size": SizeRule(multiple_of=8)}}, OpRequest(sizes={"size": 12}), "multiple of 8, is 12"),
        ({"sizes": {"size": SizeRule(maximum=8)}}, OpRequest(sizes={"size": 12}), "at most 8, is 12"),
        ({"sizes": {"size": SizeRule(minimum=16)}}, OpRequest(sizes={"size": 12}), "at least 16, is 12"),
        ({"unavailable": "no compiler was found"}, OpRequest(), "no compiler was found"),
    ],
)
def test_refusals(facts: dict, request_: OpRequest, reason: str) -> None:
    table = builtin_table()
    table.add(fast(**facts))
    assert table.choose(ops.rms_norm, request_).name == "torch"
    assert reason in table.report(ops.rms_norm, request_).refused["fast"]
    with pytest.raises(ConfigError, match="rms_norm"):
        table.bind(ops.rms_norm, request_, backend="fast")


def test_backend_asked_for_by_name() -> None:
    table = builtin_table()
    assert table.choose(ops.linear, OpRequest(), backend="reference").name == "reference"
    report = table.report(ops.linear, OpRequest(), backend="reference")
    assert report.refused == {"torch": "reference was asked for"}


def test_unknown_names() -> None:
    table = builtin_table()
    with pytest.raises(ConfigError, match=r"no op 'batch_norm'; the ops are .*rms_norm"):
        op_named("batch_norm")
    with pytest.raises(ConfigError, match="no backend 'slow'; choose one of torch, reference"):
        table.bind(ops.linear, OpRequest(), backend="slow")
    with pytest.raises(ConfigError, match="serves op 'batch_norm'"):
        table.add(fast(op=batch_norm))
    with pytest.raises(ConfigError, match="already has a backend called 'torch'"):
        table.add(fast(name="torch"))


def test_only_the_reference_takes_float64() -> None:
    assert {line.backend for line in op_report(OpRequest(dtype=torch.float64))} == {"reference"}


def a_plugin() -> list[OpBackend]:
    return [fast(name="plugin")]


def a_plugin_of_functions() -> list[object]:
    return [print]


def a_broken_plugin() -> list[OpBackend]:
    raise OSError("libfast.so not found")


@pytest.fixture
def fresh_table(monkeypatch):
    def install(function: str) -> None:
        entry_point = EntryPoint("extra", f"{__name__}:{function}", "quire.ops")
        monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[function])
        monkeypatch.setattr(backends, "installed_plugins", lambda group: {"extra": Plugin(entry_point)})
        backends._installed_table.cache_clear()

    yield install
    backends._installed_table.cache_clear()


def test_entry_points_bring_backends(fresh_table) -> None:
    fresh_table("a_plugin")
    x = torch.ones(1, 4)
    assert bind(ops.rms_norm, OpRequest())(x, x, 1e-6) is x
    assert "plugin" in {backend.name for backend in op_table().backends(ops.rms_norm)}


def test_broken_entry_point_is_named(fresh_table) -> None:
    fresh_table("a_broken_plugin")
    with pytest.raises(ConfigError, match=r"'extra'.*libfast\.so not found"):
        bind(ops.rms_norm, OpRequest())


def test_an_entry_point_that_returns_something_else_is_named(fresh_table) -> None:
    fresh_table("a_plugin_of_functions")
    with pytest.raises(ConfigError, match=r"'extra'.*must return OpBackend records"):
        bind(ops.rms_norm, OpRequest())


def test_a_set_of_backends_keeps_what_its_functions_are() -> None:
    backend_for = BackendSet("mine", priority=3, devices=frozenset({"cpu"}), batch_invariant=True)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x

    assert backend_for(ops.rms_norm, priority=7)(rms_norm) is rms_norm
    backend_for(ops.embedding)(lambda ids, weight: weight)
    first, second = backend_for.records(unavailable="no compiler")
    assert (first.op, first.name, first.function, first.priority) == (ops.rms_norm, "mine", rms_norm, 7)
    assert (second.op, second.priority, second.batch_invariant) == (ops.embedding, 3, True)
    assert first.unavailable == second.unavailable == "no compiler"
    assert backend_for.records()[0].refusal(OpRequest()) is None
    with pytest.raises(TypeError, match="speed"):
        backend_for(ops.linear, speed=9)(lambda x, weight, bias: x)


def test_an_op_is_its_reference() -> None:
    assert repr(batch_norm) == "<op batch_norm>"
    x = torch.ones(2)
    assert batch_norm(x) is batch_norm.reference(x) is x
    assert ops.rms_norm.__doc__ == ops.rms_norm.reference.__doc__
    assert list(inspect.signature(ops.rms_norm).parameters) == ["x", "weight", "eps"]
    assert implements(batch_norm)(print) is print
    assert op_named("rms_norm") is ops.rms_norm
    assert ops.paged_attention.trees
    assert not ops.linear.trees


def test_features_of_attention_that_a_backend_does_not_know() -> None:
    plain = OpBackend(op=ops.paged_attention, name="x", function=print, features=frozenset({"sinks"}))
    assert plain.refusal(OpRequest(features=frozenset({"sinks"}))) is None
    assert plain.refusal(OpRequest(features=frozenset({"sinks", "soft_cap", "alibi"}))) == "knows no alibi, soft_cap"
    odd = SizeRule(minimum=2, one_of=frozenset({64, 128}))
    assert odd.refusal("head_dim", 64) is None
    assert odd.refusal("head_dim", 1) == "head_dim must be at least 2, is 1"
    assert odd.refusal("head_dim", 96) == "head_dim must be one of 64, 128, is 96"
