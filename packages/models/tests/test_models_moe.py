"""Experts: checkpoints that keep them one by one or stacked, what is wrong with others, and how tokens are routed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.layers.routing import choose_experts
from quire_models.ledger import weight_ledger
from quire_models.quantization_config import BLOCK_BYTES
from quire_ops import OpRequest, RoutingRule, op_table, ops
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

ARCHITECTURES = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]


def logits(folder: Path, **options: Any) -> torch.Tensor:
    model = load_model(ModelConfig.from_path(folder), folder, **options)
    driver = PagedDriver(model, block_size=8, shuffle=True)
    seq = driver.add(list(range(3, 40)))
    driver.run(seq, 16)
    return torch.stack(seq.logits)


def stack(folder: Path, architecture: str) -> Any:
    """Turn a checkpoint that keeps experts one by one into a stacked one; returns the oracle."""
    oracle = write_checkpoint(folder, architecture, CASES[architecture])
    state = {name: tensor.contiguous() for name, tensor in oracle.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, folder / "model.safetensors")
    return oracle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stacked_experts_are_the_same_network(architecture: str, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    assert not any("gate_up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    one_by_one = logits(tmp_path, dtype=dtype)
    stack(tmp_path, architecture)
    assert torch.equal(logits(tmp_path, dtype=dtype), one_by_one)


def test_stacked_experts_stay_in_their_file(tmp_path: Path) -> None:
    stack(tmp_path, "MixtralForCausalLM")
    model = load_model(ModelConfig.from_path(tmp_path), tmp_path)
    experts = model.layers[1].feed_forward.experts  # type: ignore[attr-defined]
    first, second = (experts.up[number].stack_weights().weight for number in (0, 1))
    assert second.data_ptr() - first.data_ptr() == 2 * first.nbytes  # a gate lies between


def test_everything_wrong_with_stacked_experts_is_listed(tmp_path: Path) -> None:
    stack(tmp_path, "MixtralForCausalLM")
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.mlp.experts.gate_up_proj"] = state["model.layers.0.mlp.experts.gate_up_proj"][:5].clone()
    del state["model.layers.1.mlp.experts.down_proj"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(ModelConfig.from_path(tmp_path), tmp_path)
    message = str(caught.value)
    assert (
        "1 of the wrong shape: model.layers.0.mlp.experts.gate_up_proj is [5, 96, 64], should be [6, 96, 64]" in message
    )
    assert "6 missing: model.layers.1.block_sparse_moe.experts.0.w2.weight" in message


def test_mxfp4_experts_stay_packed(tmp_path: Path) -> None:
    """As gpt-oss is published: against the values that Transformers unpacks, and its network with them."""
    case = CASES["GptOssForCausalLM"]
    case = dataclasses.replace(case, fields={**case.fields, "intermediate_size": 64, "num_hidden_layers": 2})
    oracle = write_checkpoint(tmp_path, "GptOssForCausalLM", case).float()
    state, packed = load_file(tmp_path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name]:
        num, inputs, outputs = state[name].shape
        blocks = torch.randint(0, 256, (num, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(117, 124, (num, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        oracle.get_parameter(name).data.copy_(state[name])
    others = {name: tensor for name, tensor in state.items() if f"{name}_blocks" not in packed}
    save_file(others | packed, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(values))

    config = ModelConfig.from_path(tmp_path)
    model = load_model(config, tmp_path, dtype="float32")
    served = op_table().choose(ops.block_linear, OpRequest(dtype=torch.bfloat16)).name != "reference"
    assert model.linear_kernels.startswith(f"{'block' if served else 'grouped'}_linear for 36 (")
    assert model.expert_methods == "fused_moe for 2"
    experts, name = model.layers[1].feed_forward.experts, "model.layers.1.mlp.experts"  # type: ignore[attr-defined]
    for number, (gate, up, down) in enumerate(zip(experts.gate, experts.up, experts.down, strict=True)):
        both, out = state[f"{name}.gate_up_proj"][number].T, state[f"{name}.down_proj"][number].T
        for layer, wanted in ((gate, both[0::2]), (up, both[1::2]), (down, out)):
            assert torch.equal(layer.base()[0], wanted)
    with torch.no_grad():
        prompt = torch.tensor([list(range(3, 40))])
        tokens = oracle.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected = oracle(tokens).logits[0]
    driver = PagedDriver(model, block_size=8, shuffle=True)
    seq = driver.add(tokens[0].tolist())
    driver.run(seq, tokens.shape[1])
    got = torch.stack(seq.logits)
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert torch.equal(got.argmax(1)[36:-1], tokens[0, 37:])

    rounded = load_model(config, tmp_path, dtype="bfloat16")
    kept = [
        sum(tensor.nbytes for tensor in layer.stack_weights()[:5] if isinstance(tensor, torch.Tensor))
        - 17 * 4 * served  # the header of a weight in blocks
        for block in rounded.layers  # type: ignore[attr-defined]
        for layer in (
            *block.feed_forward.experts.gate,
            *block.feed_forward.experts.up,
            *block.feed_forward.experts.down,
        )
    ]
    routers = 2 * 2 * (6 * config.hidden_size + 6)
    assert (
        weight_ledger(config, "bfloat16", in_blocks=frozenset(BLOCK_BYTES if served else ()))["experts"]
        == sum(kept) + routers
    )
    if served:
        stored = sum(tensor.nbytes for name, tensor in packed.items() if "experts" in name)
        biases = 2 * sum(state[name].numel() for name in state if name.endswith("proj_bias") and "experts" in name)
        assert sum(kept) == stored + biases

    del packed["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(others | packed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"6 missing: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight_scale"):
        load_model(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok \(7\) must be at most num_local_experts \(6\)"),
        ({"num_local_experts": 0}, "num_local_experts must be at least 1, is 0"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
    ],
)
def test_configurations_that_make_no_sense(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "MixtralForCausalLM", CASES["MixtralForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict({**config, **changes})


def test_routing_by_hand() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    probabilities = torch.softmax(logits, -1)[0]
    ids, weights = choose_experts(logits, None, RoutingRule(top_k=2, scoring="softmax"))
    assert ids.tolist() == [[1, 2]]
    assert torch.equal(weights[0], probabilities[[1, 2]])
    shares = probabilities[[1, 2]] / probabilities[[1, 2]].sum()
    for rule in (
        RoutingRule(top_k=2, scoring="softmax", renormalize=True),
        RoutingRule(top_k=2, scoring="softmax_of_chosen"),
    ):
        assert torch.allclose(choose_experts(logits, None, rule)[1][0], shares)


def test_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    scores = torch.sigmoid(logits)
    ids, weights = choose_experts(logits, bias, RoutingRule(top_k=2, scoring="sigmoid", scale=2.5))
    assert ids.tolist() == [[3, 1]]
    assert torch.equal(weights[0], scores[0, [3, 1]] * 2.5)
    ids, weights = choose_experts(logits, None, RoutingRule(top_k=2, scoring="sigmoid", renormalize=True))
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights.sum(), torch.tensor(1.0))


def test_groups_are_chosen_by_their_two_best() -> None:
    # The best expert stands alone in the first group; the second group's two best together are better.
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.6, 0.7, 0.1]])
    rule = RoutingRule(top_k=2, scoring="sigmoid", num_groups=2, topk_groups=1, group_best=2)
    ids, weights = choose_experts(scores.logit(), torch.zeros(6), rule)
    assert ids.tolist() == [[4, 3]]
    assert torch.allclose(weights, torch.tensor([[0.7, 0.6]]))
    both, _ = choose_experts(scores.logit(), torch.zeros(6), dataclasses.replace(rule, topk_groups=2))
    assert both.tolist() == [[0, 4]]
