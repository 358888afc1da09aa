"""Which layers are quantized, and how, is what the files hold; the configuration says what they do not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_packers import awq, gptq
from models_quantized import FORMATS, INT4, INT8, TOKENS, ct, logits_of, make_mixed, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from quire_interfaces import CheckpointError, Fields
from quire_models import DecoderLM, ModelConfig, load_model
from quire_models.ledger import weight_ledger
from quire_models.quantization_formats import parse_quantization
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint
from quire_testkit.parity.cases import CASES as FAMILIES
from quire_testkit.parity.oracle import write_checkpoint

EXCLUSIONS = {
    "gptq": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "auto-round": "modules_to_not_convert",
    "compressed-tensors": "ignore",
    "fp8": "modules_to_not_convert",
    "modelopt": "exclude_modules",
    "quark": "exclude",
    "bitsandbytes": "llm_int8_skip_modules",
    "torchao": "modules_to_not_convert",
}
"""Method -> its key for layers that are not quantized."""
ROUNDED = {"w8a8", "w8a8 static", "w8a8 asymmetric"}


def expected_logits(oracle: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle.float()(torch.tensor([TOKENS])).logits[0]
    return logits


def check(folder: Path, oracle: Any, *, tolerance: float = 1e-3, **options: Any) -> DecoderLM:
    """Logits of every token are those of the dequantized network, and the same tokens are the most likely."""
    model = load_model(ModelConfig.from_path(folder), folder, dtype="float32", **options)
    got, wanted = logits_of(model, TOKENS), expected_logits(oracle)
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert torch.equal(got.argmax(1), wanted.argmax(1))
    return model


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ROUNDED])
def test_each_format_believes_the_files(name: str, tmp_path: Path) -> None:
    """Layers that are plain although all should be quantized, one of three that share an input among them; and one that
    is quantized although it is excluded."""
    config = copy.deepcopy(FORMATS[name])
    excluded = config.setdefault(EXCLUSIONS[config["quant_method"]], [])
    excluded.append("model.layers.1.mlp.gate_proj")
    plain = ("lm_head", "layers.0.mlp.down_proj", "layers.1.self_attn.q_proj", "layers.2.self_attn")
    oracle = make_mixed(tmp_path, config, lambda layer: "" if any(part in layer for part in plain) else name)
    model = check(tmp_path, oracle)
    forms = {layer.name.removesuffix(".weight"): layer.plain() is None for layer in model.linears}
    assert {layer for layer, is_quantized in forms.items() if not is_quantized} == {
        "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj",
        *(f"model.layers.2.self_attn.{part}_proj" for part in "qkvo"),
    } or "widened" in parse(config).notes  # fmt: skip


def parse(config: dict[str, Any]) -> Any:
    return parse_quantization(Fields({"quantization_config": config}, "config.json"))


@pytest.mark.parametrize("join", [False, True])
def test_three_layers_of_one_input_in_three_forms(join: bool, tmp_path: Path) -> None:
    """Queries in int4, keys as they are, values in int8, whatever the targets say."""
    config = {
        **ct("pack-quantized", INT4),
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"targets": ["re:.*mlp.*"], "format": "pack-quantized", "weights": INT4},
            "group_1": {"targets": [], "format": "int-quantized", "weights": INT8},
        },
    }
    forms = {"q_proj": "packed", "v_proj": "int8", "gate_proj": "packed", "down_proj": "int8"}
    oracle = make_mixed(tmp_path, config, lambda layer: forms.get(layer.rpartition(".")[2], ""))
    model = check(tmp_path, oracle)
    if join:
        from quire_models.loading import build_model
        from quire_models.weights import load_weights

        model = build_model(ModelConfig.from_path(tmp_path), dtype="float32", join_products=True)  # type: ignore[assignment]
        load_weights(model, tmp_path)
        wanted = expected_logits(oracle)
        assert (logits_of(model, TOKENS) - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    kept = [layer.stack_weights() for layer in model.linears]
    kept_bytes = sum(one.nbytes for layer in kept if layer is not None for one in layer if isinstance(one, Tensor))
    ledger = weight_ledger(ModelConfig.from_path(tmp_path), "float32")
    assert ledger["attention"] + ledger["MLP"] == pytest.approx(kept_bytes, rel=0.02)


def test_a_head_is_what_the_files_hold(tmp_path: Path) -> None:
    """Quantized although it is ignored, and plain although it is a target."""
    oracle = make_mixed(tmp_path / "a", ct("pack-quantized", INT4), lambda _: "packed")
    model = check(tmp_path / "a", oracle)
    assert model.linear_kernels.startswith("grouped_linear for 22")
    config = ModelConfig.from_path(tmp_path / "a")
    assert weight_ledger(config, "float32")["LM head"] < 320 * 128 * 2
    everything = {**ct("pack-quantized", INT4), "ignore": []}
    oracle = make_mixed(tmp_path / "b", everything, lambda layer: "" if layer == "lm_head" else "packed")
    model = check(tmp_path / "b", oracle)
    assert model.linear_kernels.startswith("grouped_linear for 21")
    assert weight_ledger(ModelConfig.from_path(tmp_path / "b"), "float32")["LM head"] == 320 * 128 * 4


def test_forms_that_the_configuration_has_not_are_refused_by_name(tmp_path: Path) -> None:
    make_mixed(tmp_path, FORMATS["fp8 tensor"], lambda layer: "packed" if "up_proj" in layer else "")
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.up_proj: the files hold weight_packed \(I32\), .*no such"
    ):
        load_model(ModelConfig.from_path(tmp_path), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.up_proj is quantized \(weight_packed \(I32\), .*says how"
    ):
        ModelConfig.from_path(tmp_path)


def rounded(weight: Tensor, bits: int, size: int, *, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers from 0, zero points, scales and what they stand for, in float64."""
    groups = weight.double().view(len(weight), -1, size)
    middle = 1 << (bits - 1)
    if symmetric:
        scale = (groups.abs().amax(2) / (middle - 1)).half().double()
        zero = torch.full(scale.shape, middle)
    else:
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / (2 * middle - 1)).half().double()
        zero = (-low / scale).round().clamp(1, 2 * middle - 1).long()
    q = (groups / scale[:, :, None] + zero[:, :, None]).round().clamp(0, 2 * middle - 1).long()
    restored = (scale[:, :, None] * (q - zero[:, :, None])).view(weight.shape)
    return q.view(weight.shape), zero, scale.float(), restored.float()


Plan = Callable[[str], tuple[int, int] | None]
"""Layer -> bits and group size; None for a plain one."""


def make_rounded(
    folder: Path, config: dict[str, Any], plan: Plan, *, minus: int = 1, layout: str = "gptq", symmetric: bool = True,
    beside: str = "", leave_out: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """A checkpoint whose layers are in GPTQ's or AWQ's layout, and Transformers' model of what they stand for."""
    torch.manual_seed(5)
    oracle = tiny_hf_checkpoint(folder, "llama", hidden_size=128, intermediate_size=256, vocab_size=320)
    tensors = load_file(folder / "model.safetensors")
    for name, module in oracle.named_modules():
        form = plan(name) if isinstance(module, torch.nn.Linear) and name != "lm_head" else None
        if form is None:
            continue
        weight = tensors.pop(f"{name}.weight")
        q, zero, scale, restored = rounded(weight, *form, symmetric=symmetric)
        groups = torch.arange(weight.shape[1]) // form[1]
        stored = awq(q, zero, scale) if layout == "awq" else gptq(q, zero, scale, groups, form[0], minus=minus)
        tensors |= {f"{name}.{part}": one.contiguous() for part, one in stored.items() if part not in leave_out}
        module.weight.data.copy_(restored)
    save_file(tensors, folder / "model.safetensors")
    if beside:
        (folder / beside).write_text(json.dumps(config))
    else:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return oracle


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
ROUND: dict[str, Any] = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "iters": 200, "autoround_version": "0.9",
    "data_type": "int", "packing_format": "auto_round:auto_gptq",
}  # fmt: skip


def every(_: str) -> tuple[int, int]:
    return 4, 32


def mlp_only(name: str) -> tuple[int, int] | None:
    return (4, 32) if "mlp" in name else None


def mlp_in_eights(name: str) -> tuple[int, int]:
    return (8, 64) if "mlp" in name else (4, 32)


CASES: dict[str, dict[str, Any]] = {
    "gptq, zero points of the second version": {"config": GPTQ, "plan": every, "minus": 0},
    "gptq_v2, zero points of the first version": {"config": {**GPTQ, "checkpoint_format": "gptq_v2"}, "plan": every},
    "gptq without a word about symmetry": {
        "config": {key: value for key, value in GPTQ.items() if key != "sym"}, "plan": every, "minus": 0,
    },
    "gptq without zero points": {"config": GPTQ, "plan": every, "leave_out": ("qzeros", "g_idx")},
    "gptq asymmetric": {"config": {**GPTQ, "sym": False}, "plan": every, "symmetric": False},
    "gptq asymmetric, said to be symmetric": {"config": GPTQ, "plan": every, "symmetric": False},
    "gptq_v2 asymmetric": {
        "config": {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, "plan": every, "symmetric": False, "minus": 0,
    },
    "dynamic leaves layers": {"config": {**GPTQ, "dynamic": {r"-:.*self_attn\..*": {}}}, "plan": mlp_only},
    "dynamic with bits and groups": {
        "config": {**GPTQ, "dynamic": {r"+:.*mlp\.": {"bits": 8, "group_size": 64}}}, "plan": mlp_in_eights,
    },
    "dynamic says nothing of it": {"config": GPTQ, "plan": mlp_in_eights},
    "modules in a block": {
        "config": {**GPTQ, "modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]},
        "plan": mlp_only,
    },
    "GPTQModel's newer names": {
        "config": {**GPTQ, "method": "gptq", "format": "gptq", "pack_dtype": "int32", "meta": {"a": 1}}, "plan": every,
    },
    "quantize_config.json": {
        "config": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "model_file_base_name": "model"},
        "plan": every, "beside": "quantize_config.json",
    },
    "quant_config.json": {
        "config": {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        "plan": every, "layout": "awq", "symmetric": False, "beside": "quant_config.json",
    },
    "awq": {"config": AWQ, "plan": every, "layout": "awq", "symmetric": False},
    "awq without zero points": {
        "config": {**AWQ, "zero_point": False}, "plan": every, "layout": "awq", "leave_out": ("qzeros",),
    },
    "awq, names that end in a dot": {
        "config": {**AWQ, "modules_to_not_convert": ["model.layers.0.", "self_attn."]},
        "plan": lambda name: None if "layers.0" in name or "self_attn" in name else (4, 32), "layout": "awq",
    },
    "awq with groups of another size": {"config": AWQ, "plan": lambda _: (4, 64), "layout": "awq"},
    "auto-round as gptq": {"config": ROUND, "plan": every},
    "auto-round as gptq, asymmetric": {"config": {**ROUND, "sym": False}, "plan": every, "symmetric": False},
    "auto-round in a layout of its own": {
        "config": {**ROUND, "sym": False, "packing_format": "auto_round"},
        "plan": every, "symmetric": False, "minus": 0,
    },
    "auto-round as awq": {
        "config": {**ROUND, "sym": False, "packing_format": "auto_round:auto_awq"},
        "plan": every, "layout": "awq", "symmetric": False,
    },
    "auto-round with layers of other bits": {
        "config": {
            **ROUND, "block_name_to_quantize": "model.layers",
            "extra_config": {
                "model.layers.0.self_attn.q_proj": {"bits": 16, "data_type": "float"},
                r".*mlp\.(gate|up|down)_proj": {"bits": 8, "group_size": 64},
            },
        },
        "plan": lambda name: None if "0.self_attn.q" in name else mlp_in_eights(name),
        "leave_out": ("g_idx",),
    },
    "gptq, written by AutoRound": {
        "config": {**GPTQ, "provider": "auto-round", "autoround_version": "0.9", "iters": 200, "nsamples": 128},
        "plan": every,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gptq_awq_and_autoround_as_their_tools_write_them(name: str, tmp_path: Path) -> None:
    oracle = make_rounded(tmp_path, **CASES[name])
    config = ModelConfig.from_path(tmp_path)
    assert config.quantization is not None
    assert "not read" not in config.quantization.notes
    check(tmp_path, oracle)


def test_symmetric_layers_with_impossible_zero_points_are_refused(tmp_path: Path) -> None:
    make_rounded(tmp_path, GPTQ, every, minus=5)
    with pytest.raises(
        CheckpointError, match=r"q_proj: its zero points are all 3, .* symmetric, where they are 7 or 8"
    ):
        load_model(ModelConfig.from_path(tmp_path), tmp_path)


PHI3: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "vocab_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_projections_in_one_matrix_under_either_name(tmp_path: Path) -> None:
    """Phi-3, whose queries, keys and values are one layer in the files; a configuration may name any of them."""
    for rules in (
        ["model.layers.0.self_attn.qkv_proj"],
        [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"],
        [],
    ):
        folder = tmp_path / str(len(rules))
        torch.manual_seed(3)
        oracle = Phi3ForCausalLM(Phi3Config(**PHI3)).eval()
        oracle.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name, module in oracle.named_modules():
            if isinstance(module, torch.nn.Linear) and name not in ("lm_head", "model.layers.0.self_attn.qkv_proj"):
                stored, restored = quantize("packed", tensors.pop(f"{name}.weight"))
                tensors |= {f"{name}.{part}": one.contiguous() for part, one in stored.items()}
                module.weight.data.copy_(restored)
        save_file(tensors, folder / "model.safetensors")
        values = json.loads((folder / "config.json").read_text())
        quantization = {**ct("pack-quantized", INT4), "ignore": ["lm_head", *rules]}
        (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))
        check(folder, oracle)


def without(name: str, *parts: str) -> Callable[[str], str]:
    return lambda layer: "" if layer == "lm_head" or any(part in layer for part in parts) else name


def test_scales_are_what_the_files_hold(tmp_path: Path) -> None:
    """One for a tensor, an output or a block, whichever the configuration says; under either name."""
    forms = {"q_proj": "float channel", "k_proj": "float tensor", "v_proj": "float block", "up_proj": "fp8 block"}
    for at, config in enumerate((FORMATS["float channel"], FORMATS["fp8 tensor"], FORMATS["fp8 block"])):
        folder = tmp_path / str(at)
        oracle = make_mixed(folder, config, lambda layer: forms.get(layer.rpartition(".")[2], ""))
        check(folder, oracle)
    fbgemm = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    oracle = make_mixed(tmp_path / "fbgemm", fbgemm, without("float channel", "layers.0"))
    check(tmp_path / "fbgemm", oracle)


def test_layers_of_several_algorithms_of_modelopt(tmp_path: Path) -> None:
    layers = {
        f"model.layers.{layer}.mlp.{part}_proj": {"quant_algo": "FP8" if part == "up" else "NVFP4", "group_size": 16}
        for layer in range(3)
        for part in ("gate", "up", "down")
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    oracle = make_mixed(
        tmp_path,
        config,
        lambda name: "" if name not in layers else "modelopt fp8" if "up" in name else "modelopt nvfp4",
    )
    check(tmp_path, oracle)


@pytest.mark.parametrize(
    ("rules", "layer", "is_quantized"),
    [
        (["model.layers.0.mlp.down_proj"], "model.layers.0.mlp.down_proj", False),
        (["model.layers.0.mlp"], "model.layers.0.mlp.down_proj", False),
        (["model.layers.0."], "model.layers.0.mlp.down_proj", False),
        (["model.layers.1"], "model.layers.10.mlp.down_proj", True),
        (["down_proj"], "model.layers.0.mlp.down_proj", False),
        (["mlp.down"], "model.layers.0.mlp.down_proj", True),
        (["re:.*down_proj$"], "model.layers.0.mlp.down_proj", False),
        (["re:down_proj"], "model.layers.0.mlp.down_proj", True),
        (["model.layers.0.self_attn.qkv_proj"], "model.layers.0.self_attn.k_proj", False),
        (["re:.*gate_up_proj"], "model.layers.0.mlp.up_proj", False),
        (["."], "model.layers.0.mlp.up_proj", True),
    ],
)
def test_rules_of_layers_where_no_files_are_known(rules: list[str], layer: str, is_quantized: bool) -> None:
    config = parse({**ct("pack-quantized", INT4), "ignore": rules})
    assert (config.of_layer(layer) is not None) == is_quantized


def test_the_first_rule_of_dynamic_counts() -> None:
    rules = {r"+:.*\.0\.mlp": {"bits": 8}, r"-:.*mlp": {}, r".*o_proj": {"group_size": 128, "sym": False}}
    config = parse({**GPTQ, "dynamic": rules})
    found = {name: config.of_layer(f"model.layers.{name}") for name in ("0.mlp.up", "1.mlp.up", "1.attn.o_proj", "1.q")}
    assert found["0.mlp.up"].bits == 8
    assert found["1.mlp.up"] is None
    assert (found["1.attn.o_proj"].group_size, found["1.attn.o_proj"].sym) == (128, False)
    assert (found["1.q"].bits, found["1.q"].group_size) == (4, 32)


def test_codes_and_names_are_those_of_the_files(tmp_path: Path) -> None:
    """bitsandbytes' table and nested scales, and the names of NVFP4, whichever the configuration says."""
    for at, (said, held) in enumerate((("nf4", "fp4 nested"), ("fp4 nested", "nf4"), ("nvfp4", "modelopt nvfp4"))):
        oracle = make_mixed(tmp_path / str(at), FORMATS[said], without(held, "layers.0"))
        model = check(tmp_path / str(at), oracle)
        assert model.stored_forms.endswith("; 7 layers plain")


def test_zero_points_are_those_of_the_files(tmp_path: Path) -> None:
    """Of a checkpoint that is said to be symmetric."""
    check(tmp_path / "packed", make_mixed(tmp_path / "packed", FORMATS["packed"], without("packed zeros", "layers.0")))
    oracle = make_mixed(tmp_path / "int8", FORMATS["int8"], lambda _: "")
    tensors = load_file(tmp_path / "int8" / "model.safetensors")
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and "up_proj" in name:
            q, zero, scale, restored = rounded(tensors.pop(f"{name}.weight"), 8, 128, symmetric=False)
            stored = {"weight": q - 128, "weight_zero_point": zero - 128}
            tensors |= {f"{name}.{part}": one.to(torch.int8) for part, one in stored.items()}
            tensors[f"{name}.weight_scale"] = scale
            module.weight.data.copy_(restored)
    save_file(tensors, tmp_path / "int8" / "model.safetensors")
    check(tmp_path / "int8", oracle)


def test_torchao_layers_are_what_the_files_hold(tmp_path: Path) -> None:
    """Whole numbers of 4 and 8 bits and fp8, by groups, outputs and for all, whichever the configuration says."""
    held = {
        "q_proj": "torchao int4",
        "k_proj": "torchao int8",
        "gate_proj": "torchao float8",
        "down_proj": "torchao int8",
    }
    for at, said in enumerate(("torchao int4", "torchao int8", "torchao float8")):
        folder = tmp_path / str(at)
        oracle = make_mixed(folder, FORMATS[said], lambda layer: held.get(layer.rpartition(".")[2], ""))
        check(folder, oracle)


def test_layers_that_the_network_calls_otherwise(tmp_path: Path) -> None:
    """LFM2's files have w1, w3 and w2 where the network has gate, up and down."""
    torch.manual_seed(2)
    case = FAMILIES["Lfm2ForCausalLM"]
    oracle = write_checkpoint(tmp_path, "Lfm2ForCausalLM", case).float()
    tensors, left = load_file(tmp_path / "model.safetensors"), []
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and ".feed_forward.w" in name:
            if name.endswith(("0.feed_forward.w1", "1.feed_forward.w2")):
                left.append(name)
                continue
            stored, restored = quantize("int8", tensors.pop(f"{name}.weight").float())
            tensors |= {f"{name}.{part}": one.contiguous() for part, one in stored.items()}
            module.weight.data.copy_(restored)
    assert len(left) == 2
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": FORMATS["int8"]}))
    model = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    compared = 0
    for layer in model.linears:
        outer, _, last = layer.name.removesuffix(".weight").rpartition(".")
        if last in names:
            wanted = oracle.get_submodule(f"{outer}.{names[last]}").weight
            assert torch.allclose(layer.base()[0], wanted, atol=1e-6)
            compared += 1
    assert compared == 3 * len(oracle.model.layers)


def test_a_configuration_of_a_checkpoint_without_quantized_layers_says_nothing(tmp_path: Path) -> None:
    """Left behind when adapters were merged into widened weights, or meant for loading."""
    oracle = make_mixed(tmp_path, FORMATS["nf4"], lambda _: "")
    assert ModelConfig.from_path(tmp_path).quantization is None
    assert check(tmp_path, oracle).stored_forms == ""
    config = ModelConfig.from_path(tmp_path)
    load_model(config, tmp_path, linear_method="int8")  # its weights can be quantized as any


def test_the_report_says_what_the_files_hold(tmp_path: Path) -> None:
    oracle = make_rounded(tmp_path, GPTQ, lambda name: None if "o_proj" in name else mlp_in_eights(name))
    model = check(tmp_path, oracle)
    assert model.stored_forms == "gptq, 4 bits, groups of 32 and gptq, 8 bits, groups of 64; 3 layers plain"
