"""Classes that their makers call otherwise than Transformers does: the same network under both names, whatever code the
checkpoint brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.registry import ARCHITECTURES, RENAMED
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import greedy_continuation, write_checkpoint
from quire_testkit.parity.situations import SITUATIONS, serve

PROMPT, NUM_TOKENS = list(range(3, 43)), 4


@pytest.mark.parametrize("name", RENAMED)
def test_tokens_are_those_of_transformers_class(name: str, tmp_path: Path) -> None:
    theirs = RENAMED[name]
    oracle = write_checkpoint(tmp_path, theirs, CASES[theirs])
    expected_network = ModelConfig.from_path(tmp_path).network
    file = tmp_path / "config.json"
    renamed = {"architectures": [name], "auto_map": {"AutoModelForCausalLM": f"modeling.{name}"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | renamed))
    config = ModelConfig.from_path(tmp_path)
    assert config.network == expected_network
    assert config.is_native == (theirs in ARCHITECTURES)
    if config.is_native:  # verified under the other name
        return
    expected = greedy_continuation(oracle, PROMPT, NUM_TOKENS)
    network = load_model(config, tmp_path, dtype="float32")
    seen = serve(network, SITUATIONS["whole prefill"], PROMPT, NUM_TOKENS)["greedy"]
    assert seen.token_ids == expected.token_ids
    error = (seen.logits[len(PROMPT) - 1] - expected.logits[0]).abs().max() / expected.logits[0].abs().max()
    assert float(torch.as_tensor(error)) < 1e-4


def test_code_of_a_checkpoint_is_refused_under_other_names() -> None:
    fields = {**CASES["CwmForCausalLM"].fields, "model_type": "own", "auto_map": {"a": "b"}}
    fields["architectures"] = ["OwnForCausalLM"]  # which Transformers does not have
    with pytest.raises(CheckpointError, match="auto_map"):
        ModelConfig.from_dict(fields)
