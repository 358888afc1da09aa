"""Adapters that change while the engine runs: another path, another id, other contents of the same files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, CheckpointError, LoRARequest, SamplingParams
from quire_demo_model import adapter_paths

PROMPT = "What is the capital of France? " * 8
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FACTORS = (1.0, -6.0, 4.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same adapter at three strengths."""
    return [write(tmp_path_factory.mktemp("adapter") / "step", factor) for factor in FACTORS]


def write(folder: Path, factor: float, dtype: torch.dtype = torch.bfloat16) -> Path:
    if not folder.is_dir():
        shutil.copytree(adapter_paths()["demo-json"], folder, copy_function=shutil.copyfile)
    tensors = load_file(Path(adapter_paths()["demo-json"]) / "adapter_model.safetensors")
    changed = {name: (each * factor if "lora_B" in name else each).to(dtype) for name, each in tensors.items()}
    save_file(changed, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(enable_lora=True, max_model_len=2048, num_threads=1, max_loras=4) as made:
        yield made


Ask = Callable[..., list[int]]


@pytest.fixture
def ask(llm: LLM) -> Ask:
    def answer(folder: Path, number: int = 1, *, name: str = "policy", load_inplace: bool = False) -> list[int]:
        request = LoRARequest(name, number, str(folder), load_inplace=load_inplace)
        return llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=request)[0].outputs[0].token_ids

    return answer


@pytest.fixture
def expected(ask: Ask, folders: list[Path]) -> list[list[int]]:
    found = [ask(folder, name=f"fresh{number}") for number, folder in enumerate(folders)]
    assert len(set(map(tuple, found))) == 3
    return found


def test_another_path_under_the_same_name(ask: Ask, folders: list[Path], expected: list[list[int]], llm: LLM) -> None:
    for number, same_number in ((1, 1), (2, 1), (3, 3)):
        for place in (0, 1, 2, 0):
            assert ask(folders[place], number * place + same_number) == expected[place]
    assert [info.path for info in llm.list_adapters() if info.name == "policy"] == [str(folders[0])]


def test_both_in_one_batch(folders: list[Path], expected: list[list[int]], llm: LLM) -> None:
    order = [0, 1, 0, 2, 1]
    requests = [LoRARequest("policy", 1, str(folders[place])) for place in order]
    outputs = llm.generate([PROMPT] * len(order), GREEDY, use_tqdm=False, lora_request=requests)
    assert [output.outputs[0].token_ids for output in outputs] == [expected[place] for place in order]


def test_other_contents_of_the_same_files(ask: Ask, expected: list[list[int]], tmp_path: Path) -> None:
    folder = write(tmp_path / "policy", FACTORS[0])
    assert ask(folder) == expected[0]
    write(folder, FACTORS[1])
    assert ask(folder) == expected[0], "nothing says that they changed"
    assert ask(folder, load_inplace=True) == expected[1]
    assert ask(folder) == expected[1]
    write(folder, FACTORS[2])
    assert ask(folder, 2) == expected[2], "another id"
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ask(folder, load_inplace=True)
    assert ask(folder, 2) == expected[2], "the last one that could be read"


def test_requests_keep_what_they_began_with(llm: LLM, ask: Ask, folders: list[Path], expected: list[list[int]]) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    first, second = (LoRARequest("policy", 1, str(folders[place])) for place in (0, 1))
    [alone] = llm.generate(PROMPT, long, use_tqdm=False, lora_request=first)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, PROMPT, long, False, first)
        while llm.stats().num_running == 0:
            time.sleep(0.001)
        [other] = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=second)
        assert not running.done()
        assert other.outputs[0].token_ids == expected[1]
        assert running.result()[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert ask(folders[0]) == expected[0]


def test_prefixes_are_kept_apart_by_contents(llm: LLM, folders: list[Path]) -> None:
    def cached(folder: Path, name: str = "policy") -> int:
        request = LoRARequest(name, 1, str(folder))
        return llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=request)[0].num_cached_tokens

    assert cached(folders[0]) == 0
    in_cache = cached(folders[0])
    assert in_cache > 16
    assert cached(folders[1]) == 0
    assert cached(folders[0], "same contents by another name") == in_cache


def test_weights_in_memory_do_not_change_with_their_file(ask: Ask, tmp_path: Path, llm: LLM) -> None:
    """A training loop saves over the file that is mapped into memory."""
    folder = write(tmp_path / "policy", FACTORS[0], torch.float32)
    expected = ask(folder)
    path = folder / "adapter_model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\x7f" * (size - 4096))
    llm.reset_prefix_cache()
    for number in range(4):  # the other slots of the device
        ask(write(tmp_path / f"other{number}", 1.0 + number), name=f"other{number}")
    assert ask(folder) == expected
    path.write_bytes(b"")
    for number in range(4):
        ask(tmp_path / f"other{number}", name=f"other{number}")
    llm.reset_prefix_cache()
    assert ask(folder) == expected
