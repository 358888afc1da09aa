"""What rounds behind a norm or a gate gives the bits that the two kernels apart give, and networks the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kernels_cuda_support import DEVICE, TOLERANCE, here, poison, random_tensor
from models_paged_driver import PagedDriver

from quire_kernels_cuda.ops import backends
from quire_kernels_cuda.triton import gates, norms, rounding
from quire_models import ModelConfig, build_model
from quire_ops import ActivationScheme, OpBackend, QuantizedTokens
from quire_ops import ops as ref
from quire_ops.backends import replaced_backends

FP8 = torch.float8_e4m3fn
CASES = pytest.mark.parametrize(
    ("shape", "dtype", "form", "by_group", "input_scale", "activation"),
    [
        ((4, 200), torch.bfloat16, torch.int8, False, 0.0, "silu"),
        ((1, 70), torch.float32, torch.int8, False, 0.03, "gelu"),
        ((4, 150), torch.bfloat16, FP8, False, 0.0, "gelu"),
        ((4, 200), torch.float32, FP8, True, 0.0, "silu"),
        ((1, 259), torch.bfloat16, FP8, True, 0.01, "silu"),
        ((3, 1), torch.bfloat16, FP8, False, 0.0, "silu"),
        ((0, 64), torch.bfloat16, FP8, True, 0.0, "silu"),
    ],
    ids=str,
)


def rows(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The first as it is; then zeros, and some that are not finite, where there are so many."""
    x = random_tensor(*shape, dtype=dtype)
    x[1:2] = 0
    if len(x) == 4:
        x[2, shape[1] // 2], x[3, 0] = float("inf"), float("nan")
    return x


def check(got: QuantizedTokens, apart: QuantizedTokens, wanted: QuantizedTokens, dtype: torch.dtype) -> None:
    """To the bit what the kernels apart give, and near to what the reference gives."""
    assert got.dtype == wanted.dtype == dtype
    assert got.tokens.dtype == wanted.tokens.dtype
    assert got.scales.shape == wanted.scales.shape
    assert torch.equal(got.tokens.view(torch.uint8), apart.tokens.view(torch.uint8))
    assert torch.equal(got.scales.nan_to_num(-1.0), apart.scales.nan_to_num(-1.0))
    steps, wanted_steps = got.scales.cpu(), wanted.scales
    assert torch.equal(steps.isnan(), wanted_steps.isnan())
    assert torch.allclose(steps, wanted_steps, rtol=TOLERANCE[dtype], atol=0, equal_nan=True)
    values, wanted_values = got.tokens.cpu().float(), wanted.tokens.float()
    apart_by = (values - wanted_values).abs()  # what is a little off may be rounded to the neighbour
    neighbour = 1.0 if got.tokens.dtype == torch.int8 else torch.clamp(wanted_values.abs() / 8, min=2**-9)
    assert (apart_by <= neighbour).all()
    assert (apart_by > 0).sum() <= max(1, values.numel() // 20)


@CASES
def test_norm(monkeypatch, shape, dtype, form, by_group, input_scale, activation) -> None:
    torch.manual_seed(3)
    x, residual = rows(shape, dtype), random_tensor(*shape, dtype=dtype)
    residual[1:2] = 0
    weight, given = random_tensor(shape[1], dtype=dtype), torch.tensor([input_scale])
    wanted, total = ref.add_rms_norm_quant(x, residual, weight, 1e-6, ActivationScheme(form, given, by_group))
    poison(monkeypatch)
    rule = ActivationScheme(form, here(given), by_group)
    wide = here(torch.cat((x, x), 1))[:, : shape[1]]  # rows apart in memory
    got, got_total = rounding.add_rms_norm_quant(wide, here(residual).clone(), here(weight), 1e-6, rule)
    normed, _ = norms.add_rms_norm(here(x), here(residual).clone(), here(weight), 1e-6)
    assert torch.equal(got_total.cpu().nan_to_num(-1.0), total.nan_to_num(-1.0))
    check(got, rounding.round_rows(normed, rule), wanted, dtype)


@CASES
def test_gate(monkeypatch, shape, dtype, form, by_group, input_scale, activation) -> None:
    torch.manual_seed(4)
    gate, up = rows(shape, dtype), random_tensor(*shape, dtype=dtype)
    given = torch.tensor([input_scale])
    wanted = ref.gate_quant(gate, up, activation, ActivationScheme(form, given, by_group))
    poison(monkeypatch)
    monkeypatch.setattr(rounding, "_BLOCK", 128)
    rule = ActivationScheme(form, here(given), by_group)
    halves = here(torch.cat((gate, up), 1)).split(shape[1], dim=1)
    apart = rounding.round_rows(getattr(gates, f"{activation}_and_mul")(here(gate), here(up)), rule)
    check(rounding.gate_quant(*halves, activation, rule), apart, wanted, dtype)


SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
STORED_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NETWORKS: dict[str, dict[str, Any]] = {
    "int8": {"method": "w8a8"},
    "fp8": {"quantization_config": STORED_FP8},
    "fp8 in blocks": {
        "quantization_config": {**STORED_FP8, "weight_block_size": [128, 128]},
        "hidden_size": 136,
        "intermediate_size": 136,
    },
    "fp8 with scales of inputs": {"quantization_config": {**STORED_FP8, "activation_scheme": "static"}},
}
APART = {"rms_norm", "add_rms_norm", "silu_and_mul", "w8a8_linear", "fp8_linear"}
TOGETHER = {"add_rms_norm_quant", "gate_quant"}


@contextmanager
def serving(ops: set[str]) -> Iterator[dict[str, int]]:
    """Within it, of the ops of APART and TOGETHER our kernels serve these and no others, with a GPU and without;
    and how often those of TOGETHER were called."""
    counts = dict.fromkeys(TOGETHER, 0)

    def counted(backend: OpBackend) -> OpBackend:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[backend.op.name] += 1
            return backend.function(*args, **kwargs)

        return dataclasses.replace(backend, function=run)

    ours = [
        dataclasses.replace(each, priority=1000 if each.op.name in ops else -1000)
        for each in backends()
        if each.op.name in APART | TOGETHER
    ]
    with replaced_backends([counted(each) if each.op.name in TOGETHER else each for each in ours]):
        yield counts


def network(case: str, architecture: str = "LlamaForCausalLM", **settings: Any) -> Any:
    """Two layers with random weights."""
    quantization = {name: NETWORKS[case][name] for name in NETWORKS[case] if name != "method"}
    config = ModelConfig.from_dict({**SIZES, **quantization, "architectures": [architecture]})
    method = NETWORKS[case].get("method", "plain")
    model = build_model(
        config, dtype="bfloat16", device=DEVICE, linear_method=method, attention_backend="torch", **settings
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters:
        shape = tuple(max(1, size) for size in parameter.shape)
        tensor = torch.randn(shape, generator=generator) * (1.0 if parameter.dtype == FP8 else 0.3)
        if "scale" in parameter.name:
            tensor = torch.full(shape, 0.3)
        parameter.tensor = tensor.to(DEVICE, parameter.dtype or torch.bfloat16)
    model.finish_loading()
    return model


@pytest.mark.parametrize(
    ("case", "architecture", "num_gates"),
    [
        ("int8", "LlamaForCausalLM", 2),
        ("fp8", "LlamaForCausalLM", 2),
        ("int8", "HeliumForCausalLM", 2),
        ("int8", "ArceeForCausalLM", 0),
    ],
)
def test_networks_give_the_same(case: str, architecture: str, num_gates: int) -> None:
    """Every layer but the first rounds once for queries, keys and values; each for its feed-forward network, and behind
    the gate of one that has a gate."""

    def logits(ops: set[str]) -> tuple[torch.Tensor, dict[str, int]]:
        with serving(ops) as counts:
            driver = PagedDriver(network(case, architecture), block_size=4, shuffle=True, num_tokens=64, device=DEVICE)
            sequence = driver.add([3, 14])
            driver.run(sequence, chunk=4)
        return torch.stack(sequence.logits), counts

    apart, _ = logits(APART)
    together, counts = logits(APART | TOGETHER)
    assert counts == {"add_rms_norm_quant": 3, "gate_quant": num_gates}
    assert apart.isfinite().all()
    assert torch.equal(together, apart)


def test_what_needs_inputs_as_they_are_gets_them() -> None:
    """Adapters; queries, keys and values with different scales of their inputs; ops of different backends."""

    def quantized(layer: Any) -> list[Any]:
        return [layer.before_mixer.quant, layer.before_feed_forward.quant]

    def shared(model: Any) -> list[bool]:
        last = model.layers[1]
        return [each.activation_scheme is not None for each in (*quantized(last), last.feed_forward._quant)]

    with serving(APART | TOGETHER):
        assert shared(network("int8")) == [True] * 3
        assert shared(network("int8", max_loras=1)) == [False] * 3
        in_blocks = network("fp8 in blocks")
        assert shared(in_blocks) == [True] * 3
        assert quantized(in_blocks.layers[1])[1].activation_scheme.by_group
        model = network("fp8 with scales of inputs")
        model.layers[1].mixer.k_proj._weights["input_scale"] += 1
        for each in quantized(model.layers[1]):
            each.activation_scheme = None
            each._finish()
        assert shared(model) == [False, True, True]
    with serving(TOGETHER):
        assert shared(network("int8")) == [False] * 3
