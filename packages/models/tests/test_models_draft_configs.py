"""Configurations of drafters: the format of `speculators` says the same as the original one, and others are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig
from quire_models.draft_heads.eagle_config import EagleSpec, read_eagle_config
from quire_models.draft_heads.mtp_config import UNSUPPORTED, mtp_config
from quire_models.registry import ARCHITECTURES, OWN_CODE
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.media_cases import MEDIA_CASES

LAYER = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
OWN = {"draft_vocab_size": 80, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_both_formats_say_the_same(kind: str, tmp_path: Path) -> None:
    nested = {"speculators_model_type": kind, "transformer_layer_config": LAYER, "target_hidden_size": None, **OWN}
    theirs = read_eagle_config(write(tmp_path / "nested", nested), kind)
    assert theirs == read_eagle_config(write(tmp_path / "flat", LAYER | OWN), kind)
    normed = read_eagle_config(write(tmp_path / "normed", {**nested, "norm_before_residual": True}), kind)
    assert isinstance(theirs.network, EagleSpec)
    assert normed == replace(theirs, network=replace(theirs.network, norm_before_residual=True))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"speculators_model_type": "eagle"}, "kind 'eagle', not 'eagle3': choose speculative method eagle"),
        ({"speculators_model_type": "mtp"}, "kind 'mtp'.*do not run here"),
        ({"speculators_model_type": "dflash"}, "kind 'dflash'.*choose speculative method dflash"),
        ({**LAYER, "architectures": ["DFlashDraftModel"]}, "kind 'dflash'"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "choose speculative method mlp_speculator"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config must be an object"),
    ],
)
def test_other_drafters_are_refused_by_name(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_eagle_config(write(tmp_path / "other", values), "eagle3")


def test_a_parallel_head_is_a_kind_of_eagle3(tmp_path: Path) -> None:
    values = {"speculators_model_type": "peagle", "transformer_layer_config": LAYER | {"num_hidden_layers": 2}}
    folder = write(tmp_path / "parallel", {**values, **OWN, "mask_token_id": 7})
    assert read_eagle_config(folder, "eagle3").mask_token_id == 7
    with pytest.raises(CheckpointError, match="kind 'peagle', not 'eagle': choose speculative method eagle3"):
        read_eagle_config(folder, "eagle")


def test_heads_with_norms_of_their_own_are_refused(tmp_path: Path) -> None:
    values = {"speculators_model_type": "eagle", "transformer_layer_config": LAYER, "layernorms": True}
    with pytest.raises(CheckpointError, match="layernorms"):
        read_eagle_config(write(tmp_path / "normed", values), "eagle")


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_layers_for_further_tokens_are_refused_with_the_reason(architecture: str) -> None:
    model_type = {**ARCHITECTURES, **OWN_CODE}[architecture].model_type
    if architecture not in CASES:
        architecture = architecture.replace("ForCausalLM", "ForConditionalGeneration")
        model_type = model_type.removesuffix("_text")
    case = {**CASES, **MEDIA_CASES}[architecture]
    target = ModelConfig.from_dict({**case.fields, "architectures": [architecture], "model_type": model_type})
    with pytest.raises(ConfigError, match=f"that {architecture} has for further tokens .*use another"):
        mtp_config(target)
