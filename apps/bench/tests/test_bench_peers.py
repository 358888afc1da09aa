"""`quire bench peers`: real engines on a tiny checkpoint, rounds in turn, failures, what is found and what is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_bench.cli import PEER_NAMES
from quire_bench.comparison import Comparison, compare
from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.peer_process import engine_settings
from quire_bench.peers import PEERS, PROGRAMS, TASKS, Engine, PeerOptions, find_engine, find_peers
from quire_bench.situations import Lengths, parse_situations
from quire_interfaces import ConfigError

PROGRAM = Path(__file__).parent / "fake_peer_program.py"
SMALL = ("--input-len", 6, "--output-len", 200, "--prefill-len", 90, "--repeats", 1, "--num-threads", 1)
SITUATIONS = ("--situations", "first-token,decode,concurrent-3,prefill,memory")
MACHINE = MachineLimits(read_bytes_per_s=1e9, matmul_flop_per_s=1e11)


class Machine:
    """One whose memory gets faster with each look, and whose looks take a while."""

    limits = MACHINE
    look_s = 0.1
    looks = 0

    def sample(self, rate: str) -> float:
        self.looks += 1
        time.sleep(self.look_s)
        return {"read": 1e9, "multiply": 1e11}[rate] * self.looks

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SlowMachine(Machine):
    look_s = 1.0


def test_beside_transformers(
    tiny_model: Path, quire: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert quire("bench", "peers", tiny_model, *SMALL, *SITUATIONS, "--peers", "transformers", "--json", file) == 0
    out = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["machine"]["read_bytes_per_s"] > 1e8
    assert figures["machine"]["matmul_flop_per_s"] > 1e8
    assert set(figures["situations"]) == {"first-token", "decode", "concurrent-3", "prefill", "memory"}
    for name, situation in figures["situations"].items():
        ours, theirs = situation["quire"], situation["transformers"]
        assert len(ours["rounds"]) == len(theirs["rounds"]) == 1
        assert all(figure > 0 for figure in ours["rounds"] + theirs["rounds"])
        assert theirs["ratio_us_to_peer"] == pytest.approx(ours["median"] / theirs["median"])
        assert ours["ratio_us_to_peer"] is None
        if name in ("decode", "concurrent-3", "prefill"):
            assert ours["of_limit"] == pytest.approx(ours["median"] / ours["limit"])
            assert 0 < ours["of_limit"] < 1, "nothing is faster than the limit"
        else:
            assert ours["limit"] is None
    assert figures["situations"]["memory"]["transformers"]["median"] > 1e8
    assert figures["engines"]["transformers"]["version"]
    for words in ("us/peer", "3 requests at once", "this machine: reads", "prefill of 90 tokens"):
        assert words in out


def test_json_alone_on_standard_output(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "quire_server.cli", "bench", "peers", str(tiny_model), *map(str, SMALL)]
    command += ["--situations", "first-token", "--peers", "", "--json", "-"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(run.stdout)["situations"]["first-token"]["quire"]["median"] > 0
    assert "us/peer" in run.stderr


def test_ended_by_a_signal_it_ends_its_engines(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "quire_server.cli", "bench", "peers", str(tiny_model), *map(str, SMALL)]
    with subprocess.Popen([*command, "--peers", ""], stderr=subprocess.PIPE) as run:
        children: list[str] = []
        deadline = time.monotonic() + 60
        while not children and time.monotonic() < deadline:  # without a pause: the moment of its making is the worst
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{run.pid}/status").read_text())
            if caught is None or not int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
                continue  # children of imports are no engines
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert run.returncode == 143
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


# Rounds, with pretended engines.


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Engine]:
    """An engine with its orders in its own command line."""

    def make(name: str, **asked: Any) -> Engine:
        asked = {"log": str(tmp_path / "log"), "name": name, **asked}
        settings = (f"FAKE_PEER={json.dumps(asked)}", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}")
        return Engine(name=name, command=("/usr/bin/env", *settings, sys.executable, str(PROGRAM)))

    return make


def measure(engines: list[Engine], situations: str, repeats: int = 2, **arguments: Any) -> Comparison:
    lengths = Lengths(input_len=7, output_len=4, prefill_len=30)
    settings = engine_settings(Path("x"), dtype="float32", num_threads=1, max_model_len=64, max_num_seqs=8)
    arguments = {"timeout_s": 60.0, "open_probe": Machine, **arguments}
    return compare(engines, parse_situations(situations, lengths), settings, repeats=repeats, **arguments)


def test_engines_take_turns_in_each_situation(fake: Callable[..., Engine], tmp_path: Path) -> None:
    told: list[str] = []
    kept: list[list[float | None]] = []
    result = measure(
        [fake("quire"), fake("b")],
        "decode,concurrent-5,prefill",
        on_progress=told.append,
        on_round=lambda known: kept.append(list(known.figures["prefill"]["b"])),
    )
    assert [[figure is not None for figure in figures] for figures in kept] == [[True, False], [True, True]]
    served = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    names = [name for name, *_ in served]
    starts, decode = ["quire", "b"], ["quire"] * 3 + ["b"] * 3
    first_round = [*starts, *decode, "quire", "quire", "b", "b", "quire", "quire", "b", "b"]
    assert names[: len(first_round)] == first_round
    assert names[len(first_round) :] == [{"quire": "b", "b": "quire"}[name] for name in first_round], "b begins now"
    # A warm-up, then the first token alone, then all.
    assert [tuple(map(int, sizes)) for _, *sizes in served[2:5]] == [(1, 7, 2), (1, 7, 1), (1, 7, 5)]
    assert [int(count) for _, count, *_ in served[8:12]] == [5] * 4
    assert told[0] == "round 1/2: limits of the machine"
    assert "round 2/2: b, prefill" in told
    assert result.versions["b"] == "fake float32 8"


def test_a_difference_that_drowns_in_noise_is_no_figure() -> None:
    (decode,) = parse_situations("decode", Lengths())
    seconds = iter([0.1, 0.5, 0.5])
    assert decode.measure(lambda requests: next(seconds), 0) is None
    seconds = iter([9.0, 0.5, 0.756])
    assert decode.measure(lambda requests: next(seconds), 0) == pytest.approx(500)


def test_one_at_a_time(fake: Callable[..., Engine], tmp_path: Path) -> None:
    measure([fake("quire"), fake("b")], "decode,prefill", repeats=1, one_at_a_time=True)
    names = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert names == ["quire"] * 6 + ["b"] * 6


def test_figures_and_ratios(fake: Callable[..., Engine]) -> None:
    engines = [fake("quire", token_s=0.01, own_clock=True), fake("slow", token_s=0.04, own_clock=True)]
    result = measure(engines, "decode,concurrent-2,prefill,first-token,memory", repeats=3)
    assert result.median("decode", "quire") == pytest.approx(100)
    assert result.median("decode", "slow") == pytest.approx(25)
    for situation in ("decode", "concurrent-2"):
        rounds = zip(result.figures[situation]["quire"], result.figures[situation]["slow"], strict=True)
        ratios = sorted(ours / theirs for ours, theirs in rounds if ours is not None and theirs is not None)
        assert result.ratio(situation, "slow") == pytest.approx(ratios[1])
    assert result.ratio("decode", "slow") == pytest.approx(4)
    assert result.ratio("concurrent-2", "slow") == pytest.approx(4)
    assert result.median("prefill", "quire") == pytest.approx(30 / 0.01)
    assert result.median("prefill", "slow") == pytest.approx(30 / 0.04)
    assert (result.median("first-token", "quire") or 0) > 0
    assert (result.median("memory", "quire") or 0) > 1e6


def test_the_machine_is_looked_at_while_an_engine_runs(fake: Callable[..., Engine]) -> None:
    figures: list[tuple[str, str, float]] = []
    result = measure(
        [fake("quire", token_s=0.02), fake("b", token_s=0.02)],
        "decode,prefill,memory",
        repeats=2,
        on_figure=lambda situation, engine, figure: figures.append((situation.name, engine, figure)),
        open_probe=SlowMachine,
    )
    # 4 tokens take 80 ms, or more on a busy machine; a look, which does not count, would take a second more.
    assert (result.median("decode", "quire") or 0) > 4
    decode = next(each for each in result.situations if each.name == "decode")
    assert decode.bound == "read"
    rounds = result.rates["decode"]["quire"]
    assert len(rounds) == 2
    assert all(rounds), "each round has looks"
    work = ModelWork(weight_bytes=10**9, layer_parameters=1, head_parameters=1, kv_bytes_per_token=0, attention_flop=0)
    limits = result.limits(decode, "quire", work)
    assert limits == pytest.approx([statistics.median(rates) / 1e9 for rates in rounds])
    shares = [figure / limit for figure, limit in zip(result.figures["decode"]["quire"], limits, strict=True)]  # type: ignore[operator]
    assert result.of_limit(decode, "quire", work) == pytest.approx(statistics.median(shares))
    assert {each[:2] for each in figures} == {
        (situation, engine) for situation in ("decode", "prefill", "memory") for engine in ("quire", "b")
    }


def test_a_peer_that_fails_leaves_the_others_alone(fake: Callable[..., Engine]) -> None:
    faults: dict[str, dict[str, Any]] = {
        "quire": {},
        "never": {"fails_at": "start"},
        "crashes": {"exits_at": 5},
        "hangs": {"hangs_at": 5},
        "fine": {},
    }
    engines = [fake(name, **({"token_s": 0.005} | asked)) for name, asked in faults.items()]
    result = measure(engines, "decode,concurrent-5,prefill", timeout_s=3.0)
    assert set(result.failures) == {"never", "crashes", "hangs"}
    assert "asked to fail at the start" in result.failures["never"]["start"]
    assert "ended without a word" in result.failures["crashes"]["concurrent-5"]
    assert "longer than 3 s" in result.failures["hangs"]["concurrent-5"]
    for name in ("quire", "fine"):
        for situation in ("decode", "concurrent-5", "prefill"):
            assert None not in result.figures[situation][name]
    # What it could before it failed is there; what it failed at is not tried again, but what comes after it is.
    assert None not in result.figures["decode"]["crashes"]
    assert result.figures["concurrent-5"]["crashes"] == [None, None]
    assert result.figures["prefill"]["crashes"][0] is None
    assert result.figures["prefill"]["crashes"][1] is not None
    assert result.median("decode", "never") is None
    assert result.ratio("decode", "never") is None


def test_our_own_failure_is_the_exit_status(
    tiny_model: Path, quire: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])  # only the engine reads behind the header
    arguments = ("--situations", "decode", "--peers", "")
    assert quire("bench", "peers", broken, *SMALL, *arguments) == 1
    out = capsys.readouterr().out
    assert "failed:\n  quire, start: quire: start failed: CheckpointError" in out


# What is here and what is not.


def test_peers_are_found_or_named_with_a_remedy() -> None:
    found, missing = find_peers(None, PeerOptions())
    assert {engine.name for engine in found} | missing.keys() == set(PEERS)
    assert "transformers" in {engine.name for engine in found}
    for name, text in missing.items():
        assert "\n" not in text
        assert (
            PEERS[name].install in text or PEERS[name].conversions.get("text", "?") in text or "has no program" in text
        )


def test_a_named_peer_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\nexit 1\n")
    empty.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"vllm cannot be measured: not installed in {re.escape(str(empty))}"):
        find_peers(["vllm"], PeerOptions(pythons={"vllm": str(empty)}))
    with pytest.raises(ConfigError, match=r"peer must be one of transformers, .*, got 'abacus'"):
        find_peers(["abacus"], PeerOptions())


def test_a_peer_in_another_interpreter_and_with_a_file_of_its_own(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")  # has every module
    python.chmod(0o755)
    options = PeerOptions(pythons={"llama.cpp": str(python)})
    engine = find_engine("llama.cpp", options)
    assert isinstance(engine, str)
    assert "--gguf" in engine
    (tmp_path / "model.gguf").write_bytes(b"x")
    options = PeerOptions(pythons={"llama.cpp": str(python)}, files={"--gguf": str(tmp_path / "model.gguf")})
    engine = find_engine("llama.cpp", options)
    assert isinstance(engine, Engine)
    assert engine.command == (str(python), str(PROGRAMS / "run_llama_cpp.py"))
    assert engine.file == str(tmp_path / "model.gguf")


def test_llama_server_is_looked_for_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PeerOptions(files={"--gguf": __file__})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in str(find_engine("llama-server", options))
    (tmp_path / "llama-server").write_text("#!/bin/sh\n")
    (tmp_path / "llama-server").chmod(0o755)
    engine = find_engine("llama-server", options)
    assert isinstance(engine, Engine)
    assert engine.executable == str(tmp_path / "llama-server")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gguf", "none.gguf"), "--gguf none.gguf: there is no such file"),
        (("--openvino-model", "none"), "--openvino-model none: there is no such file"),
        (("--peer-python", "vllm"), "--peer-python must be NAME=PYTHON, got 'vllm'"),
        (("--peer-python", "abacus=python"), "--peer-python names 'abacus'"),
        (("--peer-python", "vllm=/no/python"), "vllm=/no/python: there is no such program"),
        (("--peers", "transformers,abacus"), "peer must be one of"),
        (("--situations", "decode,concurrent-0"), "got 'concurrent-0'"),
        (("--situations", ""), "situations must be among"),
        (("--repeats", 0), "repeats must be at least 1, got 0"),
        (("--timeout", 0), "timeout must be above 0"),
        (("--output-len", 0), "output_len must be at least 1, got 0"),
        (("--prefill-len", 999999), "the longest sequence is 1000000 tokens, but the model's context is"),
        (("--token-range", "x"), "token_range must be LOW:HIGH"),
        (("--json", "/"), "--output-json /: not a file"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(
    tiny_model: Path, quire: Callable[..., int], arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quire("bench", "peers", tiny_model, "--peers", "transformers", *arguments)


def test_names_on_the_command_line_are_those_there_are() -> None:
    assert list(PEERS) == PEER_NAMES
    for spec in PEERS.values():
        assert spec.programs.keys() <= TASKS.keys()
        assert all((PROGRAMS / program).is_file() for program in spec.programs.values())
    lengths = Lengths()
    names = [
        situation.name
        for situation in parse_situations("first-token,decode,concurrent-8,concurrent-32,prefill,memory", lengths)
    ]
    assert names == ["first-token", "decode", "concurrent-8", "concurrent-32", "prefill", "memory"]


@pytest.mark.parametrize("program", sorted(path.name for path in PROGRAMS.glob("*.py")))
def test_programs_import_nothing_of_ours_at_the_top(program: str) -> None:
    """They run where Quire is not installed."""
    script = f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import {Path(program).stem}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert not {name for name in loaded if name.startswith("quire")}
    assert not loaded & {"torch", "numpy", "transformers"}
