"""Adapters that stay as narrow as their files have them: one in int8, one in fp8 and none in one batch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, ConfigError, LoRARequest, SamplingParams
from quire_demo_model import adapter_paths

QUESTIONS = ("What is the capital of France?", "Who are you?", "What is a LoRA adapter?")
Answer = tuple[list[int], list[float]]


def write(folder: Path, name: str, dtype: torch.dtype) -> Path:
    """An adapter of the demo model: int8 with a scale for each row, fp8 with one for each matrix."""
    shutil.copytree(adapter_paths()[name], folder, copy_function=shutil.copyfile)
    stored = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        wide = tensor.float()
        scale = wide.abs().amax(1) / 127 if dtype == torch.int8 else wide.abs().max().view(1) / 448
        values = wide / scale.view(-1, 1)
        stored |= {key: (values.round() if dtype == torch.int8 else values).to(dtype), f"{key}_scale": scale}
    save_file(stored, folder / "adapter_model.safetensors")
    return folder


def answers(lora_dtype: str, folders: list[Path]) -> tuple[int, list[Answer]]:
    """Bytes of the slots; tokens and their log probabilities without an adapter and with each."""
    with LLM(
        enable_lora=True, lora_dtype=lora_dtype, max_loras=2, max_model_len=128, num_threads=1, dtype="bfloat16"
    ) as llm:  # fmt: skip
        adapters = [None, *(LoRARequest(each.name, 1, str(each)) for each in folders)]
        outputs = llm.chat(
            [[{"role": "user", "content": question}] for question in QUESTIONS for _ in adapters],
            SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0),
            lora_request=adapters * len(QUESTIONS), use_tqdm=False,
        )  # fmt: skip
        found = []
        for output in (each.outputs[0] for each in outputs):
            values = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
            found.append((list(output.token_ids), values))
        return llm.engine.info.memory_bytes["adapters"], found


def test_adapters_stored_so_give_the_bits_of_widened_ones(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "eight", "demo-json", torch.int8),
        write(tmp_path / "float8", "demo-capitals", torch.float8_e4m3fn),
    ]
    wide_bytes, wide = answers("auto", folders)
    none, eight, float8 = (wide[place::3] for place in range(3))
    assert none != eight != float8
    for lora_dtype, kept, rounded in (("int8", 1, 2), ("fp8_e4m3", 2, 1)):
        narrow_bytes, narrow = answers(lora_dtype, folders)
        assert narrow_bytes < 0.65 * wide_bytes
        assert narrow[0::3] == none
        assert narrow[kept::3] == wide[kept::3]
        assert narrow[rounded::3] != wide[rounded::3]  # it was stored in the other one
        tokens, wide_tokens = ([each[0] for each in found[rounded::3]] for found in (narrow, wide))
        assert sum(one == other for one, other in zip(tokens, wide_tokens, strict=True)) >= 2


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora_dtype must be one of .*got 'bfloat16'"):
        LLM(enable_lora=True, lora_dtype="bfloat16")
