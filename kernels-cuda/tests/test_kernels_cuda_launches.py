"""What a decode step launches: how much for each layer, and that layers in one product give the tokens of layers apart.

Bounds are on what is launched, not on time: a launch costs a GPU a microsecond or more even within a graph.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from kernels_cuda_runner import NETWORK, Driver, use_triton
from kernels_cuda_support import DEVICE
from models_paged_driver import PagedDriver

from quire_models import ModelConfig, build_model

LATENT: dict[str, Any] = {
    "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0, "rope_interleave": True,
}  # fmt: skip
INDEX: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4}
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 16,
    "sliding_window": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **LATENT},
    "deepseek_v3, whole queries": {"architectures": ["DeepseekV3ForCausalLM"], **LATENT, "q_lora_rank": None},
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **LATENT, **INDEX},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **EXPERTS},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
}
DENSE = ("llama", "qwen3")
WITH_LATENT = tuple(family for family in FAMILIES if family.startswith("deepseek"))
OF_ALL_ROWS = {"rotate_and_write_kernel": 1, "attend_tiles": 1}
LAYER = {**OF_ALL_ROWS, "aten.linear.default": 4, "rms_norm_kernel": 2, "gate_kernel": 1}
"""Of a layer's step: queries, keys and values; output; gate and up; down. Torch's products are one launch each here."""
OF_ONE_ROW = {**OF_ALL_ROWS, "row_linear_kernel": 4}
"""Norms, gate and residual are parts of the products."""


@pytest.fixture(autouse=True)
def _triton_first(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)


def launches(family: str, num_layers: int, rows: tuple[int, ...] = (0,), **settings: Any) -> Counter[str]:
    """Of a captured greedy step of some requests."""
    names: list[str] = []
    network = {**NETWORK, **FAMILIES[family], "num_hidden_layers": num_layers, "use_sliding_window": False}
    driver = Driver(network, cuda_graph_sizes=(len(rows),), launches=names, **settings)
    for _ in range(4):
        driver.step(list(rows))
    assert driver.runner.graphs is not None
    assert driver.runner.graphs.failure is None
    assert len(driver.runner.graphs.captured) == 1
    return Counter(names)


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA's graphs do not say what is in them")
@pytest.mark.parametrize("family", DENSE)
def test_launches_of_a_layer(family: str) -> None:
    """Of one request, and of several."""
    assert launches(family, 2) - launches(family, 1) == OF_ONE_ROW
    assert Counter(OF_ONE_ROW).total() == 6
    assert launches(family, 2, (0, 1)) - launches(family, 1, (0, 1)) == LAYER
    assert Counter(LAYER).total() == 9
    apart = launches(family, 2, join_products=False) - launches(family, 1, join_products=False)
    assert apart.total() == 12


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA's graphs do not say what is in them")
@pytest.mark.parametrize(("family", "num_less"), [("deepseek_v3", 1), ("deepseek_v3, whole queries", 1),
                                                  ("deepseek_v32", 2)])  # fmt: skip
def test_launches_of_latent_attention(family: str, num_less: int) -> None:
    """What takes the layer's input is one product, the index's key among it, and nothing is copied for it: the norms
    behind it read rows that are apart."""

    apart, joined = (launches(family, 1, join_products=joined) for joined in (False, True))
    gate_and_up = 1  # of the shared expert
    assert apart - joined == Counter({"aten.linear.default": num_less + gate_and_up})
    assert not joined - apart
    assert not joined["aten.contiguous.default"]


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA's graphs do not say what is in them")
@pytest.mark.parametrize(("family", "most"), [("mixtral", 12), ("qwen3_moe", 12), ("qwen2_moe", 18),
                                              ("deepseek_v3", 30), ("deepseek_v32", 44)])  # fmt: skip
def test_launches_of_a_layer_with_experts(family: str, most: int) -> None:
    """Experts are chosen in one launch and sorted in another, whatever the rule."""
    layer = launches(family, 2) - launches(family, 1)
    assert layer.total() <= most
    assert layer["route_kernel"] == layer["sort_pairs_kernel"] == layer["expert_gate_kernel"] == 1
    assert not [name for name in layer if "sort" in name and "aten" in name]


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA's graphs do not say what is in them")
def test_launches_of_a_layer_with_weights_in_int4() -> None:
    found = launches("qwen3", 2, linear_method="int4") - launches("qwen3", 1, linear_method="int4")
    assert found == {**{name: num for name, num in LAYER.items() if "aten" not in name}, "row_matmul_kernel": 4}


@pytest.mark.parametrize("method", ["plain", "int8"])
def test_tokens_are_those_of_layers_apart(method: str) -> None:
    """Prompts, graphs and rows of several adapters, in float32; apart kernel by kernel."""
    joined = Driver(linear_method=method, max_loras=2)
    apart = Driver(linear_method=method, max_loras=2, join_products=False, enforce_eager=True)
    for rows in ([0, 1], [0, 1], [1, 0], [2, 1], [1, 2]):
        for driver in (joined, apart):
            driver.step(rows)
    assert joined.tokens == apart.tokens
    assert joined.runner.graphs is not None
    assert joined.runner.graphs.failure is None
    assert joined.runner.graphs.captured


@pytest.mark.parametrize("method", ["plain", "int8", "w8a8", "int4", "fp8"])
@pytest.mark.parametrize("family", DENSE)
def test_logits_are_those_of_layers_apart(family: str, method: str) -> None:
    same_logits(family, method)


@pytest.mark.parametrize("method", ["plain", "w8a8", "int4"])
@pytest.mark.parametrize("family", WITH_LATENT)
def test_logits_of_latent_attention_are_those_of_layers_apart(family: str, method: str) -> None:
    same_logits(family, method)


def same_logits(family: str, method: str) -> None:
    def logits(*, joined: bool) -> torch.Tensor:
        config = ModelConfig.from_dict({**NETWORK, **FAMILIES[family]})
        model = build_model(
            config, dtype="float32", device=DEVICE, linear_method=method, attention_backend="triton",
            join_products=joined,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters:
            parameter.tensor = torch.randn(parameter.shape, generator=generator).mul(0.3).to(DEVICE)
        model.finish_loading()
        driver = PagedDriver(model, block_size=4, shuffle=True, num_tokens=64, device=DEVICE)
        sequence = driver.add([3, 14, 15, 9, 2, 6])
        driver.run(sequence, chunk=4)
        return torch.stack(sequence.logits)

    apart = logits(joined=False)
    assert apart.isfinite().all()
    torch.testing.assert_close(logits(joined=True), apart, rtol=1e-5, atol=1e-5)
