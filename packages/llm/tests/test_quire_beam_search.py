"""Beam search against Transformers' own, and best_of, on a tiny model: equal sequences, equal scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, BeamSearchParams, ContextLengthError, RequestError, SamplingParams
from quire_testkit.checkpoints import make_checkpoint

PROMPT = [7, 30, 4, 99, 12, 55, 8, 41, 200, 17, 23, 90, 6, 77, 31, 18, 64, 2, 45]
SETTINGS = {"max_model_len": 96, "max_num_seqs": 8, "num_threads": 1, "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def stops_of(llm: LLM, prompts: list[list[int]], count: int) -> list[int]:
    """Tokens from the middle of what is found without them, so that sequences end there."""
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True))
    return [output.outputs[i].token_ids[4 + i] for i, output in enumerate(found)][:count]


@pytest.mark.parametrize(
    ("width", "max_tokens", "penalty", "early", "num_stops"),
    [(1, 6, 1.0, False, 0), (4, 9, 1.0, False, 0), (3, 14, 1.0, False, 1), (3, 14, 0.0, True, 2),
     (4, 12, -0.7, False, 2), (5, 12, 2.5, False, 2), (2, 1, 0.0, False, 0)],
)  # fmt: skip
def test_the_same_sequences_and_scores_as_transformers(
    llm: LLM, oracle: torch.nn.Module, width: int, max_tokens: int, penalty: float, early: bool, num_stops: int
) -> None:
    prompts = [PROMPT, PROMPT[3:9]]
    stops = stops_of(llm, prompts, num_stops)
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        length_penalty=penalty,
        early_stopping=early,
        ignore_eos=True,
        stop_token_ids=tuple(stops),
    )
    outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=stops or None,
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = getattr(expected, "sequences_scores", None)
        for i, completion in enumerate(output.outputs):
            theirs = expected.sequences[i, len(prompt) :].tolist()
            assert completion.token_ids == theirs[: len(completion.token_ids)]
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] in stops else "length")
            assert completion.finish_reason == "stop" or len(completion.token_ids) == max_tokens
            assert completion.cumulative_logprob is not None
            if scores is not None:
                score = completion.cumulative_logprob / len(completion.token_ids) ** penalty
                assert score == pytest.approx(float(scores[i]), rel=1e-4)
        assert len(output.outputs) == width
    ends = [completion.finish_reason for output in outputs for completion in output.outputs]
    assert num_stops == 0 or penalty > 0 or "stop" in ends


def test_beams_share_what_they_begin_with(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.stats()
    [output] = llm.beam_search([PROMPT], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    after = llm.stats()
    asked = after.prefix_cache_query_tokens_total - before.prefix_cache_query_tokens_total
    hit = after.prefix_cache_hit_tokens_total - before.prefix_cache_hit_tokens_total
    assert asked == len(PROMPT) + sum(4 * (len(PROMPT) + i) for i in range(1, 8))
    assert asked - hit <= len(PROMPT) + 4 * 7 * 4, "at most the last block of each beam is computed again"
    assert len({tuple(each.token_ids) for each in output.outputs}) == 4


def test_the_best_of_many(llm: LLM) -> None:
    for count, n in ((6, 2), (3, 3)):
        params = SamplingParams(n=count, seed=5, temperature=1.5, max_tokens=6, logprobs=0, ignore_eos=True)
        llm.reset_prefix_cache()
        [everyone] = llm.generate([PROMPT], params, use_tqdm=False)
        cached = [each.num_cached_tokens for each in everyone.metrics.completions]
        assert cached == [0] + [16] * (count - 1), "one computes the prompt"
        sums = [
            sum(position[token_id].logprob for token_id, position in zip(each.token_ids, each.logprobs, strict=True))
            for each in everyone.outputs
        ]
        assert [each.cumulative_logprob for each in everyone.outputs] == pytest.approx(sums)
        ranked = [everyone.outputs[i].token_ids for i in sorted(range(count), key=lambda i: -sums[i])]
        asked = SamplingParams(n=n, best_of=count, seed=5, temperature=1.5, max_tokens=6, ignore_eos=True)
        [best] = llm.generate([PROMPT], asked, use_tqdm=False)
        expected = ranked[:n] if n < count else [each.token_ids for each in everyone.outputs]
        assert [each.token_ids for each in best.outputs] == expected
        assert [each.index for each in best.outputs] == list(range(n))
        assert all(each.logprobs is None for each in best.outputs)
        assert best.num_generation_tokens == 6 * count


def test_many_completions_in_a_cache_that_is_too_small_for_them(folder: Path) -> None:
    params = SamplingParams(n=5, seed=5, max_tokens=20, ignore_eos=True)
    settings = {**SETTINGS, "max_model_len": 48}
    with LLM(folder, **settings, num_gpu_blocks_override=15) as small, LLM(folder, **settings) as large:
        for _ in range(2):
            results = [
                [
                    each.token_ids
                    for output in llm.generate([PROMPT, PROMPT[2:]], params, use_tqdm=False)
                    for each in output.outputs
                ]
                for llm in (small, large)
            ]
            assert results[0] == results[1]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"beam_width": 0}, "beam_width"), ({"beam_width": 2.0}, "beam_width"), ({"beam_width": 33}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"), ({"length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 12}, "beam_width"),
    ],
)  # fmt: skip
def test_wrong_searches_are_refused(llm: LLM, changes: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.beam_search(PROMPT, BeamSearchParams(**changes))  # type: ignore[arg-type]
    assert caught.value.param == param
    with pytest.raises(ContextLengthError):
        llm.beam_search(PROMPT, BeamSearchParams(max_tokens=90))
    with pytest.raises(RequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)
