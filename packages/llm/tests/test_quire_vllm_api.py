"""Programs written for vLLM's Python API: the same arguments in the same order, the same fields in what comes back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from quire import LLM, LoRARequest, RequestError, SamplingParams, TextPrompt, TokensPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "Quire is an engine that runs and serves language models, and it is made of small Python packages. " * 3
QUESTION = [{"role": "user", "content": "What is 12 + 34?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, num_threads=1) as made:
        yield made


def test_signatures_begin_as_in_vllm() -> None:
    generate, chat = (list(inspect.signature(each).parameters)[1:] for each in (LLM.generate, LLM.chat))
    assert generate == ["prompts", "sampling_params", "use_tqdm", "lora_request", "priority"]
    assert chat == [
        "messages", "sampling_params", "use_tqdm", "lora_request", "chat_template", "chat_template_content_format",
        "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs",
        "mm_processor_kwargs",
    ]  # fmt: skip


def test_positional_sampling_params() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.07, 8, ["stop"], [9], True, 20, 0, 1, 2)
    names = "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop"
    names += " stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs"
    found = [getattr(params, name) for name in names.split()]
    assert found == [2, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.07, 8, ("stop",), (9,), True, 20, 0, 1, 2]


def test_lists_and_single_texts() -> None:
    params = SamplingParams(stop="ab", stop_token_ids=[1], allowed_token_ids=[2, 3], bad_words=["x"])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("ab",), (1,))
    assert (params.allowed_token_ids, params.bad_words) == ((2, 3), ("x",))
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]


def test_lora_request_in_either_form() -> None:
    request = LoRARequest("sql", 3, "/adapters/sql")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")
    assert request == LoRARequest(lora_name="sql", lora_int_id=3, lora_path="/adapters/sql")
    for wrong in (("sql", "/adapters/sql"), ("", 1, "/adapters/sql"), ("sql", 1), ("sql", 0, "/adapters/sql")):
        with pytest.raises(RequestError, match="lora_"):
            LoRARequest(*wrong)  # type: ignore[arg-type]


def test_fields_of_outputs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    request = LoRARequest("demo-json", 1, next(info.path for info in llm.list_adapters() if info.name == "demo-json"))
    [output] = llm.generate([TEXT], params, False, request)
    assert output.prompt == TEXT
    assert output.prompt_token_ids == llm.get_tokenizer().encode(TEXT)
    assert output.finished
    assert output.lora_request is not None
    assert output.lora_request.lora_name == "demo-json"
    [completion] = output.outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert completion.finished()
    assert completion.lora_request == output.lora_request
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 6
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert 2 <= len(position) <= 3
        assert position[token_id].rank == 1, "greedy"
        assert position[token_id].decoded_token == llm.get_tokenizer().decode([token_id], skip_special_tokens=False)
        assert position[token_id].logprob == max(each.logprob for each in position.values()) <= 0
    total = sum(place[i].logprob for i, place in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    for token_id, place in zip(output.prompt_token_ids[1:], rest, strict=True):
        assert place is not None
        assert next(iter(place)) == token_id
        assert len(place) == (1 if place[token_id].rank == 1 else 2)
    stats = output.metrics
    assert stats is not None
    assert stats.num_generation_tokens == 6
    assert stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts
    assert stats.first_token_latency > 0


def test_no_logprobs_where_none_were_asked_for(llm: LLM) -> None:
    [output] = llm.generate(TEXT, GREEDY, False)
    assert output.prompt_logprobs is output.outputs[0].logprobs is output.outputs[0].lora_request is None


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    def cached(prompt: TextPrompt | TokensPrompt) -> int:
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    ids = llm.get_tokenizer().encode(TEXT)
    llm.reset_prefix_cache()
    assert cached({"prompt": TEXT, "cache_salt": "a"}) == 0
    assert cached({"prompt": TEXT, "cache_salt": "b"}) == 0
    assert cached(TextPrompt(prompt=TEXT)) == 0
    in_cache = cached({"prompt": TEXT, "cache_salt": "a"})
    assert in_cache > len(ids) // 2
    assert cached(TokensPrompt(prompt_token_ids=ids, cache_salt="b")) == in_cache
    batch = [{"prompt": TEXT, "cache_salt": salt} for salt in ("a", "c")]
    assert [output.num_cached_tokens for output in llm.generate(batch, GREEDY, use_tqdm=False)] == [in_cache, 0]


def test_ids_with_their_text(llm: LLM) -> None:
    [output] = llm.generate(TokensPrompt(prompt_token_ids=[5, 6], prompt="five six"), GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("five six", [5, 6])


def test_chat_in_positional_form(llm: LLM) -> None:
    [plain] = llm.chat(QUESTION, GREEDY, False)
    [same] = llm.chat([QUESTION], GREEDY, False, None, None, "auto", True, False, None, None)
    assert same.outputs[0].token_ids == plain.outputs[0].token_ids
    [own] = llm.chat(QUESTION, GREEDY, False, None, "{{ messages[0]['content'] }}")
    assert own.prompt == "What is 12 + 34?"
    with pytest.raises(RequestError, match="chat_template_content_format must be 'auto', got 'openai'"):
        llm.chat(QUESTION, GREEDY, False, None, None, "openai")
    with pytest.raises(RequestError, match=r"prompts\[1\]: messages\[0\]"):
        llm.chat([QUESTION, [{"role": "user", "content": 5}]], GREEDY, False)


def test_priorities_for_each(llm: LLM) -> None:
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 0])) == 2
    with pytest.raises(RequestError, match="2 prompts came with 1 values of priority"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1])
    with pytest.raises(RequestError, match="2 prompts came with 3 values of sampling_params"):
        llm.generate(["a", "b"], [GREEDY] * 3, use_tqdm=False)


def test_bad_words_are_kept_out(llm: LLM) -> None:
    [plain] = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20), False)
    word = plain.outputs[0].text.split()[0]
    [other] = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20, bad_words=(word,)), False)
    assert word not in other.outputs[0].text


def test_defaults_and_a_bar_of_the_callers(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    seen: list[object] = []

    class Bar:
        def __init__(self, **arguments: object) -> None:
            seen.append(arguments["total"])

        def update(self, count: int) -> None:
            seen.append(count)

        def close(self) -> None:
            seen.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert seen == [2, 1, 1, "closed"]


def test_conversations_are_kept_and_answered_as_chat_does(llm: LLM) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("What is your name?", "Spell cat.")]
    unfinished = [*talks[0], {"role": "assistant", "content": "My name"}]
    names = llm.enqueue_chat(talks, GREEDY)
    more = llm.enqueue_chat(unfinished, GREEDY, continue_final_message=True)
    with pytest.raises(RequestError, match=r"prompt 1 of 2|prompts\[1\]|1"):
        llm.enqueue_chat([talks[0], [{"role": "nobody", "content": 5}]], GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [each.request_id for each in outputs] == [*names, *more]
    expected = llm.chat(talks, GREEDY, use_tqdm=False)
    expected += llm.chat(unfinished, GREEDY, use_tqdm=False, continue_final_message=True)
    assert [each.outputs[0].text for each in outputs] == [each.outputs[0].text for each in expected]


def test_requests_are_kept_and_run_together(llm: LLM) -> None:
    assert llm.wait_for_completion(use_tqdm=False) == []
    first = llm.enqueue([TEXT, "One"], [GREEDY, SamplingParams(temperature=0, max_tokens=2)])
    second = llm.enqueue({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    with pytest.raises(RequestError, match="logprobs"):
        llm.enqueue(["x", "y"], [GREEDY, SamplingParams(logprobs=900)])
    assert len({*first, *second}) == 3
    llm.sleep(0)
    with pytest.raises(RequestError, match="sleeps"):
        llm.wait_for_completion(use_tqdm=False)
    llm.wake_up(["weights"])
    assert llm.engine.core.sleep_level == 0
    with pytest.raises(RequestError, match="tags must be some of weights, kv_cache, scheduling, got 'all'"):
        llm.wake_up(["all"])
    llm.wake_up(["weights", "kv_cache"])
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [each.request_id for each in outputs] == [*first, *second]
    expected = llm.generate([TEXT, {"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == [
        each.outputs[0].token_ids for each in expected
    ]
    assert len(outputs[1].outputs[0].token_ids) == 2
    assert llm.wait_for_completion(use_tqdm=False) == []
