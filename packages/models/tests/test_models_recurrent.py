"""What networks with recurrent layers say of themselves, and what they refuse; promises follow from the ops chosen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire_interfaces import CheckpointError, FullAttentionSpec, LatentAttentionSpec, MambaSpec
from quire_models import ModelConfig, build_model, load_model
from quire_models.layers.gated_norm import GatedNorm
from quire_models.ledger import num_parameters
from quire_ops import PagedLayout, op_table, ops
from quire_testkit.checkpoints import checkpoint_config
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.parity.recurrent_cases import RECURRENT_CASES


def hybrid(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["BambaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "mamba_n_heads": 4,
        "attn_layer_indices": [1],
        **fields,
    }


@pytest.mark.parametrize("architecture", RECURRENT_CASES)
def test_networks_ask_for_what_the_planner_counts(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    config = ModelConfig.from_path(tmp_path)
    model = build_model(config, dtype="bfloat16")
    buffers = ("correction_bias", "expert_bias", "layer_multipliers")
    counted = [each for each in model.parameters if not each.name.endswith(buffers)]
    assert sum(torch.Size(parameter.shape).numel() for parameter in counted) == num_parameters(config)
    specs = config.kv_cache_specs(16, "bfloat16")
    assert any(isinstance(spec, MambaSpec) for spec in specs.values())
    assert all(isinstance(spec, (MambaSpec, FullAttentionSpec, LatentAttentionSpec)) for spec in specs.values())


def test_a_layer_may_have_two_caches(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "FalconH1ForCausalLM", CASES["FalconH1ForCausalLM"])
    specs = ModelConfig.from_path(tmp_path).kv_cache_specs(16, "float32")
    assert [name.removeprefix("model.layers.") for name in specs][:3] == ["0.mamba", "0.self_attn", "1.mamba"]


def test_a_state_is_float32_whatever_keys_are_kept_in() -> None:
    config = ModelConfig.from_dict(hybrid())
    narrow, wide = config.kv_cache_specs(16, "fp8_e4m3"), config.kv_cache_specs(16, "float32")
    assert narrow["model.layers.0"] == wide["model.layers.0"]
    assert narrow["model.layers.1"] != wide["model.layers.1"]
    inner, group = 64, 256
    assert [state.shape for state in wide["model.layers.0"].states] == [(3, inner + 2 * group), (4, 16, 256)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_n_heads": 5}, "are not the mixer's inner width"),
        ({"mamba_n_groups": 3}, "4 Mamba heads cannot be shared out to 3 groups"),
        ({"time_step_limit": [2.0, 1.0]}, "time_step_limit must be two numbers, the smaller one first"),
        ({"time_step_limit": 3}, "time_step_limit must be two numbers"),
        ({"attn_layer_indices": ["1"]}, "attn_layer_indices must be a list of layers"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(hybrid(**fields))


@pytest.mark.parametrize(
    ("like", "fields", "message"),
    [
        ("mamba2", {"expand": 3}, r"expand \* hidden_size must be num_heads \* head_dim"),
        ("mamba2", {"state_size": 0}, "state_size must be at least 1"),
        ("qwen3-next", {"layer_types": ["linear_attention"]}, "layer_types must name"),
        ("qwen3-next", {"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "must be a multiple of"),
        ("qwen3-next", {"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
    ],
)
def test_wrong_fields_of_a_family_are_named(like: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(checkpoint_config(like, "tiny") | fields)


NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "mamba_num_heads": 8,
}
ZAMBA2 = {
    **NEMOTRON_H,
    "architectures": ["Zamba2ForCausalLM"],
    "num_hidden_layers": 2,
    "layers_block_type": ["mamba", "hybrid"],
}

MINIMAX = {
    **NEMOTRON_H,
    "architectures": ["MiniMaxForCausalLM"],
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}


def test_lightning_attention_is_its_formula(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "MiniMaxForCausalLM", CASES["MiniMaxForCausalLM"])
    config = ModelConfig.from_path(tmp_path)
    layer = load_model(config, tmp_path, dtype="float32").layers[2].mixer
    torch.manual_seed(0)
    tokens, heads, size = 21, 4, 24
    x = torch.randn(tokens, config.hidden_size)
    state = torch.full((4, heads, size, size), float("nan"))
    layout = PagedLayout(
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        block_table=torch.tensor([[1, 2, 3]], dtype=torch.int32),
        slot_mapping=torch.arange(8, 8 + tokens),
        block_size=8,
        query_lens=[tokens],
        kv_lens=[tokens],
    )
    got = layer(x, x, x, SimpleNamespace(states_of_layer=lambda _: ((state,), layout)))
    taken = torch.nn.functional.silu(layer.qkv_proj(x).double()).view(tokens, heads, 3 * size)
    query, key, value = taken.split(size, dim=-1)
    # Layer 2 of 3 hardly forgets: 2 ** (-8 * head / heads), times one less the share of layers before it.
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]).double() * (
        1 - 2 / (2 + 1e-5) + 1e-5
    )
    rows = []
    for token in range(tokens):
        forgets = torch.exp(-slopes * (token - torch.arange(token + 1))[:, None])  # [past, H]
        scores = (query[token] * key[: token + 1]).sum(-1) * forgets
        rows.append((scores[..., None] * value[: token + 1]).sum(0).flatten())
    attended = torch.stack(rows)
    attended = attended * torch.rsqrt(attended.square().mean(-1, keepdim=True) + 1e-6) * layer.norm.weight.double()
    wanted = layer.out_proj((torch.sigmoid(layer.output_gate(x).double()) * attended).float())
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_a_pattern_of_letters_is_one_of_names() -> None:
    kinds = ["mamba", "mlp", "attention", "mlp"]
    named = ModelConfig.from_dict(NEMOTRON_H | {"layers_block_type": kinds})
    assert ModelConfig.from_dict(NEMOTRON_H | {"hybrid_override_pattern": "M-*-"}) == named
    assert list(named.kv_cache_specs(16, "float32")) == ["backbone.layers.0.mixer", "backbone.layers.2.mixer"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (NEMOTRON_H | {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern must say M, \\*, - or E"),
        (NEMOTRON_H | {"layers_block_type": ["conv"]}, "layers_block_type must name one of"),
        (NEMOTRON_H | {"layers_block_type": ["attention"], "attention_bias": True}, "attention_bias True is not"),
        (NEMOTRON_H | {"layers_block_type": ["moe"], "n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        (ZAMBA2 | {"layers_block_type": ["mamba"]}, "layers_block_type must name one of"),
        (ZAMBA2 | {"attention_head_dim": 8}, "attention_head_dim must be 2"),
        (MINIMAX | {"layer_types": ["mamba"]}, "layer_types must name linear_attention or full_attention"),
        (MINIMAX | {"sliding_window": 8}, "sliding_window 8 is not supported"),
        (ZAMBA2 | {"n_mamba_heads": 3}, "n_mamba_heads .3. must divide"),
        (ZAMBA2 | {"num_key_value_heads": 2, "use_shared_attention_adapter": True}, "as many num_key_value_heads"),
    ],
)
def test_wrong_fields_of_further_hybrids_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(fields)


def test_infinite_bounds_of_time_steps_are_read_as_transformers_writes_them() -> None:
    config = ModelConfig.from_dict(hybrid(time_step_limit=[0.5, {"__float__": "Infinity"}]))
    assert config.network.mixers[0].dt_limit == (0.5, float("inf"))  # type: ignore[attr-defined]


def test_the_same_bits_are_promised_only_where_every_op_promises_them() -> None:
    plain = ModelConfig.from_dict(checkpoint_config("mamba2", "tiny"))
    has_kernels = any(each.name == "cpu" and each.unavailable is None for each in op_table().backends(ops.mamba2_scan))
    model = build_model(plain, dtype="float32")
    assert model.batch_invariant == has_kernels
    model._scope.chosen.append(op_table().backends(ops.mamba2_scan)[-1])  # the reference promises nothing
    assert not model.batch_invariant
    sparse = checkpoint_config("qwen3-next", "tiny") | {"num_experts": 4, "num_experts_per_tok": 2}
    assert build_model(ModelConfig.from_dict(sparse), dtype="float32").batch_invariant == has_kernels
    by_sigmoid = NEMOTRON_H | {
        "hybrid_override_pattern": "ME", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    assert build_model(ModelConfig.from_dict(by_sigmoid), dtype="float32").batch_invariant == has_kernels


@pytest.mark.parametrize("groups", [0, 1, 4])
@pytest.mark.parametrize("before_gate", [False, True])
def test_gated_norm_is_its_formula(groups: int, before_gate: bool) -> None:
    scope = build_model(ModelConfig.from_dict(checkpoint_config("mamba2", "tiny")), dtype="float32")._scope
    norm = GatedNorm(scope, 16, 1e-5, groups=groups, before_gate=before_gate)
    torch.manual_seed(0)
    x, gate, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    if groups:
        scope.parameters[-1].tensor = weight.clone()
    norm._finish()
    wide, opened = x.double(), torch.nn.functional.silu(gate.double())
    wanted = wide if before_gate else wide * opened
    if groups:
        parts = wanted.view(3, groups, -1)
        wanted = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 16) * weight.double()
    wanted = wanted * opened if before_gate else wanted
    assert torch.allclose(norm(x.clone(), gate.clone()).double(), wanted, atol=1e-5)
