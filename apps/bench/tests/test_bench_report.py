"""Percentiles against the standard library's, and what goes to which stream and file."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_bench.report import check_json_path, percentiles, progress_bar, show
from quire_interfaces import ConfigError

FIGURES = {
    "num_requests": 3,
    "rate": 1.23456,
    "first_token_s": {"p50": 0.0125, "max": 0.5},
    "empty_s": {},
    "none": None,
}


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_statistics_module(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    expected = {
        "mean": statistics.fmean(values),
        "p50": statistics.median(values),
        "p90": cuts[89],
        "p99": cuts[98],
        "max": max(values),
    }
    assert percentiles(values) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_percentiles_of_one_value_and_of_none() -> None:
    assert set(percentiles([2.5]).values()) == {2.5}
    assert percentiles([]) == {}


def test_percentiles_leave_their_input_alone() -> None:
    values = [3.0, 1.0, 2.0]
    percentiles(values)
    assert values == [3.0, 1.0, 2.0]


def test_a_table_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    show("serve", FIGURES, {"seed": 1}, None)
    out, err = capsys.readouterr()
    assert err == ""
    rows = dict(line.split(None, 1) for line in out.splitlines()[1:])
    assert rows == {
        "num_requests": "3",
        "rate": "1.235",
        "first_token_ms": "p50 12.5  max 500.0",
        "empty_ms": "no values",
    }


def test_json_on_standard_output_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show("serve", FIGURES, {"seed": 1}, "-")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"benchmark": "serve", "settings": {"seed": 1}, **FIGURES}
    assert "num_requests" in err


def test_json_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    check_json_path(str(path))
    show("serve", FIGURES, {"folder": tmp_path}, str(path))
    assert json.loads(path.read_text())["settings"] == {"folder": str(tmp_path)}
    assert capsys.readouterr().out.startswith("serve\n")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "figures.json"):
        with pytest.raises(ConfigError, match="not a file in an existing folder") as caught:
            check_json_path(str(path))
        assert str(path) in str(caught.value)
    check_json_path(None)
    check_json_path("-")
    with pytest.raises(ConfigError, match="cannot write"):
        show("serve", {}, {}, str(tmp_path))


def test_progress_stays_off_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        progress.advance(progress.add_task("runs", total=2))
    assert capsys.readouterr().out == ""
