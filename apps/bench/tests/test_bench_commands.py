"""The command line: throughput and latency from end to end, and arguments that are wrong."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire_bench.cli import register_bench
from quire_bench.peers import PEERS
from quire_interfaces import ConfigError

SMALL = ("--num-prompts", "3", "--input-len", "10", "--output-len", "4", "--repeats", "1")


def run_quire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire_server.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_throughput_prints_json_and_nothing_else(tiny_model: Path) -> None:
    run = run_quire("bench", "throughput", str(tiny_model), *SMALL, "--peer", "transformers", "--output-json", "-")
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    assert figures["output_tokens"] == 12
    assert figures["ratio"] > 0
    assert figures["settings"]["model"] == str(tiny_model)
    assert "output_tokens_per_s" in run.stderr


def test_a_wrong_setting_is_one_line_and_status_2(tmp_path: Path) -> None:
    run = run_quire("bench", "serve", "--output-json", str(tmp_path / "missing" / "x.json"))
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("quire: --output-json")
    assert run.stderr.count("\n") == 1


def test_latency(tiny_model: Path, quire: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("bench", "latency", tiny_model, *SMALL, "--warmups", 0) == 0
    out = capsys.readouterr().out
    assert out.startswith("latency\n")
    assert "per_output_token_ms" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-prompts", 0), "num_requests must be at least 1, got 0"),
        (("--output-len", -1), "output_len must be at least 1, got -1"),
        (("--length-spread", 1.5), r"length_spread must be in \[0, 1\), got 1.5"),
        (("--prefix-len", 999), r"prefix_len must be from 0 to the shortest prompt \(128\), got 999"),
        (("--token-range", "250"), "token_range must be LOW:HIGH, for example 10:250, got '250'"),
        (("--token-range", "9:3"), "the token range 9:3 is empty"),
        (("--output-json", "/"), "--output-json /: not a file"),
    ],
)
@pytest.mark.parametrize("kind", ["throughput", "latency", "serve"])
def test_bad_workloads(quire: Callable[..., int], kind: str, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quire("bench", kind, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench",), "throughput|latency|embed|speech|serve"),
        (("bench", "speed"), "invalid choice: 'speed'"),
        (("bench", "throughput", "--peer", "abacus"), "invalid choice: 'abacus'"),
        (("bench", "latency", "--repeats", "many"), "invalid int value: 'many'"),
        (("bench", "serve", "--request-rate", "fast"), "invalid float value: 'fast'"),
        (("make-model",), "folder"),
    ],
)
def test_bad_command_lines(
    quire: Callable[..., int], arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        quire(*arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_serve_refuses_bad_loads(quire: Callable[..., int]) -> None:
    with pytest.raises(ConfigError, match="base_url must begin with http"):
        quire("bench", "serve", "--base-url", "localhost:8000")
    with pytest.raises(ConfigError, match="max_concurrency must be above 0, got 0"):
        quire("bench", "serve", "--max-concurrency", 0)


def test_the_peers_offered_are_those_there_are() -> None:
    parser = argparse.ArgumentParser()
    register_bench(parser.add_subparsers())
    for name in PEERS:
        assert parser.parse_args(["bench", "throughput", "--peer", name]).peer == name


def test_registering_imports_nothing_heavy() -> None:
    script = (
        "import argparse, sys\n"
        "from quire_bench.cli import register_bench, register_make_model\n"
        "commands = argparse.ArgumentParser().add_subparsers()\n"
        "register_bench(commands), register_make_model(commands)\n"
        "print(sorted({'torch', 'numpy', 'aiohttp', 'rich', 'quire', 'transformers'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_the_serving_client_loads_no_torch() -> None:
    script = "import sys, quire_bench.serve; print('torch' in sys.modules, 'quire_engine' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n"
