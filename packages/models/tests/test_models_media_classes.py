"""Every class of Transformers that takes media is verified, or refused with the reason: none is silently wrong."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_models.media_spec import UNSERVED, media_refusal
from quire_testkit.parity.cases import CASES

UNVERIFIED = {
    "Cosmos3OmniForConditionalGeneration",  # Transformers has no processor for it
    "Nemotron3_5TranscribeForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",  # its thinker is verified
}
"""Classes that nobody has compared yet, beside those with a case: only ones that hear, and ones without a processor."""


def reason_of(architecture: str) -> str:
    """Why a class is refused, of the configuration that it starts with; empty where nothing refuses it."""
    config = getattr(transformers, architecture).config_class().to_dict()
    values = json.loads(json.dumps(config, default=str)) | {"architectures": [architecture]}
    try:
        return ModelConfig.from_dict(values).media_refusal
    except CheckpointError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
def test_every_class_is_verified_or_refused_with_the_reason() -> None:
    classes = set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values())
    assert len(classes) > 100
    unknown = {name for name in classes - CASES.keys() if not reason_of(name)}
    assert unknown <= UNVERIFIED, "add a parity case, or a reason to UNSERVED (docs/adding-a-model.md)"


def test_towers_of_timm_are_served_where_it_is_installed() -> None:
    reason = "" if find_spec("timm") else "its vision tower is one of the package timm, which is not installed"
    assert media_refusal({"model_type": "gemma3n", "vision_config": {"model_type": "gemma3n_vision"}}) == reason
    for tower in ({}, {"vision_config": {"model_type": "timm_wrapper"}}):
        assert media_refusal({"model_type": "perception_lm", **tower}) == reason
    assert media_refusal({"model_type": "perception_lm", "vision_config": {"model_type": "siglip_vision_model"}}) == ""


def test_reasons_are_of_model_types_that_there_are() -> None:
    known = {model_type.replace("-", "_") for model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    assert UNSERVED.keys() - known == set()


def test_the_page_names_what_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs" / "media.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `") and " | " in line][-len(UNSERVED) :] == [
        f"| `{model_type}` | {reason} |" for model_type, reason in sorted(UNSERVED.items())
    ]
