"""The ends of every range of `SamplingParams`: tokens of the vocabulary come of them, and no step fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, RequestError, SamplingParams

TINY = (5e-324, 1e-300, 1e-45, 1e-38, 1e-20, 1e-7)
PROMPTS = ["Quire is an engine", "one two three " * 30]
ENDS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (*TINY, 100)),
    *({"top_p": value} for value in TINY),
    *({"min_p": value} for value in (*TINY, 1)),
    *({"repetition_penalty": value} for value in (0.01, 100)),
    *({"presence_penalty": value, "frequency_penalty": value} for value in (-2, 2)),
    *({"dry_multiplier": value, "dry_base": base} for value in (1e-300, 100) for base in (1, 10)),
    {"dry_multiplier": 100, "dry_base": 10, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    *({"top_n_sigma": value} for value in (*TINY, 1e6)),
    *({"dynatemp_range": value, "dynatemp_exponent": power} for value in (1e-300, 100) for power in (5e-324, 100)),
    *({"xtc_probability": 1, "xtc_threshold": value} for value in (0, 1e-300, 1)),
    *({"mirostat_mode": mode, "mirostat_tau": tau, "mirostat_eta": 1} for mode in (1, 2) for tau in (5e-324, 64)),
    {"temperature": 5e-324, "repetition_penalty": 0.01, "logit_bias": {5: 100.0}, "dynatemp_range": 5e-324},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=256, num_threads=1) as made:
        yield made


def test_no_end_of_a_range_fails(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=5, seed=1, ignore_eos=True, logprobs=1, **each) for each in ENDS]
    for prompt in PROMPTS:
        outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
        for each, output in zip(ENDS, outputs, strict=True):
            assert output.outputs[0].error is None, each
            assert len(output.outputs[0].token_ids) == 5, each


def test_next_to_no_temperature_is_greedy(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=5, seed=1, ignore_eos=True, temperature=each) for each in (0, *TINY)]
    greedy, *others = llm.generate([PROMPTS[0]] * len(params), params, use_tqdm=False)
    assert all(each.outputs[0].token_ids == greedy.outputs[0].token_ids for each in others)


def test_what_excludes_every_token_is_this_request_s_error(llm: LLM) -> None:
    nothing = SamplingParams(allowed_token_ids=(5,), bad_words_token_ids=((5,),), max_tokens=2)
    bad, good = llm.generate(["a", "a"], [nothing, SamplingParams(max_tokens=2, ignore_eos=True)], use_tqdm=False)
    assert bad.outputs[0].error_code == "no_token_left"
    assert len(good.outputs[0].token_ids) == 2


@pytest.mark.parametrize("penalty", [float("nan"), float("inf"), 1e300, -1e300, "1"])
def test_penalties_of_beams(penalty: Any) -> None:
    with pytest.raises(RequestError, match="length_penalty"):
        BeamSearchParams(length_penalty=penalty)
