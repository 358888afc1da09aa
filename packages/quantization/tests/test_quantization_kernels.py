"""Which op serves a quantized weight: what kernels declare, per device, with reasons; and online methods whose weights
another op serves than the one they were made for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire_interfaces import ConfigError, LinearMethod, QuantKey
from quire_ops import OpBackend, OpRequest, op_table, ops
from quire_ops.backends import replaced_backends
from quire_quantization import linear_method
from quire_quantization.kernels import (
    FP8_GROUPS,
    FP8_STEP,
    FP8_TENSOR,
    FP8_TOKENS,
    INT8_TENSOR,
    INT8_TOKENS,
    KernelChoice,
    choose_kernel,
)
from quire_quantization.methods import QuantizedLinear, ServedLinear, head_method
from quire_testkit.conformance.linear_method import LinearMethodSuite

INT8 = QuantKey(dtype="int8", scale_dtype="compute", granularity="channel")
INT4 = QuantKey(dtype="int4", scale_dtype="float32", granularity="group", group_size=128)
FLOAT8 = QuantKey(dtype="fp8_e4m3", scale_dtype="float32", granularity="tensor")


def choose(weight: QuantKey, inputs: QuantKey | None = None, *disabled: str, device: str = "cpu") -> KernelChoice:
    return choose_kernel(weight, inputs, OpRequest(device=device, dtype=torch.bfloat16), disabled)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("weight", "inputs", "report"),
    [
        (INT8, INT8_TOKENS, "w8a8_linear for 3"),
        (INT8, INT8_TENSOR, "w8a8_linear for 3"),
        (INT8, None, "int8_linear for 3 (w8a8_linear: inputs stay as they are)"),
        (
            INT8,
            dataclasses.replace(INT8_TOKENS, symmetric=False),
            "int8_linear for 3, inputs stay as they are (w8a8_linear: takes inputs in int8, token, float32 scales or "
            "int8, tensor, float32 scales, from the checkpoint, not in int8, token, float32 scales, zero points)",
        ),
        (
            dataclasses.replace(INT8, scale_dtype="float32"),
            INT8_TOKENS,
            "grouped_linear for 3, inputs stay as they are (w8a8_linear: takes scales of the compute dtype only; "
            "int8_linear: takes scales of the compute dtype only; fp8_linear: takes no int8)",
        ),
        (INT4, INT8_TOKENS, "grouped_linear for 3, inputs stay as they are (w8a8_linear: takes no int4; "
                            "int8_linear: takes no int4; fp8_linear: takes no int4)"),
        (
            dataclasses.replace(INT4, group_size=48),
            None,
            "linear for 3 (w8a8_linear: takes no int4; int8_linear: takes no int4; fp8_linear: takes no int4; "
            "grouped_linear: takes no groups of 48)",
        ),
    ],
)  # fmt: skip
def test_the_first_that_takes_a_form_serves(
    weight: QuantKey, inputs: QuantKey | None, report: str, device: str
) -> None:
    assert choose(weight, inputs, device=device).report(3) == report


BLOCKS = dataclasses.replace(FLOAT8, granularity="group", group_size=128)


@pytest.mark.parametrize(
    ("weight", "inputs", "refusal"),
    [
        (FLOAT8, FP8_TENSOR, ""),
        (FLOAT8, FP8_STEP, ""),
        (FLOAT8, FP8_TOKENS, ""),
        (BLOCKS, FP8_GROUPS, ""),
        (FLOAT8, None, "inputs stay as they are"),
        (FLOAT8, FP8_GROUPS, "takes no weight in tensor scales with inputs in fp8_e4m3, groups of 128, float32 scales"),
        (BLOCKS, FP8_TOKENS, "takes no weight in group scales with inputs in fp8_e4m3, token, float32 scales"),
        (dataclasses.replace(BLOCKS, group_size=32), FP8_GROUPS, "takes no groups of 32"),
    ],
)  # fmt: skip
def test_inputs_are_rounded_to_fp8_where_a_backend_multiplies_it(
    weight: QuantKey, inputs: QuantKey | None, refusal: str
) -> None:
    here = choose(weight, inputs)
    assert here.kernel.op is ops.grouped_linear
    assert dict(here.against)["fp8_linear"] == (refusal or "only the reference computes it on cpu")
    there = OpBackend(op=ops.fp8_linear, name="one", function=print)
    with replaced_backends([]):
        op_table().add(there)
        choice = choose(weight, inputs)
    assert dict(choice.against).get("fp8_linear", "") == refusal
    assert (choice.kernel.op is ops.fp8_linear) == (not refusal)


def test_a_shape_that_sums_of_int8_cannot_hold() -> None:
    request = OpRequest(dtype=torch.float32, sizes={"in_features": 131073, "out_features": 8})
    choice = choose_kernel(INT8, INT8_TOKENS, request)
    assert choice.against == (("w8a8_linear", "takes at most 131072 inputs, not 131073"),)


def test_a_device_for_which_only_the_reference_is_there() -> None:
    there = [one for one in op_table().backends(ops.w8a8_linear) if one.name != "reference"]
    with replaced_backends(dataclasses.replace(one, unavailable="not here") for one in there):
        choice = choose(INT8, INT8_TOKENS)
    assert choice.report(1) == (
        "int8_linear for 1, inputs stay as they are (w8a8_linear: only the reference computes it on cpu)"
    )


def test_disabled_kernels_leave_others_or_none() -> None:
    assert choose(INT8, INT8_TOKENS, "w8a8_linear").kernel.op is ops.int8_linear
    with pytest.raises(ConfigError, match=r"no linear kernel is left for weights in int4, groups of 128, .*linear"):
        choose(INT4, None, "grouped_linear", "linear")


def method_report(name: str) -> str:
    method = linear_method(name, OpRequest())
    assert isinstance(method, QuantizedLinear)
    assert method.choice is not None
    return method.choice.report(1)


def test_tokens_are_rounded_to_fp8_where_a_backend_multiplies_it() -> None:
    """`ptpc_fp8`: a scale for each token and for each output, not for groups of either."""
    reference = next(one for one in op_table().backends(ops.fp8_linear) if one.name == "reference")
    weight, x, bias = torch.randn(24, 256), torch.randn(5, 256), torch.randn(24)
    with replaced_backends([]):
        op_table().add(OpBackend(op=ops.fp8_linear, name="one", function=reference.function))
        method = linear_method("ptpc_fp8", OpRequest())
        weights = method.make_weights(weight, bias)
        found = method.apply(weights, x)
    assert method.op == "fp8_linear"
    assert method.choice is not None
    assert "inputs stay" not in method.choice.report(1)
    assert weights["scale"].shape == (24, 1)
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    assert torch.equal(weights["weight"].float(), rounded.float())
    of_tokens = x.abs().amax(dim=1, keepdim=True) / 448
    tokens = (x / of_tokens).to(torch.float8_e4m3fn).float() * of_tokens
    torch.testing.assert_close(found, tokens @ (rounded.float() * scale).T + bias, rtol=1e-4, atol=1e-4)
    assert head_method("ptpc_fp8", OpRequest()).name == "fp8"


def test_online_methods_are_chosen_like_checkpoints() -> None:
    for name, op in (("int8", "int8_linear"), ("w8a8", "w8a8_linear"), ("w8a8-g64", "grouped_linear"),
                     ("int4-g32", "grouped_linear"), ("fp8", "grouped_linear"),
                     ("ptpc_fp8", "grouped_linear"), ("mxfp8", "grouped_linear")):  # fmt: skip
        method = linear_method(name, OpRequest(dtype=torch.bfloat16))
        assert isinstance(method, QuantizedLinear)
        assert method.choice is not None
        assert method.choice.kernel.op.name == method.op == op
    assert method_report("ptpc_fp8") == method_report("fp8").replace(
        "fp8_linear: inputs stay as they are", "fp8_linear: only the reference computes it on cpu"
    ).replace("grouped_linear for 1", "grouped_linear for 1, inputs stay as they are")
    fallen = linear_method("w8a8", OpRequest(), ["w8a8_linear", "int8_linear"])
    assert isinstance(fallen, ServedLinear)
    assert fallen.choice.report(2) == (
        "grouped_linear for 2, inputs stay as they are (w8a8_linear: disabled; int8_linear: disabled; "
        "fp8_linear: takes no int8)"
    )
    with pytest.raises(ConfigError, match="no linear kernel is left"):
        linear_method("int4", OpRequest(), ["grouped_linear", "linear"])


class _Served(LinearMethodSuite):
    name: str
    disabled: tuple[str, ...]

    def make_method(self, dtype: torch.dtype) -> LinearMethod:
        return linear_method(self.name, OpRequest(dtype=dtype), self.disabled)

    def test_it_multiplies_with_the_same_numbers(self) -> None:
        weight, x = torch.randn(40, 160), torch.randn(5, 160)
        own = linear_method("int8" if self.name == "w8a8" else self.name, OpRequest())
        other = self.make_method(torch.float32)
        assert other.op not in self.disabled
        wanted = own.apply(own.make_weights(weight, None), x)
        assert torch.allclose(other.apply(other.make_weights(weight, None), x), wanted, rtol=1e-5, atol=1e-5)


class TestInt8InGroups(_Served):
    name, disabled, max_error = "int8", ("int8_linear",), 1 / 254


class TestW8A8WithInputsAsTheyCome(_Served):
    name, disabled, max_error = "w8a8", ("w8a8_linear",), 1 / 254


class TestInt4Widened(_Served):
    name, disabled, max_error = "int4-g32", ("grouped_linear",), 1 / 8


class TestFloat8Widened(_Served):
    name, disabled, max_error = "mxfp8", ("grouped_linear",), 1 / 8
