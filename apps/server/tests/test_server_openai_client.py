"""The official `openai` client, streaming and not, reads everything the two text APIs answer."""

from __future__ import annotations

import asyncio
import math
import shutil
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from quire import BeamSearchParams

HELLO: list[Any] = [{"role": "user", "content": "the quire gathers twelve blocks"}]
EXACT: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


def chat(client, **arguments):
    return client.chat.completions.create(model="tiny", messages=HELLO, **arguments)


def joined(chunks, index=0):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another/model")
    assert caught.value.code == "model_not_found"


def test_chat_answers_a_message_with_usage(client):
    answer = chat(client, max_completion_tokens=7, seed=1, **EXACT)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")


def test_chat_stream_is_the_same_text_as_the_whole_answer(client):
    for seed in range(5):
        arguments = {"max_tokens": 40, "seed": seed, **EXACT}
        chunks = list(chat(client, stream=True, **arguments))
        assert joined(chunks) == chat(client, **arguments).choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stream_with_usage(client):
    *chunks, last = chat(client, stream=True, max_tokens=9, stream_options={"include_usage": True}, **EXACT)
    assert last.choices == []
    assert last.usage.completion_tokens == 9
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_stream_with_continuous_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    opening, *chunks, last = chat(client, stream=True, max_tokens=9, stream_options=options, **EXACT)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert opening.choices[0].delta.role == "assistant"
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens == 9
    assert counts[0] >= 1


def test_chat_n_gives_different_answers_and_streams_them_apart(client):
    arguments = {"n": 3, "max_tokens": 12, "seed": 3, **EXACT}
    whole = chat(client, **arguments)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 36
    chunks = list(chat(client, stream=True, **arguments))
    assert [joined(chunks, index) for index in range(3)] == texts
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2]


def test_seed_repeats_an_answer_and_another_seed_does_not(client):
    first, again, other = (
        chat(client, max_tokens=16, seed=seed, **EXACT).choices[0].message.content for seed in (5, 5, 6)
    )
    assert first == again != other


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_carry_exact_bytes(client, stream):
    arguments = {"max_tokens": 30, "logprobs": True, "top_logprobs": 3, "seed": 2, **EXACT}
    if stream:
        chunks = list(chat(client, stream=True, **arguments))
        content = [each for chunk in chunks for c in chunk.choices if c.logprobs for each in c.logprobs.content]
        text = joined(chunks)
    else:
        choice = chat(client, **arguments).choices[0]
        content, text = choice.logprobs.content, choice.message.content
    assert len(content) == 30
    assert all(len(each.top_logprobs) == 3 for each in content)
    assert all(each.logprob <= 0 and math.isfinite(each.logprob) for each in content)
    assert b"".join(bytes(each.bytes) for each in content).decode(errors="replace") == text


def test_logprobs_without_top_logprobs(client):
    content = chat(client, max_tokens=4, logprobs=True, **EXACT).choices[0].logprobs.content
    assert [each.top_logprobs for each in content] == [[]] * 4


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_text_wherever_tokens_fall(client, include):
    whole = chat(client, max_tokens=60, seed=11, **EXACT).choices[0].message.content
    stop = whole[20:23]
    end = whole.index(stop) + (len(stop) if include else 0)
    extra = {"extra_body": {"ignore_eos": True, "include_stop_str_in_output": include}}
    arguments = {"max_tokens": 60, "seed": 11, "stop": [stop, "never there"], **extra}
    (choice,) = chat(client, **arguments).choices
    assert (choice.message.content, choice.finish_reason) == (whole[:end], "stop")
    assert choice.model_extra["stop_reason"] == stop
    assert joined(chat(client, stream=True, **arguments)) == whole[:end]


def test_stop_token_ends_the_output(client):
    body = {"ignore_eos": True, "return_token_ids": True}
    whole = chat(client, max_tokens=20, seed=4, extra_body=body).choices[0]
    token_id = whole.model_extra["token_ids"][10]
    place = whole.model_extra["token_ids"].index(token_id)
    (choice,) = chat(client, max_tokens=20, seed=4, extra_body={**body, "stop_token_ids": [token_id]}).choices
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == token_id
    assert choice.model_extra["token_ids"] == whole.model_extra["token_ids"][: place + 1]


def test_every_extra_field_is_taken(client):
    answer = chat(
        client,
        max_completion_tokens=6,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 3, "7": -100},
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        tool_choice="auto",
        user="me",
        response_format={"type": "text"},
        extra_body={
            "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
            "stop_token_ids": [3], "include_stop_str_in_output": True, "prompt_logprobs": 1,
            "skip_special_tokens": False, "add_generation_prompt": True, "chat_template_kwargs": {"colour": "red"},
            "cache_salt": "mine", "return_token_ids": True, "bad_words": ["paper"], "allowed_token_ids": [5, 6, 8, 9],
            "request_id": "abc", "field_of_tomorrow": {"x": 1},
        },
    )  # fmt: skip
    assert answer.id == "chatcmpl-abc"
    prompt_token_ids = answer.model_extra["prompt_token_ids"]
    assert len(prompt_token_ids) == answer.usage.prompt_tokens
    assert len(answer.model_extra["prompt_logprobs"]) == len(prompt_token_ids)
    assert answer.model_extra["prompt_logprobs"][0] is None
    assert len(answer.choices[0].model_extra["token_ids"]) == answer.usage.completion_tokens


def test_second_turn_hits_the_prefix_cache(client):
    messages: list[Any] = [{"role": "user", "content": "one two three " * 20}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens < 16
    assert again.usage.prompt_tokens_details.cached_tokens > again.usage.prompt_tokens - 32
    salted = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body={"cache_salt": "other"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_continue_final_message_adds_no_new_turn(client, live):
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=2,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    )
    assert live.llm.renderer.tokenizer.decode(answer.model_extra["prompt_token_ids"]).endswith("Once upon a")


def test_content_parts_are_joined_text(client):
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    answer = client.chat.completions.create(model="tiny", messages=parts, max_tokens=1)
    assert answer.usage.prompt_tokens == chat(client, max_tokens=1).usage.prompt_tokens


@pytest.mark.parametrize("prompt", ["the quire", [5, 6, 7], ["one", "two words"], [[5], [6, 7]]])
def test_completions_take_all_four_kinds_of_prompt(client, prompt):
    arguments = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "n": 2, "seed": 1, **EXACT}
    num_prompts = len(prompt) if isinstance(prompt[0], (list, str)) and isinstance(prompt, list) else 1
    whole = client.completions.create(**arguments)
    assert [choice.index for choice in whole.choices] == list(range(2 * num_prompts))
    assert whole.usage.completion_tokens == 10 * num_prompts
    texts = [""] * (2 * num_prompts)
    *chunks, last = client.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert last.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_are_parallel_lists(client, stream):
    arguments = {"model": "tiny", "prompt": "blocks of paper", "max_tokens": 12, "logprobs": 2, "seed": 8, **EXACT}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **arguments)]
    else:
        chunks = client.completions.create(**arguments).choices
    text = "".join(choice.text for choice in chunks)
    rows = [
        row
        for choice in chunks
        for row in zip(
            choice.logprobs.text_offset,
            choice.logprobs.tokens,
            choice.logprobs.token_logprobs,
            choice.logprobs.top_logprobs,
            strict=True,
        )
    ]
    assert len(rows) == 12
    for offset, token, logprob, top in rows:
        assert logprob <= 0
        assert token in top
        if "�" not in token:
            assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(client, stream):
    prompt = "the quire gathers blocks"
    arguments = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        *choices, last = [chunk.choices[0] for chunk in client.completions.create(stream=True, **arguments)] or [None]
        choice = choices[0] if choices else last
        assert choice is not None
    else:
        answer = client.completions.create(**arguments)
        (choice,) = answer.choices
        assert answer.usage.completion_tokens == 0
    assert choice.text == prompt
    assert "".join(choice.logprobs.tokens) == prompt
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset[0] == 0


def test_echo_comes_before_the_text_and_shifts_offsets(client):
    arguments = {"model": "tiny", "prompt": [[5, 6], [7, 8, 9]], "max_tokens": 4, "seed": 1, "logprobs": 0, **EXACT}
    plain = client.completions.create(**arguments)
    echoed = client.completions.create(echo=True, **arguments)
    for before, after in zip(plain.choices, echoed.choices, strict=True):
        assert after.text.endswith(before.text)
        assert len(after.text) > len(before.text)
        assert len(after.logprobs.tokens) == len(before.logprobs.tokens) + (2 if before.index == 0 else 3)


def test_the_best_of_many(client):
    arguments = {"model": "tiny", "prompt": "x", "max_tokens": 3, "seed": 3, **EXACT}
    everyone = client.completions.create(n=6, logprobs=0, **arguments).choices
    ranked = sorted(everyone, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    best = client.completions.create(n=2, best_of=6, **arguments)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == 18
    for changes in ({"n": 4, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{**arguments, **changes})
        assert caught.value.param == "best_of"


def test_beam_search_finds_what_the_engine_finds(client, live):
    body = {"use_beam_search": True, "length_penalty": 0.5, "ignore_eos": True}
    answer = client.completions.create(model="tiny", prompt=[5, 6], n=3, max_tokens=4, extra_body=body)
    params = BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=0.5, ignore_eos=True)
    expected = live.call(live.llm.engine.beam_search([5, 6], params, max_logprobs=20))
    assert [choice.text for choice in answer.choices] == [each.text for each in expected.outputs]
    assert answer.usage.completion_tokens == 12
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, n=1, max_tokens=3, extra_body={**body, "best_of": 4}
    )
    assert (len(chat.choices), chat.choices[0].finish_reason, chat.usage.completion_tokens) == (1, "length", 12)


def test_a_search_whose_client_leaves_ends(live):
    params = BeamSearchParams(max_tokens=400, ignore_eos=True)

    async def leave():
        search = asyncio.ensure_future(live.llm.engine.beam_search([5, 6], params, max_logprobs=20))
        await asyncio.sleep(0.05)
        search.cancel()
        await asyncio.wait([search])
        return search.cancelled(), live.llm.engine.num_requests()

    assert live.call(leave()) == (True, 0)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stream": True}, "stream"), ({"logprobs": 1}, "logprobs"), ({"stop": "x"}, "stop"),
        ({"best_of": 33}, "best_of"), ({"n": 11}, "n"), ({"length_penalty": 1e9}, "length_penalty"),
        ({"repetition_penalty": 2.0}, "repetition_penalty"), ({"max_tokens": 100000}, "max_tokens"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)  # fmt: skip
def test_what_a_search_cannot_do_is_named(live, changes, param):
    body = {"prompt": "x", "use_beam_search": True, "max_tokens": 4, **changes}
    response = live.post("/v1/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"priority": 3}}, "priority"),
        ({"extra_body": {"allowed_token_ids": [5000]}}, "allowed_token_ids"),
        ({"extra_body": {"continue_final_message": True, "add_generation_prompt": True}}, "continue_final_message"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"4000": 1}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field_and_have_status_400_even_for_streams(client, arguments, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, stream=stream, **arguments)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_stream_options_need_a_stream(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"


def test_a_suffix_needs_tokens_for_it(client):
    with pytest.raises(openai.BadRequestError, match="no tokens for it") as caught:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert caught.value.param == "suffix"


def test_a_suffix_is_put_where_the_model_looks_for_it(make_live, tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "fim")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    server = make_live(folder=folder, engine={"vocab_size": 1100})
    body = {"prompt": ["def f(", "x"], "suffix": "return 3", "max_tokens": 2, "return_token_ids": True}
    answer = server.post("/v1/completions", body).json()
    encode = [tokenizer.encode(text).ids for text in ("def f(", "return 3", "x")]
    for choice, own in zip(answer["choices"], (encode[0], encode[2]), strict=True):
        assert choice["prompt_token_ids"] == [before, *own, before + 1, *encode[1], before + 2]
    for changes, param in (
        ({"prompt": [5]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "<fim_middle>"}, "suffix"),
    ):
        refused = server.post("/v1/completions", {**body, **changes})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_prompt_longer_than_the_context(client):
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.completions.create(model="tiny", prompt=[5] * 600)
    assert caught.value.code == "context_length_exceeded"


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-99", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
