"""A GGUF file made of a checkpoint says the same as the checkpoint: read by Quire's own loader, token by token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire_bench.gguf_file import write_gguf
from quire_interfaces import CheckpointError
from quire_testkit.checkpoints import make_checkpoint

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41]]


def answers(model: Path, tokenizer: Path) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    with LLM(model, tokenizer=tokenizer, dtype="float32", max_model_len=64) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("like", ["llama", "qwen2", "qwen3"])
def test_plain_weights_give_the_same_tokens(tmp_path: Path, like: str) -> None:
    folder = make_checkpoint(tmp_path / "model", like=like, dtype="float32")
    write_gguf(folder, tmp_path / "model.gguf", "plain", "float32")
    assert answers(tmp_path / "model.gguf", folder) == answers(folder, folder)


def test_matrices_of_eight_and_four_bits(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", like="qwen3", dtype="float32")
    kinds = {}
    for weights in ("plain", "int8", "int4"):
        path = tmp_path / f"{weights}.gguf"
        write_gguf(folder, path, weights, "float32")
        kinds[weights] = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {each.tensor_type.name for each in kinds["int4"].values()} == {"Q4_0", "Q8_0", "F16", "F32"}, (
        "rows of 176 are no blocks"
    )
    for weights, error in (("int8", 0.01), ("int4", 0.12)):
        for name, plain in kinds["plain"].items():
            stored = kinds[weights][name]
            values = gguf.quants.dequantize(stored.data, stored.tensor_type)
            assert np.abs(values - plain.data).max() <= error * np.abs(plain.data).max()


def test_what_has_no_file_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", like="llama", dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"architectures": ["GPT2LMHeadModel"]}, "no GGUF file is written of GPT2LMHeadModel"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaled rotations"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights"),
    ):
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(folder, other)
        (other / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=words):
            write_gguf(other, tmp_path / "other.gguf", "plain")
