"""Ranks share networks with an encoder, and those that run through Transformers' classes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_interfaces import ConfigError
from quire_models import ModelConfig
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.fallback_cases import FALLBACK_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 96,
    "block_size": 8,
    "num_threads": 1,
    "dtype": "float32",
    "max_num_batched_tokens": 32,
}
KNOWN = {**CASES, **ENCODER_CASES, **FALLBACK_CASES}


def write_model(folder: Path, architecture: str) -> None:
    case = KNOWN[architecture]
    write_checkpoint(folder, architecture, dataclasses.replace(case, fields={**case.fields, "vocab_size": 320}))
    write_tokenizer(folder, vocab_size=320)


def answers(folder: Path, **ranks: int) -> list[Any]:
    """Tokens and log probabilities, greedy and sampled."""
    prompts = [[(7 * i) % 290 + 3 for i in range(length)] for length in (29, 5)]
    found = []
    with LLM(str(folder), **SETTINGS, **ranks) as llm:
        for params in (
            SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True),
            SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=8, logprobs=1, ignore_eos=True),
        ):
            for output in llm.generate(prompts, params, use_tqdm=False):
                for each in output.outputs:
                    logprobs = [{token: one.logprob for token, one in at.items()} for at in each.logprobs or ()]
                    found.append((each.token_ids, logprobs))
    return found


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_networks_with_an_encoder_have_the_bits_of_one_rank(architecture: str, tmp_path: Path) -> None:
    write_model(tmp_path, architecture)
    assert answers(tmp_path, tensor_parallel_size=2) == answers(tmp_path)


def test_networks_of_transformers_have_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Not the bits: torch multiplies with some rows of a matrix in another order than with all."""
    write_model(tmp_path, "CwmForCausalLM")
    assert not ModelConfig.from_path(tmp_path).is_native
    alone, shared = answers(tmp_path), answers(tmp_path, tensor_parallel_size=2)
    assert [tokens for tokens, _ in shared] == [tokens for tokens, _ in alone]
    for (_, some), (_, others) in zip(shared, alone, strict=True):
        for at, other in zip(some, others, strict=True):
            assert at == pytest.approx(other, abs=1e-4)


def test_the_plan_of_a_network_of_transformers_has_the_bytes_of_a_rank(tmp_path: Path) -> None:
    write_model(tmp_path, "CwmForCausalLM")
    model = ModelConfig.from_path(tmp_path)
    whole, own = (
        make_plan(
            QuireConfig.of(model=str(tmp_path), max_model_len=64, tensor_parallel_size=size),
            model,
            free_bytes=1 << 30,
        ).ledger_bytes
        for size in (1, 2)
    )
    assert own["weights: MLP"] < 0.6 * whole["weights: MLP"]
    assert own["weights: LM head"] * 2 == whole["weights: LM head"]
    assert own["weights: embedding"] == whole["weights: embedding"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 2}, "is not shared between ranks: .* or by tensor_parallel_size alone"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, "enable_lora does not go with tensor_parallel_size 2"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "has no attention of a decoder"),
    ],
)
def test_what_networks_of_transformers_do_not_take_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, "CwmForCausalLM")
    with pytest.raises(ConfigError, match=message):
        make_plan(
            QuireConfig.of(model=str(tmp_path), max_model_len=64, **settings),
            ModelConfig.from_path(tmp_path),
            free_bytes=1 << 30,
        )
