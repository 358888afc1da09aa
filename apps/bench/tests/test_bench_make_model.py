"""`quire make-model`: what it writes is served by `LLM`, and it never overwrites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire_interfaces import ConfigError
from quire_testkit.checkpoints import DTYPES, FAMILIES, SIZES


@pytest.mark.parametrize(
    ("like", "dtype", "shard"),
    [
        ("llama", "bfloat16", 1 << 31),
        ("mistral", "float16", 50_000),
        ("qwen2", "float32", 100_000),
        ("qwen3", "float32", 1),
        ("mixtral", "float32", 1),
        ("qwen3-moe", "bfloat16", 1 << 31),
        ("gpt-oss", "bfloat16", 1 << 31),
    ],
)
def test_a_made_model_is_served(
    tmp_path: Path, quire: Callable[..., int], like: str, dtype: str, shard: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert quire("make-model", folder, "--like", like, "--dtype", dtype, "--max-shard-size", shard, "--seed", 5) == 0
    assert capsys.readouterr().out == f"wrote {like} tiny ({dtype}) to {folder}\n"
    assert (folder / "model.safetensors").exists() == (shard == 1 << 31)
    with LLM(folder, dtype="float32", max_model_len=128) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (completed,) = llm.generate("the quire gathers", params, use_tqdm=False)
        (answered,) = llm.chat([{"role": "user", "content": "how many blocks?"}], params, use_tqdm=False)
        assert llm.renderer.vocab_size == 1024
    for result in (completed, answered):
        assert len(result.outputs[0].token_ids) == 6
        assert result.outputs[0].text


def test_the_seed_decides(tmp_path: Path, quire: Callable[..., int]) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert quire("make-model", tmp_path / name, "--seed", seed) == 0
    first, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == again != other


def test_an_occupied_folder_is_refused(tmp_path: Path, quire: Callable[..., int]) -> None:
    assert quire("make-model", tmp_path / "made") == 0
    before = (tmp_path / "made" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="made is not empty"):
        quire("make-model", tmp_path / "made", "--seed", 1)
    assert (tmp_path / "made" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--like", "bert", f"like must be one of {', '.join(FAMILIES)}, got 'bert'"),
        ("--size", "9b", "size must be one of tiny, 60m, 0.6b, 1b, 8b, got '9b'"),
        ("--dtype", "fp4", "dtype must be one of float32, float16, bfloat16, got 'fp4'"),
        ("--seed", -3, "seed must be at least 0, got -3"),
        ("--max-shard-size", 0, "max_shard_bytes must be at least 1, got 0"),
    ],
)
def test_bad_names(tmp_path: Path, quire: Callable[..., int], flag: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quire("make-model", tmp_path / "made", flag, value)
    assert not (tmp_path / "made").exists()


def test_the_help_lists_every_name(quire: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quire("make-model", "--help")
    text = "".join(capsys.readouterr().out.split())  # lines break at hyphens
    assert all(name in text for name in (*FAMILIES, *SIZES, *DTYPES))
