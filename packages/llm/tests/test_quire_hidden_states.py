"""Hidden states of each request in a file of its own: those of Transformers' class, however steps were cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from quire import LLM, ConfigError, RequestOutput, SamplingParams
from quire_demo_model import checkpoint_path
from quire_runner.hidden_states import file_name
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

LAYERS = (1, 3, 5)
SETTINGS: dict[str, Any] = {
    "num_threads": 1, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 200,
    "enable_prefix_caching": False, "extract_hidden_states_layers": LAYERS,
}  # fmt: skip
PROMPTS = [[(7 * i + 3 * j) % 1200 + 5 for j in range(11 + 13 * i)] for i in range(4)]


def extracted(folder: Path, outputs: list[RequestOutput]) -> list[dict[str, torch.Tensor]]:
    return [load_file(next(folder.glob(f"{output.request_id}.*.0.safetensors"))) for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "async_scheduling": True},
        {"num_gpu_blocks_override": 8, "block_size": 16, "max_model_len": 96},
    ],
    ids=["together", "chunks and steps ahead", "preemption"],
)
def test_states_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    llm = LLM(**SETTINGS | settings, extract_hidden_states=str(tmp_path / "states"))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    if "num_gpu_blocks_override" in settings:
        assert llm.stats().num_preemptions_total > 0
    llm.close()  # the last requests leave their rows with it
    files = extracted(tmp_path / "states", outputs)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    ends: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_pre_hook(lambda module, args: ends.update(last=args[0]))
    for output, tensors in zip(outputs, files, strict=True):
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        assert tensors["token_ids"].tolist() == token_ids
        with torch.inference_mode():
            states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        expected = torch.stack([states[1][0], states[3][0], ends["last"][0]], dim=1)
        assert tensors["hidden_states"].shape == expected.shape
        assert (tensors["hidden_states"] - expected).abs().max() < 1e-3 * expected.abs().max()


def test_states_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two of four files fit; the first three numbers of layers are written beside the states."""
    row_bytes = len(LAYERS) * 256 * 4
    bound = (len(PROMPTS[0]) + len(PROMPTS[1])) * row_bytes / 2**30
    llm = LLM(**SETTINGS, extract_hidden_states=str(tmp_path), extract_hidden_states_gib=bound)
    params = SamplingParams(temperature=0, max_tokens=1)
    for prompt in PROMPTS:
        llm.generate(prompt, params, use_tqdm=False)
    llm.close()
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    assert caplog.text.count("has all the hidden states") == 1
    with safe_open(files[0], framework="pt") as reader:
        assert reader.metadata()["layers"] == "1,3,5"
        assert files[0].name.startswith(f"{reader.metadata()['request_id']}.")
    assert not list(tmp_path.glob("*.part"))


def test_another_run_replaces_no_file(tmp_path: Path) -> None:
    for prompt in PROMPTS[:2]:
        llm = LLM(**SETTINGS, extract_hidden_states=str(tmp_path))
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        llm.close()
    files = [load_file(path)["token_ids"].tolist() for path in tmp_path.glob("*.safetensors")]
    assert sorted(files, key=len) == PROMPTS[:2]


def test_a_request_that_is_computed_anew_counts_once(tmp_path: Path) -> None:
    settings = SETTINGS | {"num_gpu_blocks_override": 8, "block_size": 16, "max_model_len": 96}
    size = sum(len(prompt) + 11 for prompt in PROMPTS) * len(LAYERS) * 256 * 4
    llm = LLM(**settings, extract_hidden_states=str(tmp_path), extract_hidden_states_gib=size / 2**30)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert llm.stats().num_preemptions_total > 0
    llm.close()
    assert len(list(tmp_path.glob("*.safetensors"))) == len(PROMPTS)


def test_names_of_files_stay_in_the_folder() -> None:
    assert file_name("request-7/7.0") == "request-7.7.0.safetensors"
    assert file_name("../../etc/passwd/3.0") == "..%2F..%2Fetc%2Fpasswd.3.0.safetensors"
    name = file_name("a/b\0c" * 99 + "/3.0")
    assert os.path.basename(name) == name
    assert name.endswith(".3.0.safetensors")
    assert len(name) < 255


def test_encoders_are_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    shutil.copy(checkpoint_path() / "tokenizer.json", tmp_path)
    settings = {"enable_prefix_caching": False, "extract_hidden_states_layers": (1,)}
    with pytest.raises(ConfigError, match="BertModel does not show the hidden states"):
        LLM(str(tmp_path), **settings, extract_hidden_states=str(tmp_path / "states"))


def test_networks_with_several_streams_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Qwen4ExpForCausalLM", CASES["Qwen4ExpForCausalLM"])
    settings = {"enable_prefix_caching": False, "extract_hidden_states_layers": (1,)}
    with pytest.raises(ConfigError, match="Qwen4ExpForCausalLM does not show the hidden states"):
        LLM(str(tmp_path), tokenizer=str(checkpoint_path()), **settings, extract_hidden_states=str(tmp_path / "states"))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching"),
        ({"speculative_method": "ngram"}, "speculative_method"),
        ({"extract_hidden_states_layers": ()}, "extract_hidden_states_layers"),
        ({"extract_hidden_states_layers": (1, 6)}, "extract_hidden_states_layers"),
        ({"extract_hidden_states_layers": (1, 1)}, "extract_hidden_states_layers"),
        ({"kv_offloading_size": 1}, "kv_offloading_size"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**SETTINGS | settings, extract_hidden_states=str(tmp_path))
    assert refused.value.field == field
