"""`bench kernels`: the language of batches, plans and what is refused of them, counts, and figures on the processor."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from quire_bench import kernels
from quire_bench.batch_spec import parse_batch
from quire_bench.kernel_cases import CASES, make_work
from quire_bench.kernel_plot import FULL, LABELS
from quire_bench.kernels import load_plan, make_plan
from quire_interfaces import ConfigError
from quire_ops import ops
from quire_ops.ops import op_named


@pytest.mark.parametrize(
    ("text", "lens"),
    [
        ("q2k*4", [(2048, 2048)] * 4),
        ("q2k*2,3xq1k4k", [(2048, 2048)] * 2 + [(1, 4096)] * 3),
        ("q1k4, 2xq3k3*2", [(1, 4)] + [(3, 3)] * 4),
        ("q1kk4k", [(1024, 4096)]),
        ("q7", [(7, 7)]),
    ],
)
def test_batches(text: str, lens: list[tuple[int, int]]) -> None:
    assert parse_batch(text) == lens


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no sequence"),
        ("q1,", "'' is no sequence"),
        ("k4", "write qNUM or qNUMkNUM"),
        ("q-1", "is no sequence"),
        ("q0", "has no token"),
        ("0xq1", "has no token"),
        ("q8k4", "4 tokens in all, fewer than the 8"),
        ("99999xq1", "more than 4096 sequences"),
        ("q999999999", "has 999999999 tokens, at most"),
        ("q1" + "*9" * 40, "is no sequence"),
    ],
)
def test_bad_batches(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_batch(text)


def test_attention_counts_what_tokens_see() -> None:
    shape = {"batch": "q3,q2k5", "heads": 4, "kv_heads": 2, "head_dim": 8, "block_size": 4}
    work = make_work("paged_attention", shape, torch.bfloat16, torch.device("cpu"))
    pairs = (1 + 2 + 3) + (4 + 5)
    assert work.flop == 4 * pairs * 4 * 8
    assert work.num_bytes == 2 * (2 * 8 * 2 * 8 + 2 * 5 * 4 * 8)
    assert work.sizes["queries_per_kv_head"] == 2


SMALL = {"rows": 2, "size": 32, "outputs": 48, "inputs": 256, "vocab_size": 50, "heads": 4, "kv_heads": 2,
         "head_dim": 8, "block_size": 4, "batch": "q5,q1k9", "experts": 3, "top_k": 2, "inner": 16}  # fmt: skip


@pytest.mark.parametrize("op", CASES)
def test_a_case_gives_an_op_what_it_takes(op: str) -> None:
    """The reference runs on it, and without memory no less is counted."""
    shape = {name: value for name, value in SMALL.items() if name in CASES[op].defaults}
    work = make_work(op, shape, torch.float32, torch.device("cpu"))
    work.prepare(op_named(op).reference)()
    counted = make_work(op, shape, torch.float32, torch.device("meta"))
    assert counted.flop == work.flop
    assert counted.num_bytes >= work.num_bytes > 0


def test_blocks_have_a_known_form_and_whole_rows() -> None:
    for shape, message in (({"form": "Q9"}, "one of Q4_1, .*, got 'Q9'"), ({"inputs": 300}, "blocks of 256, got 300")):
        with pytest.raises(ConfigError, match=message):
            make_work("block_linear", shape, torch.float32, torch.device("meta"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runs: [", "is not YAML"),
        ("- op: linear", "must be a mapping with dtype, runs"),
        ("runs: []", "must be a list"),
        ("runs: [{op: linear}]\nspeed: 1", "no field 'speed'"),
        ("runs: [{op: lineal}]", "no benchmark of op 'lineal'"),
        ("runs: [{op: [linear]}]", "no benchmark of op ['linear']"),
        ("runs: [{op: linear, shape: {}}]", "no field 'shape'"),
        ("runs: [{op: linear, shapes: [1]}]", "must be a mapping of dimensions"),
        ("runs: [{op: linear, backends: torch}]", "must be a list of names"),
        ("runs: [{op: linear}]\ndtype: int3", "dtype must be one of bfloat16"),
        ("runs: [{op: !!python/object/apply:os.getcwd []}]", "is not YAML"),
        (f"runs: [{{op: linear, shapes: {{rows: {[1] * 40}, inputs: {[1] * 40}}}}}]", "more than 1000 shapes"),
        ("#" * (1 << 20) + "#", "a plan at most"),
    ],
)
def test_bad_plans(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_plan(path, "cpu")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"op": "linear", "shapes": {"row": [1]}}, "no dimension 'row'"),
        ({"op": "linear", "shapes": {"rows": [0]}}, "must be from 1"),
        ({"op": "linear", "shapes": {"rows": ["many"]}}, "must be a whole number, got 'many'"),
        ({"op": "linear", "shapes": {"rows": [True]}}, "must be a whole number, got True"),
        ({"op": "linear", "shapes": {"outputs": [1 << 20], "inputs": [1 << 20]}}, "bytes, at most"),
        ({"op": "embedding", "shapes": {"vocab_size": [1 << 20], "size": [1 << 20]}}, "bytes, at most"),
        ({"op": "fused_moe", "shapes": {"experts": [1]}}, "top_k (2) must be at most experts"),
        ({"op": "paged_attention", "shapes": {"heads": [9]}}, "heads (9) must be a multiple"),
        ({"op": "linear", "backends": ["fastest"]}, "no backend 'fastest'; choose of"),
    ],
)
def test_shapes_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, entry: dict[str, object], message: str
) -> None:
    monkeypatch.setattr(kernels, "measure_limits", lambda *_: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        kernels.measure_plan(make_plan([entry], "float32", "cpu"))


def test_the_command_measures_a_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quire: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "SAMPLE_S", 1e-4)
    monkeypatch.setitem(kernels.COPIES_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(kernels.LIMIT_SIDE, "cpu", 128)
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "dtype: float32\n"
        "runs:\n"
        "  - {op: linear, shapes: {rows: [1, 4], outputs: 64, inputs: [128]}, backends: [torch, reference]}\n"
        "  - {op: paged_attention, shapes: {batch: ['2xq1k20'], heads: [4], kv_heads: [2], head_dim: [16]}}\n"
    )
    table, picture = tmp_path / "figures.csv", tmp_path / "figures.svg"
    assert quire("bench", "kernels", plan, "--repeats", "2", "--csv", table, "--svg", picture, "--json", "-") == 0
    out = json.loads(capsys.readouterr().out)
    linear = [one for one in out["figures"] if one["op"] == "linear"]
    assert [(one["shape"], one["backend"]) for one in linear] == [
        (f"rows={rows} outputs=64 inputs=128", backend) for rows in (1, 4) for backend in ("torch", "reference")
    ]
    rates = out["machine"]
    for one in linear:
        rows = int(one["shape"][5])
        num_bytes, flop = 4 * (64 * 128 + rows * (64 + 128)), 2 * rows * 64 * 128
        limit = max(num_bytes / rates["read_bytes_per_s"], flop / rates["matmul_flop_per_s"])
        assert one["limit_s"] == pytest.approx(limit)
        assert one["of_limit"] == pytest.approx(limit / one["median_s"])
        assert one["best_s"] <= one["median_s"]
    measured = {one["backend"] for one in out["figures"] if one["op"] == "paged_attention"}
    left_out = {left["backend"]: left for left in out["left_out"]}
    every = {backend.name for backend in kernels.op_table().backends(ops.paged_attention)}
    assert measured | set(left_out) == every - {"reference"}
    assert "torch" in measured
    for left in left_out.values():
        assert left["ops"] == ["paged_attention"]
        assert left["reason"]
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(out["figures"])
    drawn = ElementTree.parse(picture).getroot()
    bars = [float(bar.get("width")) for bar in drawn.iter() if bar.get("class") == "bar"]
    shares = [figure["of_limit"] for figure in out["figures"]]
    limit = next(float(line.get("x1")) for line in drawn.iter() if line.get("class") == "limit") - LABELS
    assert bars == pytest.approx([limit * share for share in shares], abs=0.02)
    assert all(0 <= bar <= FULL + 0.01 for bar in bars)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ops", "linear", "--device", "tpu"), "device must be cpu or cuda"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("none.yaml",), "cannot read none.yaml"),
        (("none.yaml", "--ops", "linear"), "--ops goes without a plan"),
        (("--ops", "paged_attention", "--batch", "x"), "'x' is no sequence"),
    ],
)
def test_bad_command_lines(quire: Callable[..., int], arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        quire("bench", "kernels", *arguments)
