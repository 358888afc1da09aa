"""Random checkpoints load in Hugging Face Transformers as what they say they are, without a word of complaint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire_testkit.checkpoints import FAMILIES, make_checkpoint, parameter_shapes


def load(folder: Path, **settings: Any) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("like", FAMILIES)
def test_families_load_in_every_dtype_whole_and_sharded(tmp_path: Path, like: str, dtype: str) -> None:
    tied = dtype == "float16"
    settings: dict[str, Any] = {"like": like, "dtype": dtype, "tie_word_embeddings": tied, "seed": 2}
    whole = load(make_checkpoint(tmp_path / "whole", **settings), dtype="auto")
    sharded = load(make_checkpoint(tmp_path / "sharded", max_shard_bytes=60_000, **settings), dtype="auto")
    assert type(whole).__name__ == FAMILIES[like]["architectures"][0]
    assert whole.dtype == getattr(torch, dtype)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, sharded.state_dict()[name]), name
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    stored = {name: torch.Size(shape) for name, shape in parameter_shapes(config)}
    assert {name: weight.shape for name, weight in whole.named_parameters()} == stored
    tokens = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        logits = whole.float()(tokens).logits
    assert logits.shape == (2, 20, 1024)
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_bfloat16_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    exact = load(make_checkpoint(tmp_path / "float32", dtype="float32"), dtype="auto").state_dict()
    rounded = load(make_checkpoint(tmp_path / "bfloat16", dtype="bfloat16"), dtype="auto").state_dict()
    for name, weight in exact.items():
        assert torch.equal(rounded[name], weight.bfloat16()), name


def test_the_tokenizer_loads_with_its_template(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
    text = "the quire, 12 sheets; été 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "how many blocks?"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhow many blocks?<|im_end|>\n<|im_start|>assistant\n"


def test_generation_ends_at_the_end_token(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype="float32")
    model = load(folder)
    assert model.generation_config.eos_token_id == 1023
