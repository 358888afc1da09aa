"""Calls of an engine's ranks, and profiles of what they compute."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireConfig, SamplingParams
from quire_interfaces import ConfigError, RequestError
from quire_testkit.checkpoints import make_checkpoint

PROMPT = {"prompt_token_ids": list(range(5, 25))}
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_checkpoint(tmp_path_factory.mktemp("profiled") / "model")
    profiler = {"profiler": "torch", "torch_profiler_dir": str(folder / "made"), "torch_profiler_record_shapes": True}
    with LLM(
        model, num_gpu_blocks_override=32, max_model_len=256, async_scheduling=True, profiler_config=profiler
    ) as llm:
        yield llm


def test_a_profile_has_what_was_computed_between_start_and_stop(llm: LLM, folder: Path) -> None:
    llm.generate(PROMPT, SHORT, use_tqdm=False)
    llm.start_profile()
    llm.generate(PROMPT, SHORT, use_tqdm=False)  # steps run in another thread (async_scheduling)
    trace, operators = map(Path, llm.stop_profile())
    assert trace.parent == operators.parent == folder / "made"
    assert trace.name.startswith(f"dp0_pp0_tp0_rank0.{os.getpid()}.")
    assert trace.name.endswith(".pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    (event, *_) = [each for each in events if each.get("name") == "aten::index_select"]
    assert event["args"]["Input Dims"]
    assert any(each.get("cat") == "python_function" for each in events)
    assert "aten::index_select" in operators.read_text()

    llm.collective_rpc("profile", args=(True, "second.try"))
    with pytest.raises(RequestError, match="the profiler runs: stop it first"):
        llm.start_profile("third")
    ((path, _),) = llm.collective_rpc("profile", kwargs={"is_start": False})
    assert Path(path).name.startswith("second.try_dp0")
    assert "aten::index_select" not in gzip.decompress(Path(path).read_bytes()).decode()


def test_steps_say_when_to_record_and_a_tree_says_what_layers_cost(folder: Path, tmp_path: Path) -> None:
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(tmp_path / "made"),
        "torch_profiler_use_gzip": False,
        "torch_profiler_layer_tree": True,
        "delay_iterations": 2,
        "max_iterations": 3,
    }
    longer = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(make_checkpoint(tmp_path / "model"), num_gpu_blocks_override=32, max_model_len=256,
             profiler_config=profiler) as llm:  # fmt: skip
        llm.start_profile()
        llm.generate(PROMPT, longer, use_tqdm=False)  # a prefill and eleven decodes
        trace, _, tree = map(Path, llm.stop_profile())
        events = json.loads(trace.read_text())["traceEvents"]
        steps = [each for each in events if re.search(r"runner\.py\(\d+\): launch$", each.get("name", ""))]
        assert 2 <= len(steps) <= 3  # the call that began the recording had begun before it
        head, *lines = tree.read_text().splitlines()
        assert head.split() == ["total", "ms", "self", "ms", "calls", "function", "or", "operator"]
        depths = {name: line.index(name) for line in lines for name in (line.split()[3],)}
        assert depths["aten::exp_"] > next(
            depth for name, depth in depths.items() if name.startswith("quire_sampling/")
        )
        total, own, calls = lines[0].split()[:3]
        assert float(total) >= float(own) >= 0
        assert int(calls) >= 1
        assert "launch" not in vars(llm.engine.core.parts.executor)
        llm.start_profile()
        llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        assert llm.stop_profile() == []  # its first step has not come


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.stop_profile(), "does not run: start it first"),
        (lambda llm: llm.start_profile("../up"), r"the prefix must be .*, got '\.\./up'"),
        (lambda llm: llm.start_profile(7), "the prefix must be .*, got 7"),
        (lambda llm: llm.collective_rpc("__init__"), "no method '__init__' for all ranks; there are check_health, "),
        (lambda llm: llm.collective_rpc("check_health", args=[1]), "check_health: too many positional arguments"),
        (lambda llm: llm.collective_rpc(print), "must be the name of a call that ranks know, got builtin_function"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_the_reason(llm: LLM, call: Callable[[LLM], Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        call(llm)
    assert llm.collective_rpc("check_health") == [None]


def test_a_rank_tells_where_it_runs_and_what_it_takes(llm: LLM) -> None:
    (info,) = llm.collective_rpc("rank_info")
    assert (info["rank"], info["dp_rank"], info["pid"], info["device"]) == (0, 0, os.getpid(), "cpu")
    (usage,) = llm.collective_rpc("memory_usage")
    assert 10 << 20 < usage["rss_bytes"] < 1 << 40


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"profiler": "torch"}, "needs torch_profiler_dir"),
        ({"profiler": "torch", "torch_profiler_dir": "here"}, "torch_profiler_dir must be an absolute path"),
        ({"profiler": "perf"}, "profiler must be"),
        ({"profiler": "torch", "torch_profiler_folder": "/x"}, "did you mean 'torch_profiler_dir'"),
        ({"profiler": "torch", "torch_profiler_dir": "/x", "max_iterations": -1}, "max_iterations must be"),
        (
            {"torch_profiler_layer_tree": True, "torch_profiler_with_stack": False},
            "needs torch_profiler_with_stack",
        ),
        ([], "be a JSON object"),
    ],
)
def test_a_wrong_profiler_config_is_refused_at_the_start(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        QuireConfig.of(profiler_config=value)


def test_an_engine_without_a_profiler_says_how_to_have_one(tmp_path: Path) -> None:
    with (
        LLM(make_checkpoint(tmp_path / "model"), num_gpu_blocks_override=32, max_model_len=256) as llm,
        pytest.raises(RequestError, match="start it with --profiler-config"),
    ):
        llm.start_profile()


def test_bounds_of_the_scheduler_change_between_steps(llm: LLM) -> None:
    core = llm.engine.core
    most_rows = llm.engine_info.max_num_seqs
    core.reconfigure({"max_num_seqs": 1, "max_num_batched_tokens": 16})
    outputs = llm.generate([PROMPT] * 3, SHORT, use_tqdm=False)
    first, second, third = (each.metrics for each in outputs)
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.last_token_ts <= second.scheduled_ts
    assert second.last_token_ts <= third.scheduled_ts
    for values, words in (
        ({"max_num_seqs": most_rows + 1}, f"must be at most {most_rows}"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be"),
        ({"max_running_per_tenant": 2}, "where it was set at the start"),
    ):
        with pytest.raises(RequestError, match=words):
            core.reconfigure({"max_num_seqs": 5, **values})
    core.reconfigure({})
    together = llm.generate([PROMPT] * 3, SHORT, use_tqdm=False)
    assert together[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
