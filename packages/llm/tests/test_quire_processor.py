"""How the processor is used, and that the engine says so: kernels, number formats, cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_ops import OpRequest, op_report
from quire_testkit.checkpoints import make_checkpoint

PROMPTS = [[5, 6, 7], list(range(20, 90))]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "half", like="qwen3", dtype="float16")


def test_float16_gives_the_log_probabilities_of_transformers(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    with LLM(half, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=4, num_threads=1) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        info = llm.engine_info
    assert info.dtype == "float16"
    served = {choice.op: choice.backend for choice in op_report(OpRequest(dtype=torch.float16))}
    assert info.batch_invariant == (served["decoder_stack"] == "cpu")
    assert info.choices["matrices"].startswith(served["linear"])
    assert info.choices["layers"] == ("all in one call" if served["decoder_stack"] == "cpu" else "op by op")
    assert "PYTHONDONTWRITEBYTECODE" in info.choices["modules"]
    assert any("--dtype bfloat16" in note for note in info.extra["notes"])
    network = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + output.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1)
        for token_id, entry, row in zip(output.token_ids, output.logprobs, expected, strict=True):
            assert next(iter(entry)) == token_id
            assert abs(entry[token_id].logprob - float(row[token_id])) < 5e-3
            assert float(row.max() - row[token_id]) < 5e-3


def test_other_dtypes_get_no_such_note(half: Path) -> None:
    plan = make_plan(QuireConfig.of(model=str(half), dtype="bfloat16"), ModelConfig.from_path(half))
    assert not any("float16 is widened" in note for note in plan.notes)


def test_the_engine_says_its_cores_and_why_torch_serves(half: Path) -> None:
    """In a process of its own: threads stay bound, and the table of ops is made once."""
    core = sorted(os.sched_getaffinity(0))[-1]
    code = (
        "from quire import LLM\n"
        f"with LLM({str(half)!r}, max_model_len=64, cpu_affinity='{core}') as llm:\n"
        "    llm.generate([[5, 6, 7]], use_tqdm=False)\n"
        "    print(llm.engine_info.choices['threads'], llm.engine_info.choices['matrices'], sep='\\n')\n"
    )
    environment = {**os.environ, "QUIRE_CPU_KERNELS": "none"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    threads, matrices = run.stdout.splitlines()
    assert threads == f"1, bound to cores {core}"
    assert matrices.startswith("torch (")
    assert "cpu: QUIRE_CPU_KERNELS=none" in matrices


def test_a_core_that_is_not_there_is_refused_at_the_start(half: Path) -> None:
    with pytest.raises(ConfigError, match="cpu_affinity '4093' names core 4093"):
        LLM(half, max_model_len=64, cpu_affinity="4093")
