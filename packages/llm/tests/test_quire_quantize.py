"""`quantize_checkpoint`: what it writes is what `--quantization` computes with, and what Transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quire import LLM, SamplingParams
from quire.quantize import SCHEMES, quantize_checkpoint
from quire_interfaces import CheckpointError, ConfigError
from quire_testkit.checkpoints import make_checkpoint

IDS = {"prompt_token_ids": [5, 9, 200, 31, 7, 7, 100, 250, 3]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32", hidden_size=128,
        intermediate_size=256, head_dim=32,
    )  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_computes_the_same_tokens(scheme: str, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    report = quantize_checkpoint(folder, out, scheme, file_bytes=200_000)
    assert report.num_quantized == 14
    assert report.bytes_after < report.bytes_before
    assert len(report.files) > 1
    with LLM(out, max_model_len=128, num_threads=1) as llm:
        assert "_linear for 14" in llm.engine_info.choices["weights"]
        found = llm.generate([IDS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    oracle = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = torch.tensor([IDS["prompt_token_ids"]])
    wanted = oracle.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    assert list(found) == wanted.tolist()


def test_bad_requests_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no scheme 'int3'; choose one of int8, fp8, int4-g128"):
        quantize_checkpoint(folder, tmp_path / "a", "int3")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        quantize_checkpoint(folder, folder, "int8")
    quantize_checkpoint(folder, tmp_path / "b", "int8")
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(tmp_path / "b", tmp_path / "c", "int8")


def test_layers_that_do_not_fit_stay_as_they_are(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32}
    folder = make_checkpoint(tmp_path / "odd", like="llama", dtype="bfloat16", **shape)
    report = quantize_checkpoint(folder, tmp_path / "out", "int4-g128")
    assert report.left == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(report.left) <= set(ignored)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as reader:
        assert reader.get_tensor("model.layers.0.mlp.down_proj.weight").dtype == torch.bfloat16
    with LLM(tmp_path / "out", max_model_len=128, num_threads=1) as llm:
        assert len(llm.generate([IDS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
