"""Recurrent classes of Transformers in Quire's cache: cut anywhere, beside other sequences, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models_paged_driver import PagedDriver

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

TOKENS = [[5, 9, 100, 31, 7, 7, 7, 150, 120, 3, 44], [8, 3, 77, 12, 9, 21]]


# States beside an attention that several layers share; an attention with states of its own.
@pytest.mark.parametrize("architecture", ["ZambaForCausalLM", "ZayaForCausalLM"])
def test_sequences_keep_their_states_between_steps(architecture: str, tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, architecture, CASES[architecture])
    network = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    driver = PagedDriver(network, block_size=4, shuffle=True)  # type: ignore[arg-type]
    first, second = (driver.add(tokens) for tokens in TOKENS)
    driver.step((first, 3))
    driver.step((first, 5), (second, 2))
    driver.step((second, 1), (first, 1))
    driver.step((first, 2), (second, 3))
    for sequence in (first, second):
        with torch.inference_mode():
            expected = oracle(torch.tensor([sequence.token_ids])).logits[0]
        error = (torch.stack(sequence.logits) - expected).abs().max() / expected.abs().max()
        assert float(error) < 1e-4


def test_states_of_other_shapes_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "ZayaForCausalLM", CASES["ZayaForCausalLM"])
    config = ModelConfig.from_path(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "cca_time0": 3}))
    with pytest.raises(CheckpointError, match=r"keeps states of .* but its config.json says"):
        load_model(config, tmp_path, dtype="float32", load_format="dummy")


def test_kinds_of_layers_that_are_not_known_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "ZayaForCausalLM", CASES["ZayaForCausalLM"])
    values = json.loads((tmp_path / "config.json").read_text())
    values["layer_types"] = ["hybrid", "windy", "hybrid"]
    with pytest.raises(CheckpointError, match="layer_types must name one of"):
        ModelConfig.from_dict(values)
