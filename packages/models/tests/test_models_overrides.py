"""Fields of config.json that the user replaces: they count, wherever the file has them, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig, load_model
from quire_testkit.parity.case import LLAMA_FIELDS
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

LLAMA = {**LLAMA_FIELDS, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def read(overrides: dict[str, Any], **fields: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **fields}, overrides=overrides)


def same_as(config: ModelConfig, **fields: Any) -> bool:
    """Whether a file with these fields says the same."""
    written = ModelConfig.from_dict({**LLAMA, **fields})
    return all(getattr(config, name) == getattr(written, name) for name in ("rope", "max_model_len", "num_layers"))


def test_a_replaced_field_reads_as_if_it_were_written() -> None:
    assert same_as(read({"num_hidden_layers": 1}), num_hidden_layers=1)
    assert same_as(read({"rope_theta": 5e5}), rope_theta=5e5)
    assert same_as(read({"rope_scaling": YARN}), rope_scaling=YARN)


def test_objects_are_merged_and_null_takes_away() -> None:
    assert same_as(read({"rope_scaling": {"factor": 8.0}}, rope_scaling=YARN), rope_scaling={**YARN, "factor": 8.0})
    assert same_as(read({"rope_scaling": None}, rope_scaling=YARN))


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_scaling": YARN}, {**YARN, "rope_theta": 1e4}),
        ({"rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 5e5}, {**YARN, "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
    ],
)
def test_the_older_spelling_counts_where_the_file_has_the_newer(
    overrides: dict[str, Any], meant: dict[str, Any]
) -> None:
    stored = {"rope_type": "default", "rope_theta": 1e4}
    assert (
        read(overrides, rope_parameters=stored).rope == ModelConfig.from_dict({**LLAMA, "rope_parameters": meant}).rope
    )
    unscaled = read({"rope_scaling": None}, rope_parameters={**YARN, "rope_theta": 5e5})
    assert unscaled.rope == ModelConfig.from_dict({**LLAMA, "rope_parameters": {"rope_theta": 5e5}}).rope


def test_what_would_change_nothing_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"'num_hiden_layers', which LlamaForCausalLM does not .* 'num_hidden_layers'"
    ):
        read({"num_hiden_layers": 1})
    kinds = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=r"rope_parameters for each kind of layers \(full_attention, sliding"):
        read({"rope_theta": 5e5}, rope_parameters=kinds)
    with pytest.raises(ConfigError, match=r"rope_scaling must be an object, is 4"):
        read({"rope_scaling": 4}, rope_parameters={"rope_theta": 1e4})
    with pytest.raises(
        CheckpointError, match=r"config.json with hf_overrides: num_hidden_layers must be a whole number"
    ):
        read({"num_hidden_layers": "two"})


def test_a_network_of_transformers_gets_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Ernie4_5ForCausalLM", CASES["Ernie4_5ForCausalLM"])

    def bodies(overrides: dict[str, Any]) -> Any:
        config = ModelConfig.from_path(tmp_path, overrides=overrides)
        return load_model(config, tmp_path, dtype="float32")._model.model  # type: ignore[attr-defined]

    plain, overridden = bodies({}), bodies({"rope_theta": 12345.0})
    assert overridden.config.rope_parameters["rope_theta"] == 12345.0
    assert not torch.equal(plain.rotary_emb.inv_freq, overridden.rotary_emb.inv_freq)
    assert "12345" not in (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError, match=r"'rope_thetas', which Transformers' Ernie4_5Config does not read"):
        bodies({"rope_thetas": 1.0})
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Ernie4_5ForCausalLM"]
