"""Gate, up and the activation in one kernel: against the reference, and in a network where it was measured faster."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from kernels_cuda_runner import NETWORK, Driver, use_triton
from kernels_cuda_support import DEVICE, DTYPES, check, here, poison, random_tensor

from quire_kernels_cuda.platform import NVIDIA, choosing, pretending
from quire_kernels_cuda.targets import NVIDIA_TARGETS
from quire_kernels_cuda.triton import gated, linear
from quire_kernels_cuda.triton.matmul import MatmulTile
from quire_kernels_cuda.tuned import Entry, LaunchConfig, Problem, Tables, save
from quire_kernels_cuda.tuning import in_order, noting, tune
from quire_ops import ops as ref

TILE = LaunchConfig(blocks={"BM": 16, "BN": 16, "BK": 32}, num_warps=4, num_stages=2)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchConfig]:
    """What the kernel was launched with."""
    found: list[LaunchConfig] = []
    run = gated.run_gated

    def noted(x, weight, bias, activation, config):
        found.append(config)
        return run(x, weight, bias, activation, config)

    monkeypatch.setattr(gated, "run_gated", noted)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 48, 96), (3, 20, 70), (17, 16, 33), (0, 16, 32)])
def test_one_kernel_equals_the_reference(monkeypatch, dtype, activation, rows, outputs, inputs) -> None:
    """Rows of x apart, with a bias and without."""
    torch.manual_seed(rows)
    x = random_tensor(rows, inputs + 8, dtype=dtype)[:, :inputs]
    weight, bias = (random_tensor(*shape, dtype=dtype) for shape in ((2 * outputs, inputs), (2 * outputs,)))
    weight *= inputs**-0.5
    poison(monkeypatch)
    for added in (None, bias):
        wanted = ref.gated_linear(x, weight, added, activation)
        check(gated.run_gated(here(x), here(weight), here(added), activation, TILE), wanted, dtype)
        check(gated.gated_linear(here(x), here(weight), here(added), activation), wanted, dtype)


def test_the_reference_is_the_ops_in_turn() -> None:
    x, weight = random_tensor(3, 8, dtype=torch.bfloat16), random_tensor(10, 8, dtype=torch.bfloat16)
    gate, up = ref.linear(x, weight[:5], None), ref.linear(x, weight[5:], None)
    assert torch.equal(ref.gated_linear(x, weight, None, "silu"), ref.silu_and_mul(gate, up))
    assert torch.equal(ref.gated_linear(x, weight, None, "gelu"), ref.gelu_and_mul(gate, up))


def test_it_serves_the_very_problem_that_a_table_has(tmp_path, launched) -> None:
    sizes, traits = {"rows": 4, "outputs": 16, "inputs": 32}, {"dtype": torch.float32, "activation": "silu"}
    save(tmp_path, "test-gpu", [Entry(Problem.of("gated_matmul", sizes, traits), TILE, 8.0, 10.0, "3.9.0")])
    weight = random_tensor(32, 32)
    with pretending(NVIDIA_TARGETS["sm_90"], "test-gpu"):
        tuned = replace(NVIDIA, tables=Tables(tmp_path))
        for rows, activation, serves in ((3, "silu", True), (4, "silu", True), (5, "silu", False), (3, "gelu", False)):
            x = random_tensor(rows, 32)
            got = gated.gated_linear(here(x), here(weight), None, activation, platform=tuned)
            check(got, ref.gated_linear(x, weight, None, activation))
            assert launched == ([TILE] if serves else [])
            launched.clear()


def test_tuning_holds_it_against_the_best_product_and_its_gate(tmp_path, monkeypatch, launched) -> None:
    """Which is torch's, or ours where a table has it for both; the clock here knows what was launched."""
    sizes = {"rows": 2, "outputs": 16, "inputs": 64}
    problem = Problem.of("gated_matmul", sizes, {"dtype": torch.float32, "activation": "silu"})
    products: list[MatmulTile] = []
    run_matmul = linear.run_matmul

    def noted(*args, tile, **options):
        products.append(tile)
        return run_matmul(*args, tile=tile, **options)

    monkeypatch.setattr(linear, "run_matmul", noted)

    def time_us(call) -> float:
        launched.clear()
        products.clear()
        call()
        return 8.0 if launched else 6.0 if products else 10.0

    def tuned() -> Entry | None:
        platform = replace(NVIDIA, tables=Tables(tmp_path))
        device = torch.device(DEVICE)
        with pretending(NVIDIA_TARGETS["sm_90"], "test-gpu"):
            return tune(problem, [TILE], platform, device, time_us=time_us, version="3.9.0")

    assert tuned() == Entry(problem, TILE, 8.0, 10.0, "3.9.0")
    product = Problem.of("skinny_matmul", sizes | {"outputs": 32}, {"dtype": torch.float32})
    skinny = LaunchConfig(blocks={"BM": 16, "BN": 16, "BK": 32, "SPLITS": 2}, num_warps=4, num_stages=2)
    save(tmp_path, "test-gpu", [Entry(product, skinny, 6.0, 10.0, "3.9.0")])
    assert tuned() is None
    assert in_order([problem, product]) == [product, problem]  # so that a run of both knows it
    save(tmp_path, "test-gpu", [], dropped=[product])
    assert tuned() is not None


def test_both_products_are_among_what_a_layer_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tuning a network tunes what the one kernel is held against."""
    use_triton(monkeypatch)
    with noting(found := []):
        Driver(enforce_eager=True).step([0])
    gate_and_up = {
        (dict(each.sizes)["rows"], dict(each.sizes)["inputs"], 2 * dict(each.sizes)["outputs"])
        for each in found
        if each.kernel == "gated_matmul"
    }
    assert gate_and_up
    assert gate_and_up <= {
        (dict(each.sizes)["rows"], dict(each.sizes)["inputs"], dict(each.sizes)["outputs"])
        for each in found
        if each.kernel == "skinny_matmul"
    }


def test_a_layer_has_one_launch_less(monkeypatch: pytest.MonkeyPatch, launched) -> None:
    """And gives the same tokens, beside rows with adapters too, for which the products stay apart from the gate."""
    use_triton(monkeypatch)

    def one_kernel(problem: Problem, otherwise: LaunchConfig | None) -> LaunchConfig | None:
        return TILE if problem.kernel == "gated_matmul" else otherwise

    def driver(num_layers: int, **settings) -> tuple[Driver, Counter[str]]:
        names: list[str] = []
        network = {**NETWORK, "num_hidden_layers": num_layers, "use_sliding_window": False}
        made = Driver(network, cuda_graph_sizes=(2,), launches=names, **settings)
        for _ in range(4):
            made.step([0, 1])
        assert made.runner.graphs is None or made.runner.graphs.failure is None
        return made, Counter(names)

    plain, _ = driver(2, enforce_eager=True)
    assert not launched
    with choosing(one_kernel):
        (one, few), (two, many) = driver(1), driver(2)
        assert launched
        launched.clear()
        adapted = Driver(max_loras=2, enforce_eager=True)
        adapted.step([0])  # nobody has one
        assert launched
        launched.clear()
        adapted.step([0, 1])
        assert not launched
    assert two.tokens == plain.tokens
    apart = Driver(max_loras=2, enforce_eager=True)
    for rows in ([0], [0, 1]):
        apart.step(rows)
    assert adapted.tokens == apart.tokens
    if DEVICE == "cpu":
        layer = many - few
        assert layer["gated_matmul_kernel"] == 1
        assert "gate_kernel" not in layer
        assert layer.total() == 8
    assert one.tokens != two.tokens
