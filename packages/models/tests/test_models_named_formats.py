"""Names of quantized checkpoints and of files: right where the checkpoint says the same, else told what it is."""

from __future__ import annotations

from typing import Any

import pytest
from models_quantized import FORMATS

from quire_interfaces import ConfigError
from quire_models import ModelConfig
from quire_models.ledger import WEIGHT_BYTES
from quire_models.load_formats import LOAD_FORMATS, REFUSED_LOAD_FORMATS
from quire_models.named_formats import (
    _INSTEAD,
    CHECKPOINT_METHODS,
    check_load_format,
    resolved_linear_method,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CHECKPOINTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    **{name: FORMATS[name] for name in ("gptq", "awq", "packed", "fp8 block", "modelopt fp8", "modelopt nvfp4", "nf4")},
    **{name: FORMATS[name] for name in ("modelopt mxfp8", "quark channel", "torchao int8")},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True},
    "fbgemm": {"quant_method": "fbgemm_fp8"},
    "gguf": {"quant_method": "gguf", "types": {"a": "Q8_0"}},
    "gguf plain": {"quant_method": "gguf", "types": {"a": "F16"}},
    "KV scales": {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": SCHEME},
    "sparseml": {**FORMATS["packed"], "quant_method": "sparseml"},
}
RIGHT = {
    "plain": set(),
    "gptq": {"gptq", "gptq_marlin", "gptq_bitblas", "moe_wna16"},
    "awq": {"awq", "awq_marlin", "cpu_awq", "moe_wna16"},
    "packed": {"compressed-tensors"},
    "sparseml": {"compressed-tensors"},
    "KV scales": {"compressed-tensors"},
    "fp8 block": {"fp8"},
    "fbgemm": {"fbgemm_fp8"},
    "modelopt fp8": {"modelopt", "modelopt_mixed"},
    "modelopt nvfp4": {"modelopt", "modelopt_fp4", "petit_nvfp4", "modelopt_mixed"},
    "modelopt mxfp8": {"modelopt", "modelopt_mxfp8", "modelopt_mixed"},
    "nf4": {"bitsandbytes"},
    "quark channel": {"quark"},
    "torchao int8": {"torchao"},
    "auto-round": {"auto-round", "inc"},
    "gguf": {"gguf"},
    "gguf plain": {"gguf"},
}
"""Checkpoint -> every name that it has."""


def model_of(name: str) -> ModelConfig:
    config = CHECKPOINTS[name]
    return ModelConfig.from_dict(LLAMA if config is None else {**LLAMA, "quantization_config": config})


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_answers_to_its_own_names(name: str) -> None:
    model = model_of(name)
    assert resolved_linear_method(None, model) == "plain"
    assert resolved_linear_method("plain", model) == "plain"
    for asked in RIGHT[name]:
        assert resolved_linear_method(asked, model) == "plain"
        assert resolved_linear_method(asked.upper(), model) == "plain"
    online = {"fp8"} - RIGHT[name] if model.quantization is None else set()
    what = "quantize it while it is loaded" if name == "plain" else model.quantization_method
    for asked in CHECKPOINT_METHODS.keys() - RIGHT[name] - online:
        with pytest.raises(ConfigError, match=f"quantization '{asked}' .*{what}") as refusal:
            resolved_linear_method(asked, model)
        assert refusal.value.field == "quantization"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_that_are_plain_are_quantized_while_they_are_loaded(name: str) -> None:
    model = model_of(name)
    for asked in WEIGHT_BYTES.keys() - {"plain"} - RIGHT[name]:
        if model.quantization is None and asked == "w8a8-g64":
            with pytest.raises(
                ConfigError, match="'w8a8-g64' is for encoders alone, and LlamaForCausalLM is none; use"
            ):
                resolved_linear_method(asked, model)
        elif model.quantization is None:
            assert resolved_linear_method(asked, model) == asked
        else:
            with pytest.raises(
                ConfigError, match=f"'{asked}' was asked for, but .* quantized already .*leave the setting"
            ):
                resolved_linear_method(asked, model)


def test_other_names_say_what_to_do() -> None:
    model = model_of("plain")
    assert not _INSTEAD.keys() & (CHECKPOINT_METHODS.keys() | WEIGHT_BYTES.keys())
    for asked in _INSTEAD:
        with pytest.raises(
            ConfigError, match=f"quantization '{asked}' is not supported: .*(use |leave the setting out)"
        ):
            resolved_linear_method(asked, model)
    with pytest.raises(
        ConfigError, match=r"there is no speculative_quantization 'int5'; choose one of int8, .*recognised"
    ):
        resolved_linear_method("int5", model, field="speculative_quantization")


def test_files_are_what_they_are_said_to_be() -> None:
    allowed = {
        "plain": {"auto", "hf", "safetensors", "pt", "runai_streamer", "mistral", "dummy"},
        "gptq": {"auto", "hf", "safetensors", "pt", "runai_streamer", "mistral", "dummy"},
        "nf4": {"auto", "hf", "safetensors", "pt", "runai_streamer", "mistral", "bitsandbytes", "dummy"},
        "gguf": {"auto", "hf", "gguf", "dummy"},
        "gguf plain": {"auto", "hf", "gguf", "dummy"},
    }
    for name, formats in allowed.items():
        model = model_of(name)
        for asked in LOAD_FORMATS:
            if asked in formats:
                check_load_format(asked, model)
            else:
                with pytest.raises(ConfigError, match=f"load_format is '{asked}', but the .*leave the setting out"):
                    check_load_format(asked, model)
    # What vLLM has besides, by name.
    names = {
        "fastsafetensors", "instanttensor", "npcache", "runai_streamer_sharded", "sharded_state",
        "tensorizer",
    }  # fmt: skip
    assert set(REFUSED_LOAD_FORMATS) == names
    for name, instead in REFUSED_LOAD_FORMATS.items():
        with pytest.raises(ConfigError) as refused:
            check_load_format(name, model_of("plain"))
        assert refused.value.field == "load_format"
        assert f"{name} is not read: {instead}" in str(refused.value)
    with pytest.raises(ConfigError, match=r"load_format must be one of auto, [^(]* got 'other'"):
        check_load_format("other", model_of("plain"))
