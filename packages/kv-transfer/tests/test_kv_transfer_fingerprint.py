"""Everything that KV depends on changes the fingerprint; how the files came to be where they are does not."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

from quire_interfaces import FullAttentionSpec, KVCacheGroup, KVCachePlan, SlidingWindowSpec
from quire_kv_transfer import group_block_bytes, layout_facts, model_fingerprint, weights_digest


def plan(spec: FullAttentionSpec, *layers: str, num_blocks: int = 10) -> KVCachePlan:
    group = KVCacheGroup(spec=spec, layer_names=layers)
    return KVCachePlan(groups=(group,), num_blocks=num_blocks, tensor_block_bytes=(spec.block_bytes,) * len(layers))


SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**SHAPE)


def test_every_field_of_the_layout_counts() -> None:
    plans = [
        plan(FULL, "a", "b"),
        plan(FULL, "b", "a"),
        plan(FULL, "a"),
        plan(SlidingWindowSpec(**SHAPE, sliding_window=4), "a", "b"),
        plan(SlidingWindowSpec(**SHAPE, sliding_window=5), "a", "b"),
        *[
            plan(dataclasses.replace(FULL, **{name: 4}), "a", "b")
            for name in ("block_size", "num_kv_heads", "head_dim")
        ],
        *[
            plan(dataclasses.replace(FULL, dtype=name), "a", "b")
            for name in ("float16", "fp8_e4m3", "fp8_e5m2", "int8")
        ],
    ]
    prints = {model_fingerprint({"layout": layout_facts(each)}) for each in plans}
    assert len(prints) == len(plans)
    more_blocks = plan(FULL, "a", "b", num_blocks=99)
    assert layout_facts(more_blocks) == layout_facts(plans[0])
    assert group_block_bytes(more_blocks) == (2 * FULL.block_bytes,)


def test_facts_are_told_apart_and_their_order_is_not() -> None:
    facts = [{"a": "1"}, {"a": 1}, {"a": None}, {"b": "1"}, {"a": ["1"]}, {"a": "1", "b": "1"}, {}]
    assert len({model_fingerprint(each) for each in facts}) == len(facts)
    assert model_fingerprint({"a": 1, "b": 2}) == model_fingerprint({"b": 2, "a": 1})
    assert len(model_fingerprint({})) == 32


def checkpoint(folder: Path, weights: bytes = b"w" * 1000) -> list[Path]:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    return [folder / "config.json", folder / "model.safetensors"]


def test_a_copy_has_the_same_digest_and_other_weights_another(tmp_path: Path) -> None:
    files = checkpoint(tmp_path / "a")
    digest = weights_digest(files, str(tmp_path / "tier"))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copied = [tmp_path / "copy" / file.name for file in files]
    assert weights_digest(copied, str(tmp_path / "tier")) == digest
    other = checkpoint(tmp_path / "b", b"w" * 999 + b"x")
    assert weights_digest(other, str(tmp_path / "tier")) != digest
    shifted = checkpoint(tmp_path / "c", b"{}" + b"w" * 1000)
    (shifted[0]).write_text("")
    assert weights_digest(shifted, str(tmp_path / "tier")) != digest


def test_weights_that_change_in_place_are_noticed(tmp_path: Path) -> None:
    files = checkpoint(tmp_path / "a")
    before = weights_digest(files, str(tmp_path / "tier"))
    files[1].write_bytes(b"v" * 1000)
    assert weights_digest(files, str(tmp_path / "tier")) != before


def test_the_digest_is_remembered(tmp_path: Path) -> None:
    files = checkpoint(tmp_path / "a")
    root = tmp_path / "tier"
    digest = weights_digest(files, str(root))
    (memory,) = (root / "weights").iterdir()
    assert memory.read_text() == digest
    memory.write_text("0" * 64)
    assert weights_digest(files, str(root)) == "0" * 64, "it is not computed again"
    memory.write_text("half a dig")
    assert weights_digest(files, str(root)) == digest, "what cannot be a digest is computed again"


def test_a_folder_that_takes_no_file_still_gives_a_digest(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = checkpoint(tmp_path / "a")
    assert weights_digest(files, str(tmp_path / "file")) == weights_digest(files, os.devnull)
