"""A plan of a checkpoint of 100 GB reads headers at most: its files are sparse here, with the right headers and nothing
behind them."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config import QuireConfig
from quire.plan import make_plan
from quire_models.config import ModelConfig

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what was read is counted by Linux")

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 56,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_sparse(folder: Path, config: dict[str, Any], num_files: int = 4) -> int:
    """A checkpoint in files with holes in the place of weights; returns the bytes of all tensors."""
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {weight.name: weight.shape for weight in ModelConfig.from_dict(config).network.weights()}
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[table] = (config["vocab_size"], config["hidden_size"])
    weight_map: dict[str, str] = {}
    total = 0
    for i in range(num_files):
        name, at = f"model-{i + 1:05}-of-{num_files:05}.safetensors", 0
        header: dict[str, Any] = {}
        for weight, shape in list(shapes.items())[i::num_files]:
            size = 2 * math.prod(shape)
            header[weight] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            weight_map[weight] = name
            at += size
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def num_bytes_read() -> int:
    """By this process, through calls, from a disk or from memory."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:"))
    return int(line.split()[1])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "VaultGemmaForCausalLM"])
def test_only_headers_are_read(architecture: str, tmp_path: Path) -> None:
    """Of a network of our own, and of one that runs through Transformers, whose weights are counted in the headers."""
    total = write_sparse(tmp_path, LLAMA)
    assert total > 100e9
    assert sum(os.stat(file).st_blocks * 512 for file in tmp_path.iterdir()) < 1 << 20  # nothing is there
    if architecture != "LlamaForCausalLM":
        changed = {"architectures": [architecture], "model_type": "vaultgemma", "head_dim": 128}
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    config = QuireConfig.of(model=str(tmp_path), max_model_len=4096)
    make_plan(config, ModelConfig.from_dict(LLAMA), free_bytes=1 << 40)  # modules are read, too
    before, memory_kb = num_bytes_read(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = make_plan(config, ModelConfig.from_path(tmp_path), free_bytes=1 << 40, folder=tmp_path)
    assert num_bytes_read() - before < 32 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb < 1 << 20
    weights = sum(size for what, size in plan.ledger_bytes.items() if what.startswith("weights"))
    assert weights == pytest.approx(total, rel=0.01)
    assert plan.fits
