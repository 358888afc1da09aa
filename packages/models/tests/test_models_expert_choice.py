"""Experts chosen by a network's rule: a backend of op `route_experts` where one serves, and torch's operators
elsewhere, give what the op says, to the last digits."""

from __future__ import annotations

import pytest
import torch

from quire_models import ModelConfig, build_model
from quire_models.layers.routing import ExpertChoice, choose_experts
from quire_models.weights import load_dummy_weights
from quire_ops import ops
from quire_testkit.parity.cases import CASES

ARCHITECTURES = (
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM", "Glm4MoeForCausalLM",
    "GraniteMoeForCausalLM", "GptOssForCausalLM", "MiniMaxM2ForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM",
)  # fmt: skip


def choice_of(architecture: str) -> ExpertChoice:
    """Of the last layer, which has experts in all of them."""
    model = build_model(
        ModelConfig.from_dict({"architectures": [architecture], **CASES[architecture].fields}), dtype="float32"
    )
    load_dummy_weights(model)
    choice = model.layers[-1].feed_forward.router.select
    assert isinstance(choice, ExpertChoice)
    return choice


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_choice_is_the_rule(architecture: str) -> None:
    choice = choice_of(architecture)
    num_experts = choice.num_experts
    assert choice.rule.fits(num_experts)
    logits = 2 * torch.randn(40, num_experts, generator=torch.Generator().manual_seed(1))
    bias = None
    if choice._bias is not None:
        choice._bias.value = bias = 0.3 * torch.randn(num_experts, generator=torch.Generator().manual_seed(2))
    wanted_ids, wanted = ops.route_experts(logits, bias, choice.rule)
    for ids, weights in (choice(logits.clone()), choose_experts(logits, bias, choice.rule)):
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(weights, wanted, rtol=5e-6, atol=1e-7)


def test_experts_of_other_groups_may_count_as_zero() -> None:
    """A.X K2: a token chooses them before those that the bias makes less than zero."""
    from transformers import AXK2Config
    from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

    fields = CASES["AXK2ForCausalLM"].fields
    model = build_model(ModelConfig.from_dict({"architectures": ["AXK2ForCausalLM"], **fields}), dtype="float32")
    load_dummy_weights(model)
    network = model.layers[-1].feed_forward
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(8, 64, generator=generator) / 4, torch.randn(40, 64, generator=generator)
    oracle = AXK2TopkRouter(AXK2Config(**fields))
    for bias in (torch.zeros(8), torch.linspace(-1.2, 0.1, 8)):
        network.router.weight = oracle.weight.data = weight
        network.choice._bias.value = oracle.e_score_correction_bias = bias
        _, weights, ids = oracle(x)
        own_ids, own = network.router(x)
        order = ids.argsort(dim=-1)
        assert torch.equal(own_ids.sort(dim=-1).values, ids.gather(1, order))
        torch.testing.assert_close(own.gather(1, own_ids.argsort(dim=-1)), weights.gather(1, order))
