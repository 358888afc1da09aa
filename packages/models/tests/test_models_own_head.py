"""T5 with an LM head of its own in the files, though config.json says that it is the embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.ledger import weight_ledger
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_of_its_own_is_planned_as_it_is_loaded(architecture: str, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, ENCODER_CASES[architecture])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert ModelConfig.from_path(tmp_path).tie_word_embeddings
    for has_own in (False, True):
        head = torch.randn_like(tensors["shared.weight"])
        save_file({**tensors, "lm_head.weight": head} if has_own else tensors, file, {"format": "pt"})
        config = ModelConfig.from_path(tmp_path)
        network = load_model(config, tmp_path, dtype=dtype)
        weight = network.lm_head._weights["weight"]
        shared = weight.data_ptr() == network.tokens.part(None).data_ptr()
        assert shared == (not has_own)
        assert weight_ledger(config, dtype)["LM head"] == (0 if shared else weight.numel() * weight.element_size())
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: .*; download the file again"):
        ModelConfig.from_path(tmp_path)
