"""Commands and calls that name the checkpoint's own format, as those for vLLM do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, QuireConfig, SamplingParams
from quire.plan import make_plan
from quire.quantize import quantize_checkpoint
from quire_demo_model import checkpoint_path
from quire_interfaces import ConfigError
from quire_models import ModelConfig

SMALL = {"num_gpu_blocks_override": 40, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in int8, with one layer as it was and a key that nobody reads."""
    made = tmp_path_factory.mktemp("int8") / "model"
    quantize_checkpoint(checkpoint_path(), made, "int8")
    plain = load_file(Path(checkpoint_path()) / "model.safetensors")
    file = next(made.glob("*.safetensors"))
    tensors = load_file(file)
    layer = "model.layers.0.mlp.down_proj"
    del tensors[f"{layer}.weight_scale"]
    save_file({**tensors, f"{layer}.weight": plain[f"{layer}.weight"]}, file, metadata={"format": "pt"})
    values = json.loads((made / "config.json").read_text())
    values["quantization_config"]["recipe"] = "of somebody"
    (made / "config.json").write_text(json.dumps(values))
    return made


def test_a_name_that_is_right_changes_nothing(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    tokens = []
    for named in ({}, {"quantization": "compressed-tensors", "load_format": "safetensors"}):
        with LLM(folder, **SMALL, **named) as llm:
            (answer,) = llm.generate(["What is 27 + 35?"], params)
            tokens.append(answer.outputs[0].token_ids)
            assert "not read of quantization_config: recipe" in llm.engine_info.choices["weights"]
    assert tokens[0] == tokens[1]


def test_a_name_that_is_wrong_is_told_what_the_checkpoint_is(folder: Path) -> None:
    model = ModelConfig.from_path(folder)
    for settings, message in (
        ({"quantization": "awq"}, r"'awq' is for checkpoints of awq, and this one is compressed-tensors: int8, 8 bits"),
        ({"quantization": "int4"}, r"'int4' was asked for, but the checkpoint is quantized already"),
        ({"quantization": "hqq"}, r"'hqq' is not supported: .* use one in compressed-tensors"),
        ({"load_format": "gguf"}, r"load_format is 'gguf', but the model is no GGUF file"),
        ({"load_format": "bitsandbytes"}, r"load_format is 'bitsandbytes', but the checkpoint was not quantized by it"),
    ):
        config = QuireConfig.from_environment(**SMALL, **settings)
        with pytest.raises(ConfigError, match=message) as refusal:
            make_plan(config, model)
        assert refusal.value.field == next(iter(settings))


def test_a_plan_counts_each_layer_as_the_files_hold_it(folder: Path, tmp_path: Path) -> None:
    config = QuireConfig.from_environment(**SMALL)
    kept = make_plan(config, ModelConfig.from_path(folder)).ledger_bytes["weights: MLP"]
    shutil.copy(folder / "config.json", tmp_path)
    said = make_plan(config, ModelConfig.from_path(tmp_path)).ledger_bytes["weights: MLP"]
    layer = load_file(Path(checkpoint_path()) / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert kept - said == layer.numel() - 2 * len(layer)  # two bytes a weight, not one and a scale for each output
