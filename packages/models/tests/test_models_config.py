"""config.json in every spelling, and every broken field named in the error."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from quire_interfaces import CheckpointError, FullAttentionSpec, SlidingWindowSpec
from quire_models import ARCHITECTURES, ModelConfig
from quire_testkit.parity.cases import CASES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
FACTORS = {"long_factor": [1.0, 2.0, 3.0], "short_factor": [1.0] * 3}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def parse(base: dict[str, Any] = LLAMA, **fields: Any) -> ModelConfig:
    return ModelConfig.from_dict({**base, **fields})


def test_import_loads_no_torch() -> None:
    code = "import sys, quire_models, quire_models.config, quire_models.ledger, quire_models.hub; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "quire_models.config" in modules
    assert not {"torch", "numpy", "transformers", "safetensors", "huggingface_hub"} & set(modules)


def test_plain_fields_and_defaults() -> None:
    config = parse()
    assert (config.head_dim, config.query_size, config.kv_size) == (8, 32, 16)
    assert (config.dtype, config.max_model_len, config.eos_token_ids) == ("float32", 128, ())
    assert not config.tie_word_embeddings
    assert not any(weight.name.endswith(".bias") for weight in config.network.weights())
    assert config.network.attention.q_norm is None
    assert parse(num_key_value_heads=None).num_kv_heads == 4
    assert parse(head_dim=16).head_dim == 16
    assert parse(QWEN3).head_dim == 128
    assert parse(QWEN2).network.attention.qkv_bias
    assert not parse(QWEN2).network.attention.out_bias
    assert parse(attention_bias=True).network.attention.out_bias
    assert not parse(MISTRAL, attention_bias=True, mlp_bias=True).network.attention.qkv_bias


def test_dtype_spellings() -> None:
    assert parse(torch_dtype="bfloat16").dtype == "bfloat16"
    assert parse(dtype="float16").dtype == "float16"


def test_rope_spellings_agree() -> None:
    old = parse(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4})
    middle = parse(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 4.0})
    new = parse(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    assert old.rope == middle.rope == new.rope
    assert (new.rope.theta, new.max_model_len) == (5e5, 512)
    assert parse(rope_theta=7.0, rope_scaling=None).rope.theta == 7.0
    assert parse(rope_scaling={"rope_type": "dynamic", "factor": 2.0}).max_model_len == 256


def test_context_length_of_yarn_and_llama3() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse(rope_scaling=yarn).max_model_len == 256
    assert parse(rope_scaling=yarn, max_position_embeddings=300).max_model_len == 300
    assert parse(rope_scaling={**yarn, "factor": None}).rope.factor == 2.0
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert parse(rope_scaling=llama3).max_model_len == 128


def test_sliding_windows() -> None:
    assert parse(sliding_window=9).sliding_windows == (None, None)
    assert parse(MISTRAL, sliding_window=9).sliding_windows == (9, 9)
    assert parse(MISTRAL, sliding_window=None).sliding_windows == (None, None)
    assert parse(QWEN2, sliding_window=9, use_sliding_window=False).sliding_windows == (None, None)
    window = {"sliding_window": 9, "use_sliding_window": True}
    assert parse(QWEN2, **window, max_window_layers=1).sliding_windows == (None, 9)
    kinds = ["sliding_attention", "full_attention"]
    assert parse(QWEN3, **window, layer_types=kinds).sliding_windows == (9, None)
    specs = parse(QWEN3, **window, layer_types=kinds).kv_cache_specs(16, "bfloat16")
    assert list(specs) == ["model.layers.0", "model.layers.1"]
    assert isinstance(specs["model.layers.0"], SlidingWindowSpec)
    assert type(specs["model.layers.1"]) is FullAttentionSpec
    assert specs["model.layers.1"].block_bytes == 2 * 16 * 2 * 128 * 2


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 5}))
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (7, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["T5ForQuestionAnswering"]},
            "T5ForQuestionAnswering is not supported: .*nearest to it are .*T5ForConditionalGeneration",
        ),
        ({"architectures": []}, "no architecture has the model_type 'llama'|it names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of names"),
        ({"architectures": None, "model_type": "speecht5"}, "no architecture has the model_type 'speecht5'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number, is 'many'"),
        ({"vocab_size": 10.5}, "vocab_size must be a whole number"),
        ({"vocab_size": float("inf")}, "vocab_size must be a whole number"),
        ({"vocab_size": float("nan")}, "vocab_size must be a whole number"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, is 0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"hidden_size": 33}, r"hidden_size \(33\) is not a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be at least"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, is 'yes'"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [1, -2]}, "eos_token_id must be a token id"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, "rope type 'ntk'; Quire computes default, linear"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "longrope needs long_factor, a list of one number above 0"),
        ({"rope_scaling": {"type": "longrope", **FACTORS}}, "long_factor must have 4 numbers.* has 3"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope type"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim"),
        ({"rope_theta": 0}, "rope_theta must be"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta must be"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor .* must be greater",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_broken_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(**fields)


def test_broken_layer_types() -> None:
    for kinds in (["full_attention"], ["full_attention", "chunked"], "full", [["full_attention"], 3]):
        with pytest.raises(CheckpointError, match="layer_types must name"):
            parse(QWEN2, sliding_window=9, use_sliding_window=True, layer_types=kinds)


def test_folders_that_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_path(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelConfig.from_path(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        ModelConfig.from_path(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        ModelConfig.from_path(tmp_path)


def test_every_architecture_has_its_family() -> None:
    for name, entry in ARCHITECTURES.items():
        family = import_module(f"quire_models.families.{entry.family or entry.model_type}")
        assert callable(getattr(family, entry.function)), name


@pytest.mark.parametrize(
    ("architecture", "needed"), [("Qwen3ForCausalLM", {"qwen2"}), ("XGLMForCausalLM", {"xglm", "opt"})]
)
def test_a_network_imports_its_own_family_only(architecture: str, needed: set[str]) -> None:
    """Beside those whose parts it takes; and no torch."""
    fields = {**LLAMA, **CASES[architecture].fields, "architectures": [architecture]}
    code = (
        "import sys; from quire_models import ModelConfig; "
        f"ModelConfig.from_dict({fields!r}); assert 'torch' not in sys.modules; "
        "print(*(name.split('.')[2] for name in sys.modules if name.startswith('quire_models.families.')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) == needed
