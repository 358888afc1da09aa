"""Random checkpoints: the files, their bytes, and what is refused. Transformers' view of them has its own file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from quire_interfaces import ConfigError
from quire_testkit.checkpoints import FAMILIES, SIZES, checkpoint_config, make_checkpoint, parameter_shapes


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    first, again, other = (
        contents(make_checkpoint(tmp_path / name, like="qwen2", seed=seed))
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] != other["tokenizer.json"]


def test_shards_hold_the_same_weights(tmp_path: Path) -> None:
    bound = 100_000
    whole = load_file(make_checkpoint(tmp_path / "whole", dtype="float32") / "model.safetensors")
    folder = make_checkpoint(tmp_path / "shards", dtype="float32", max_shard_bytes=bound)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("model-*.safetensors"))
    assert not (folder / "model.safetensors").exists()
    assert [path.name for path in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    parts = {}
    for path in files:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= bound
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(tensors)
        parts |= tensors
    assert len(files) > 3
    assert parts.keys() == whole.keys() == index["weight_map"].keys()
    assert all(np.array_equal(parts[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


def test_one_byte_shards_hold_one_weight_each(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", max_shard_bytes=1)
    num_weights = len(list(parameter_shapes(json.loads((folder / "config.json").read_text()))))
    assert len(list(folder.glob("model-*.safetensors"))) == num_weights


def test_dtypes_round_the_same_values(tmp_path: Path) -> None:
    exact = load_file(make_checkpoint(tmp_path / "float32", dtype="float32") / "model.safetensors")
    half = load_file(make_checkpoint(tmp_path / "float16", dtype="float16") / "model.safetensors")
    for name, weight in exact.items():
        assert half[name].dtype == np.float16
        assert np.array_equal(half[name], weight.astype(np.float16))
    weight = exact["model.embed_tokens.weight"]
    assert abs(weight.mean()) < 0.001
    assert weight.std() == pytest.approx(0.02, rel=0.02)
    norm = exact["model.norm.weight"]
    assert norm.mean() == pytest.approx(1, abs=0.02)
    assert norm.std() > 0, "a norm weight of ones would hide that it is not applied"


def test_progress_counts_the_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = make_checkpoint(tmp_path / "model", dtype="float16", progress=lambda *step: seen.append(step))
    total = sum(2 * math.prod(shape) for _, shape in parameter_shapes(checkpoint_config("llama", "tiny")))
    assert [step[0] for step in seen] == sorted({step[0] for step in seen})
    assert seen[-1] == (total, total)
    assert 0 < (folder / "model.safetensors").stat().st_size - total < 10_000


def test_large_weights_are_written_in_chunks(tmp_path: Path) -> None:
    # 2050 x 2049 values: one more than a chunk, and not a multiple of anything.
    folder = make_checkpoint(
        tmp_path / "model", vocab_size=2050, hidden_size=2049, num_hidden_layers=1, dtype="float16"
    )
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert weight.shape == (2050, 2049)
    assert weight.astype(np.float32).std(axis=1).min() > 0.01


@pytest.mark.parametrize(("size", "millions"), [("tiny", 0.16), ("60m", 42), ("0.6b", 596), ("1b", 1236), ("8b", 8030)])
def test_sizes_have_about_the_parameters_they_say(size: str, millions: float) -> None:
    like = "qwen3" if size == "0.6b" else "llama"
    count = sum(math.prod(shape) for _, shape in parameter_shapes(checkpoint_config(like, size)))
    assert count / 1e6 == pytest.approx(millions, rel=0.05)


def test_overrides_reach_the_weights() -> None:
    shapes = dict(parameter_shapes(checkpoint_config("llama", "tiny", attention_bias=True, tie_word_embeddings=False)))
    assert shapes["lm_head.weight"] == (1024, 64)
    assert shapes["model.layers.1.self_attn.o_proj.bias"] == (64,)
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (32,)
    assert checkpoint_config("llama", "tiny", vocab_size=500)["eos_token_id"] == 499


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"like": "gpt7"}, "like", f"like must be one of {', '.join(FAMILIES)}, got 'gpt7'"),
        ({"size": "huge"}, "size", "size must be one of tiny, 60m, 0.6b, 1b, 8b, got 'huge'"),
        ({"dtype": "int3"}, "dtype", "dtype must be one of float32, float16, bfloat16, got 'int3'"),
        ({"seed": -1}, "seed", "seed must be at least 0, got -1"),
        ({"max_shard_bytes": 0}, "max_shard_bytes", "max_shard_bytes must be at least 1, got 0"),
        ({"vocab_size": 100}, "vocab_size", "vocab_size must be from 259"),
        (
            {"num_hidden_layers": 0},
            "num_hidden_layers",
            "num_hidden_layers must be a whole number of at least 1, got 0",
        ),
        ({"hidden_size": 2.5}, "hidden_size", "got 2.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", r"\(4\) must be a multiple of num_key_value_heads \(3\)"),
    ],
)
def test_bad_settings_write_nothing(tmp_path: Path, settings: dict[str, object], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_checkpoint(tmp_path / "model", **settings)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not (tmp_path / "model" / "config.json").exists()


def test_what_is_there_is_never_touched(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"is not empty, it holds .* choose another folder") as caught:
        make_checkpoint(folder, seed=1)
    assert caught.value.field == "folder"
    assert contents(folder) == before
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"cannot write to .*; choose another folder"):
            make_checkpoint(place)
    assert file.read_text() == "mine"


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    assert make_checkpoint(str(tmp_path)) == tmp_path
    assert (tmp_path / "config.json").is_file()


def test_the_tables_agree() -> None:
    for like in FAMILIES:
        for size in SIZES:
            config = checkpoint_config(like, size)
            assert config["model_type"] == like.replace("-", "_")
            assert config["vocab_size"] == SIZES[size]["vocab_size"]
