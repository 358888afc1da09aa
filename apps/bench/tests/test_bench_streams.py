"""`quire bench peers --task serve`: real streams of a real server, and what is made of their times."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire_bench.situations import Lengths, Situation
from quire_bench.stream_situations import parse_stream_situations
from quire_bench.workload import ClientRequests
from quire_interfaces import ConfigError


def test_figures_of_streams() -> None:
    first, *others = parse_stream_situations("clients-3", Lengths(input_len=5, output_len=4))
    assert not isinstance(first, Situation)
    asked: list[Sequence[ClientRequests]] = []

    def serve(clients: Sequence[ClientRequests]) -> dict[str, Any]:
        asked.append(clients)
        return {"seconds": 2.0, "ttft_s": [0.1, 0.2, 0.3, 0.4, 0.5, 1.5], "itl_s": [0.01] * 99 + [1.0]}

    figures = first.measure(serve, 7)
    assert figures["clients-3"] == 3 * 2 * 4 / 2.0
    assert figures["clients-3-ttft-p50"] == pytest.approx(0.35)
    assert figures["clients-3-itl-p50"] == 0.01
    assert figures["clients-3-itl-p99"] == pytest.approx(0.01 + 0.01 * 0.99)
    assert set(figures) == {first.name, *(each.name for each in others)}
    assert [each.sends_requests for each in others] == [False] * 4
    warm_up, counted = asked
    assert [len(client.prompt) for client in counted] == [2, 2, 2]
    assert {len(prompt) for client in counted for prompt in client.prompt} == {5}
    assert len({tuple(prompt) for client in (*warm_up, *counted) for prompt in client.prompt}) == 12
    with pytest.raises(ConfigError, match="clients-N"):
        parse_stream_situations("decode", Lengths())


def test_a_server_and_its_picture(
    tiny_model: Path, quire: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"figures.{name}" for name in ("json", "svg", "html")}
    arguments = ("--task", "serve", "--situations", "clients-3,memory", "--peers", "", "--repeats", 1)
    sizes = ("--input-len", 6, "--output-len", 9, "--num-threads", 1)
    flags = [each for name, path in files.items() for each in (f"--{name}", path)]
    assert quire("bench", "peers", tiny_model, *arguments, *sizes, *flags) == 0
    said = capsys.readouterr()
    assert "quire, clients-3-itl-p99: " in said.err
    assert "3 streaming clients (6 in, 9 out): output tokens/s" in said.out
    figures = json.loads(files["json"].read_text())["situations"]
    assert all(row["quire"]["median"] > 0 for row in figures.values())
    assert figures["clients-3-ttft-p50"]["quire"]["median"] <= figures["clients-3-ttft-p99"]["quire"]["median"]
    picture = ElementTree.fromstring(files["svg"].read_text())
    bars = [each for each in picture.iter() if each.get("class") == "bar"]
    assert len(bars) == len(figures)
    assert all(float(bar.get("width", 0)) == 420 for bar in bars), "the only engine's is the longest"
    assert said.out.strip() in files["html"].read_text().replace("&amp;", "&")


def test_weights_in_other_forms_are_engines_of_their_own(
    tiny_model: Path, quire: Callable[..., int], tmp_path: Path
) -> None:
    arguments = ("--situations", "decode", "--peers", "", "--repeats", 1, "--weight-formats", "int8")
    sizes = ("--input-len", 6, "--output-len", 200, "--num-threads", 1, "--json", tmp_path / "figures.json")
    assert quire("bench", "peers", tiny_model, *arguments, *sizes) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["situations"]["decode"]) == {"quire", "quire int8"}
    weights = {name: engine["weight_bytes"] for name, engine in figures["engines"].items()}
    assert weights["quire int8"] < weights["quire"]
    with pytest.raises(ConfigError, match="weight_formats must be among int8, int4, got 'int5'"):
        quire("bench", "peers", tiny_model, *arguments[:-1], "int5")
