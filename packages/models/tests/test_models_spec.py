"""Descriptions of networks against what is built of them: the same parameters, the same bytes, the same caches."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from quire_interfaces import Fields
from quire_models import ARCHITECTURES, ModelConfig, build_model
from quire_models.layers.fused import named_tensors
from quire_models.ledger import linear_shapes, weight_ledger
from quire_models.rope_config import RopeConfig
from quire_models.spec import ANY_EXPERT, CheckpointNames, FusedRows, NetworkSpec, Weight, within
from quire_testkit.parity.cases import CASES


@cache
def config_of(architecture: str) -> ModelConfig:
    import transformers

    case = CASES[architecture]
    fields = getattr(transformers, case.config)(**case.fields).to_dict()
    return ModelConfig.from_dict({**fields, "architectures": [architecture]})


def shapes_of(network: NetworkSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, each expert's by itself."""
    return {
        weight.name.replace(ANY_EXPERT, str(expert)): weight.shape
        for weight in network.weights()
        for expert in range(weight.num_experts)
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_network_is_built_as_it_is_described(architecture: str) -> None:
    config = config_of(architecture)
    model = build_model(config, dtype="bfloat16", max_loras=1)
    described = shapes_of(config.network)
    built = {each.name: each for each in model.parameters if not each.optional or each.name in described}
    assert described.keys() <= built.keys()
    assert all(math.prod(described[name]) == math.prod(built[name].shape) for name in described)
    table = config.vocab_size * config.network.embedding.size
    tables = [math.prod(built[name].shape) for name in built.keys() - described.keys()]
    has_head = not (config.tie_word_embeddings or config.is_encoder)
    assert tables == [table] * (1 + has_head if table else 0), "those of embedding and head, and no more"

    buffers = {weight.name for weight in config.network.weights() if weight.is_buffer}
    sizes = [
        math.prod(each.shape) * (each.dtype or torch.bfloat16).itemsize
        for name, each in built.items()
        if name not in buffers
    ]
    assert sum(weight_ledger(config, "bfloat16").values()) == sum(sizes), "the ledger counts what is built"

    assert model.adapters is not None
    sites = [site.shape for name, site in model.adapters.linears.items() if ".experts." not in name]
    planned = linear_shapes(config)
    assert all(planned.count(shape) <= sites.count(shape) for shape in set(planned)), "places of adapters"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_attention_has_a_cache_of_its_own(architecture: str) -> None:
    config = config_of(architecture)
    specs = config.kv_cache_specs(16, "float32")
    if config.is_encoder:
        assert specs == {}
        return
    num_cross = config.num_layers if config.max_encoder_len else 0
    assert len(specs) == len(config.network.mixers) + num_cross


def test_rotations_are_replaced_wherever_they_stand() -> None:
    longrope = RopeConfig(kind="longrope", original_max_position_embeddings=8, divisors=(2.0,), short_divisors=(1.0,))
    network = config_of("LlamaForCausalLM").network
    attention = network.attention
    assert within(network, 4) is network
    changed = within((attention, (longrope, attention)), 4)
    assert changed[0] is attention
    assert changed[1][0].divisors == (1.0,)
    assert within((longrope,), 9)[0] is longrope


def test_tensors_of_a_checkpoint_are_named_by_rules() -> None:
    rules = CheckpointNames(
        ignored_prefixes=("mtp.",),
        ignored_suffixes=(".mask",),
        default_prefix="body.",
        renamed=((".old.", ".new."),),
        transposed=("flat.weight",),
        squeezed=("lm_head.bias",),
        fused=(FusedRows(module="attn.qkv", parts=(("q", 2), ("k", 1)), groups=2),),
    )

    def named(name: str, tensor: torch.Tensor) -> dict[str, list[float]]:
        return {name: part.tolist() for name, part in named_tensors(rules, "lm_head", name, tensor)}

    assert named("mtp.x", torch.ones(1)) == named("a.mask", torch.ones(1)) == {}
    assert named("a.old.flat.weight", torch.tensor([[1.0, 2.0]])) == {"body.a.new.flat.weight": [[1.0], [2.0]]}
    assert named("lm_head.bias", torch.tensor([[1.0, 2.0]])) == {"lm_head.bias": [1.0, 2.0]}
    rows = torch.arange(6.0)[:, None]
    assert named("body.0.attn.qkv.weight", rows) == {
        "body.0.attn.q.weight": [[0.0], [1.0], [3.0], [4.0]],
        "body.0.attn.k.weight": [[2.0], [5.0]],
    }
    assert named("body.0.attn.qkv.weight", rows[:5]) == {"body.0.attn.qkv.weight": rows[:5].tolist()}


def test_unknown_fields_do_not_change_a_description() -> None:
    values = {"architectures": ["LlamaForCausalLM"], **CASES["LlamaForCausalLM"].fields}
    entry = ARCHITECTURES["LlamaForCausalLM"]
    assert entry.spec(Fields(values, "a")) == entry.spec(Fields({**values, "note": 1}, "b"))


def test_experts_are_counted_one_by_one() -> None:
    weights = [each for each in config_of("MixtralForCausalLM").network.weights() if each.num_experts > 1]
    assert {each.num_experts for each in weights} == {6}
    assert all(isinstance(each, Weight) and ANY_EXPERT in each.name for each in weights)
