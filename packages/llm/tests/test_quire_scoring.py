"""`max_tokens=0`: a prompt is scored and nothing is generated, up to prompts that fill the context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM, ContextLengthError, RequestError, RequestOutput, SamplingParams

CONTEXT = 64
LONG = [(7 * i * i + 11 * i) % 1000 + 5 for i in range(CONTEXT)]
PROMPTS = [LONG, LONG[:-1], LONG[:20], LONG[:2], LONG[:1]]
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=CONTEXT, num_threads=1, max_num_batched_tokens=48) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """In a context with room behind."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3, ignore_eos=True)
    with LLM(max_model_len=2 * CONTEXT, num_threads=1, max_num_batched_tokens=48) as roomy:
        return roomy.generate(PROMPTS, params, use_tqdm=False)


def test_a_prompt_that_fills_the_context_is_scored(llm: LLM, expected: list[RequestOutput]) -> None:
    for prompt, output, wanted in zip(PROMPTS, llm.generate(PROMPTS, SCORE, use_tqdm=False), expected, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.prompt_logprobs is not None
        assert wanted.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        for place, other in zip(output.prompt_logprobs, wanted.prompt_logprobs, strict=True):
            assert (place is None) == (other is None)
            for token_id, entry in (place or {}).items():
                assert other is not None
                assert entry.rank == other[token_id].rank
                assert entry.decoded_token == other[token_id].decoded_token
                assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)
        [completion] = output.outputs
        assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [], "length")
        assert output.num_generation_tokens == 0


def test_of_n_each_is_empty(llm: LLM, expected: list[RequestOutput]) -> None:
    params = SamplingParams(n=2, max_tokens=0, prompt_logprobs=0, logprobs=1, stop=("x",))
    [output] = llm.generate([LONG], params, use_tqdm=False)
    assert [(each.token_ids, each.logprobs) for each in output.outputs] == [([], []), ([], [])]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == CONTEXT
    assert output.prompt_logprobs[-1] is not None
    assert output.prompt_logprobs[-1].keys() == {LONG[-1]}


def test_without_log_probabilities_nothing_comes(llm: LLM) -> None:
    [output] = llm.generate([LONG], SamplingParams(max_tokens=0), use_tqdm=False)
    assert (output.prompt_logprobs, output.outputs[0].token_ids) == (None, [])


def test_what_does_not_fit_is_told_in_its_own_numbers(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="has 65 tokens, but this model's context is 64 tokens: shorten"):
        llm.generate([[*LONG, 5]], SCORE, use_tqdm=False)
    with pytest.raises(ContextLengthError, match=r"has 64 tokens.*one must be left for the output"):
        llm.generate([LONG], SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(RequestError, match="min_tokens must not exceed max_tokens"):
        SamplingParams(max_tokens=0, min_tokens=1)
