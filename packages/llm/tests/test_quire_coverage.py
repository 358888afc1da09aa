"""docs/models.md leaves out no causal class of Transformers, and says of vLLM's architectures which run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_models.registry import architecture_entry
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.coverage import REFUSED, VLLM_MISSING, VLLM_TEXT, coverage_text, kind_of

TABLE = Path(__file__).parents[3] / "docs" / "models.md"
REFUSED_WHEN_LOADED = {
    "BigBirdForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM", "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM", "Gemma4UnifiedForConditionalGeneration", "GitForCausalLM",
    "MegatronBertForCausalLM", "OpenAIGPTLMHeadModel", "RemBertForCausalLM", "RoFormerForCausalLM",
    "TrOCRForCausalLM", "ZayaForCausalLM",
}  # fmt: skip
"""Their config.json tells nothing of it; the class does (test_models_transformers_backend.py)."""


def classes() -> dict[str, str]:
    """Causal class of Transformers -> its model_type."""
    found: dict[str, str] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            found.setdefault(name, model_type)
    return found


def test_every_causal_class_is_native_verified_or_refused() -> None:
    names = classes().keys()
    runs = {name for name in names if architecture_entry(name).is_native or name in CASES}
    assert names - runs == REFUSED.keys()


def test_what_is_refused_is_refused_by_its_config() -> None:
    types = classes()
    for name in REFUSED.keys() - REFUSED_WHEN_LOADED - {"Gemma4AssistantForCausalLM"}:  # its default is no valid one
        fields = CONFIG_MAPPING[types[name]]().to_dict()
        with pytest.raises(CheckpointError):
            ModelConfig.from_dict({**fields, "architectures": [name], "model_type": types[name]})


def test_the_page_says_so_and_gives_reasons() -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert text.endswith(coverage_text()), "quire verify --table docs/models.md writes it"
    missing = {name for name in VLLM_TEXT if not kind_of(name)}
    assert VLLM_MISSING.keys() <= missing <= VLLM_MISSING.keys() | REFUSED.keys()
    assert len(set(VLLM_TEXT)) == len(VLLM_TEXT) == 124
    assert re.search(rf"Of the 124 that vLLM 0\.33 lists, {124 - len(missing)} run", text)
