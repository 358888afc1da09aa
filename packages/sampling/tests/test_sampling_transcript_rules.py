"""Rules of transcripts, beside Transformers' logits processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from quire_interfaces import RequestError, SamplingParams
from quire_sampling import Sampler, SamplingState

VOCAB, END, NO_TIMES, FIRST = 40, 20, 24, 25
PROMPT = [21, 22]
SUPPRESSED, AT_BEGIN = [3, 21, 22, NO_TIMES], [5, END]


def rules(**changed: Any) -> dict[str, Any]:
    return {
        "begin": len(PROMPT), "end_of_text": END, "timestamp_begin": FIRST, "max_initial_timestamp": 4,
        "suppressed": SUPPRESSED, "suppressed_at_begin": AT_BEGIN, **changed,
    }  # fmt: skip


def sampled(written: list[int], logits: torch.Tensor, given: dict[str, Any]) -> tuple[int, float]:
    """The token that is taken, and its log probability."""
    state = SamplingState(2, VOCAB)
    params = SamplingParams(temperature=0.0, logprobs=0, extra_args={"transcript_rules": given})
    state.set_row(1, params, seed=0, num_prompt_tokens=len(PROMPT))
    history = torch.zeros(2, 64, dtype=torch.int32)
    tokens = PROMPT + written
    history[1, : len(tokens)] = torch.tensor(tokens)
    output = Sampler(state).sample(logits[None].clone(), [1], torch.tensor([len(tokens) - 1]), history)
    assert output.logprob_tensors is not None
    return int(output.token_ids[0]), float(output.logprob_tensors.token_logprobs[0])


def expected(written: list[int], logits: torch.Tensor) -> tuple[int, float]:
    config = GenerationConfig(eos_token_id=END, bos_token_id=END, no_timestamps_token_id=NO_TIMES)
    config.max_initial_timestamp_index = 4
    ids, scores = torch.tensor([PROMPT + written]), logits[None].clone()
    for processor in (
        SuppressTokensAtBeginLogitsProcessor(AT_BEGIN, len(PROMPT)),
        SuppressTokensLogitsProcessor(SUPPRESSED),
        WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT)),
    ):
        scores = processor(ids, scores)
    logprobs = scores.log_softmax(-1)[0]
    return int(logprobs.argmax()), float(logprobs.max())


@pytest.mark.parametrize(
    "written",
    [
        [],
        [FIRST],
        [FIRST + 2],
        [FIRST, 7],
        [FIRST, 7, FIRST + 3],
        [FIRST, 7, FIRST + 3, FIRST + 3],
        [FIRST, 7, FIRST + 3, FIRST + 3, 8, 9],
        [7],
    ],
)
def test_tokens_are_those_of_transformers(written: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    taken = set()
    for number in range(40):
        logits = 3 * torch.randn(VOCAB, generator=generator)
        logits[FIRST:] += -3 if number % 2 else 1
        token, logprob = sampled(written, logits, rules())
        taken.add(token >= FIRST)
        assert (token, pytest.approx(logprob, abs=1e-5)) == expected(written, logits)
    assert taken


def test_transcripts_without_times_have_none() -> None:
    logits = torch.zeros(VOCAB)
    logits[FIRST + 1], logits[7] = 9.0, 5.0
    assert sampled([], logits, rules(timestamps=False))[0] == 7


@pytest.mark.parametrize(
    "given", [3, rules(begin=-1), rules(end_of_text=VOCAB), rules(timestamp_begin=VOCAB + 1), rules(suppressed=[VOCAB])]
)
def test_wrong_rules_are_refused(given: Any) -> None:
    state = SamplingState(1, VOCAB)
    params = SamplingParams(extra_args={"transcript_rules": given})
    with pytest.raises(RequestError, match="transcript_rules"):
        state.set_row(0, params, seed=0, num_prompt_tokens=2)
