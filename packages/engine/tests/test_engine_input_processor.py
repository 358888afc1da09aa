"""Requests are resolved and checked before the core sees them."""

from __future__ import annotations

from typing import Any

import pytest

from quire_engine import EngineInfo, InputProcessor, unpack_token_ids
from quire_interfaces import (
    ContextLengthError,
    MediaItem,
    MediaSpan,
    Modality,
    PromptMedia,
    RenderedPrompt,
    RequestError,
    RequestOptions,
    SamplingParams,
)

INFO = EngineInfo(max_model_len=100, vocab_size=50)
ONE = RenderedPrompt(token_ids=[1])


def process(prompt: list[int], **params: Any) -> list[Any]:
    return InputProcessor(INFO, eos_token_ids=[2, 3]).process(
        "r", RenderedPrompt(token_ids=prompt), SamplingParams(**params)
    )


def test_what_is_left_open_is_resolved() -> None:
    (message,) = process([5, 6, 7], stop_token_ids=(9,))
    assert unpack_token_ids(message.prompt) == [5, 6, 7]
    assert message.max_tokens == 97
    assert message.stop_token_ids == {2, 3, 9}
    assert message.arrival_time_s > 0
    assert process([1], ignore_eos=True)[0].stop_token_ids == frozenset()


def test_seeds() -> None:
    assert [each.seed for each in process([1], n=3, seed=5)] == [5, 6, 7]
    assert [each.seed for each in process([1], n=2, seed=2**63 - 1)] == [2**63 - 1, -(2**63)]
    assert process([1])[0].seed != process([1])[0].seed


def test_the_engines_seed_makes_those_that_requests_leave_out() -> None:
    def seeds(seed: int) -> list[int]:
        processor = InputProcessor(INFO, seed=seed)
        wanted = (None, None, 5, None)
        return [processor.process("r", ONE, SamplingParams(seed=each))[0].seed for each in wanted]

    assert seeds(0) == seeds(0)
    assert seeds(0)[2] == 5
    assert len({*seeds(0), *seeds(1)}) == 7


def test_a_check_refuses_what_would_be_refused_and_draws_no_seed() -> None:
    checked, other = InputProcessor(INFO, seed=0), InputProcessor(INFO, seed=0)
    checked.check(ONE, SamplingParams(max_tokens=99))
    assert checked.process("r", ONE, SamplingParams())[0].seed == other.process("r", ONE, SamplingParams())[0].seed
    for prompt, params, param in (
        ([1] * 100, {}, "prompt"),
        ([1, 50], {}, "prompt"),
        ([1], {"max_tokens": 100}, "max_tokens"),
        ([1], {"stop_token_ids": (50,)}, "stop_token_ids"),
        ([1], {"logprob_token_ids": (50,)}, "logprob_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            checked.check(RenderedPrompt(token_ids=prompt), SamplingParams(**params))
        assert caught.value.param == param


def test_internal_ids_never_repeat() -> None:
    processor = InputProcessor(INFO)
    seen = {each.request_id for _ in range(3) for each in processor.process("same", ONE, SamplingParams(n=2))}
    assert len(seen) == 6


def test_only_the_first_completion_computes_prompt_logprobs() -> None:
    messages = process([1, 2], n=3, prompt_logprobs=1, logprobs=4)
    assert [each.sampling_params.prompt_logprobs for each in messages] == [1, None, None]
    assert [each.sampling_params.logprobs for each in messages] == [4, 4, 4]


@pytest.mark.parametrize(
    ("prompt", "params", "told", "param"),
    [
        ([1] * 100, {}, "100 tokens.*100 tokens", "prompt"),
        ([1] * 90, {"max_tokens": 11}, "90.*11.*101.*100.*at most 10", "max_tokens"),
        ([1] * 90, {"min_tokens": 11}, "min_tokens is 11", "min_tokens"),
    ],
)
def test_what_does_not_fit_the_context(prompt: list[int], params: dict[str, Any], told: str, param: str) -> None:
    with pytest.raises(ContextLengthError, match=told) as caught:
        process(prompt, **params)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([1, 50], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        (["1"], {}, "prompt"),
        ([1], {"logit_bias": {50: 1.0}}, "logit_bias"),
        ([1], {"allowed_token_ids": (1, 99)}, "allowed_token_ids"),
        ([1], {"stop_token_ids": (50,)}, "stop_token_ids"),
        ([1], {"bad_words_token_ids": ((1, 77),)}, "bad_words_token_ids"),
    ],
)
def test_what_is_outside_the_vocabulary(prompt: list[Any], params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        process(prompt, **params)
    assert caught.value.param == param


def test_the_last_of_vocabulary_and_context_is_fine() -> None:
    (message,) = process([49] * 99, max_tokens=1)
    assert message.max_tokens == 1


class Letters:
    """A tokenizer with a token per letter."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.texts.append(text)
        return [ord(letter) - 32 for letter in text]


def test_bad_words_become_tokens_at_the_start_and_after_a_space() -> None:
    processor = InputProcessor(EngineInfo(max_model_len=100, vocab_size=128), [0], Letters())  # type: ignore[arg-type]
    params = SamplingParams(bad_words=("ab", " c"), bad_words_token_ids=((7,),))
    (message,) = processor.process("r", ONE, params)
    assert message.sampling_params.bad_words == ()
    assert message.sampling_params.bad_words_token_ids == ((7,), (65, 66), (0, 65, 66), (0, 67))
    with pytest.raises(RequestError, match="no tokenizer: give bad_words_token_ids"):
        process([1], bad_words=("ab",))


def test_texts_of_parameters_are_tokenized_once_for_all_prompts_of_a_request() -> None:
    tokenizer = Letters()
    processor = InputProcessor(EngineInfo(max_model_len=100, vocab_size=128), [0], tokenizer)  # type: ignore[arg-type]
    params = SamplingParams(bad_words=("ab",), dry_multiplier=1.0, dry_sequence_breakers=(":", 9))
    messages = [processor.process("r", ONE, params)[0] for _ in range(3)]
    assert tokenizer.texts == ["ab", " ab", "a:"]
    assert [each.sampling_params.dry_sequence_breakers for each in messages] == [(26, 9)] * 3


def test_a_bad_word_of_too_many_tokens() -> None:
    processor = InputProcessor(EngineInfo(max_model_len=100, vocab_size=128), [0], Letters())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="a text of 65 tokens, at most 64 are allowed") as caught:
        processor.process("r", ONE, SamplingParams(bad_words=("w" * 64,)))
    assert caught.value.param == "bad_words"


class Unread(list[int]):
    """A prompt whose tokens must not be looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("the tokens were read")


@pytest.mark.parametrize("max_tokens", [None, 5, 0])
@pytest.mark.parametrize("limits", [{"max_model_len": 100}, {"max_model_len": 9, "max_encoder_len": 100}])
def test_a_prompt_that_is_too_long_is_refused_without_reading_it(
    limits: dict[str, int], max_tokens: int | None
) -> None:
    processor = InputProcessor(EngineInfo(vocab_size=50, **limits))
    with pytest.raises(ContextLengthError, match="101 tokens") as caught:
        processor.process("r", RenderedPrompt(token_ids=Unread([1] * 101)), SamplingParams(max_tokens=max_tokens))
    assert caught.value.num_prompt_tokens == 101


def test_options_are_handed_on_whole_to_every_completion() -> None:
    options = RequestOptions(priority=3, cache_salt="s", tenant="t")
    messages = InputProcessor(INFO).process("r", ONE, SamplingParams(n=2), options)
    assert [message.to_request().options for message in messages] == [options, options]
    for processor in (InputProcessor(INFO), InputProcessor(EngineInfo(max_model_len=9, vocab_size=9))):
        with pytest.raises(RequestError, match="'x' was asked for"):
            processor.check(ONE, SamplingParams(), RequestOptions(adapter="x"))


def test_media_bring_an_adapter_unless_the_request_chooses_one() -> None:
    info = EngineInfo(
        max_model_len=100, vocab_size=50, modalities=("image", "audio"), takes_adapters=True,
        default_mm_adapters={"image": "eyes"},
    )  # fmt: skip
    processor = InputProcessor(info)

    def adapter(modality: Modality | None, chosen: str | None = None) -> str | None:
        media = None
        if modality is not None:
            item = MediaItem(modality=modality, key="k", num_embeds=1, path="", features=())
            media = PromptMedia(spans=(MediaSpan(item=item, start=0, length=1, embeds=((0, 1),)),))
        prompt = RenderedPrompt(token_ids=[1], media=media)
        return processor.process("r", prompt, SamplingParams(), RequestOptions(adapter=chosen))[0].options.adapter

    assert adapter(Modality.IMAGE) == "eyes"
    assert adapter(Modality.IMAGE, "other") == "other"
    assert adapter(Modality.AUDIO) is None
    assert adapter(None) is None


def test_an_engine_of_towers_alone_ends_what_has_media_and_refuses_the_rest() -> None:
    item = MediaItem(modality=Modality.IMAGE, key="a", num_embeds=1, path="", features=())
    media = PromptMedia(spans=(MediaSpan(item=item, start=0, length=1, embeds=((0, 1),)),))
    prompt = RenderedPrompt(token_ids=[4, 5], media=media)
    info = EngineInfo(max_model_len=100, vocab_size=50, modalities=("image",), mm_encoder_only=True)
    processor = InputProcessor(info, [2, 3])
    messages = processor.process("r", prompt, SamplingParams(n=2, ignore_eos=True, min_tokens=5, stop_token_ids=(9,)))
    for message in messages:
        assert (message.max_tokens, message.stop_token_ids) == (1, {2, 3})
        assert message.sampling_params.min_tokens == 0
    assert len(messages) == 2
    (message,) = InputProcessor(info).process("r", prompt, SamplingParams())
    assert message.stop_token_ids, "without end tokens, some token ends it"
    for bad, params in ((ONE, {}), (RenderedPrompt(token_ids=[4]), {}), (prompt, {"logprobs": 1})):
        with pytest.raises(RequestError, match="no language model") as caught:
            processor.check(bad, SamplingParams(**params))
        assert caught.value.code == "unsupported"
