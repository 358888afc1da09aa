"""Constrained outputs end to end, on the embedded demo model and on a random one: hot sampling, crowds, little memory.

The oracles are jsonschema and `re`. A random model chooses nearly at random among what the grammar allows, the demo
model has opinions of its own; both must end in a valid output, and the same one however they were batched.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from quire_demo_model import checkpoint_path
from quire_interfaces import FinishReason, ReasoningSpan
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.schemas import random_schema

REGEX = r"[0-9]{3}-[a-z]{2,5}( (yes|no)){0,2}"
CHOICES = ("positive", "negative", "neither of the two")
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "number_of_books": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["first_name", "number_of_books"],
    "additionalProperties": False,
}
UNEVALUATED = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "unevaluatedProperties": False}
"""What is left over depends on the alternative: no grammar follows that."""
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"async_scheduling": False},
    "asynchronous": {"async_scheduling": True},
    "one token blocks, few rows": {"block_size": 1, "max_num_seqs": 3},
    "preemptions": {"block_size": 2, "num_gpu_blocks_override": 200, "max_model_len": 320, "max_num_seqs": 16},
    "small chunks": {"max_num_batched_tokens": 5},
    "n-gram drafts": {"speculative_method": "ngram", "speculative_adaptive": False, "num_speculative_tokens": 3},
    "every token sampled": {"structured_output_max_jump_tokens": 0},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


def make(folder: Path | None, **settings: Any) -> LLM:
    values = {"num_threads": 1, "num_gpu_blocks_override": 1024, "max_model_len": 512, "max_num_seqs": 32, **settings}
    return LLM(folder, **values)


@pytest.fixture(scope="module", params=["demo", "tiny"])
def llm(request: pytest.FixtureRequest, tiny: Path) -> Iterator[LLM]:
    with make(Path(checkpoint_path()) if request.param == "demo" else tiny) as made:
        yield made


def run(llm: LLM, constraints: list[StructuredOutputsParams | None], **params: Any) -> list[RequestOutput]:
    values = {"temperature": 1.5, "max_tokens": 400, **params}
    all_params = [
        SamplingParams(seed=number, structured_outputs=each, **values) for number, each in enumerate(constraints)
    ]
    prompts = [f"the quire gathers {'sheets ' * (number % 7)}" for number in range(len(constraints))]
    return llm.generate(prompts, all_params, use_tqdm=False)


def finished(output: RequestOutput) -> str:
    """The text, which must have ended by itself."""
    [completion] = output.outputs
    assert completion.finish_reason == FinishReason.STOP, (completion.finish_reason, completion.error, completion.text)
    return completion.text


def mixed(number: int) -> StructuredOutputsParams | None:
    kinds = [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex=REGEX),
        StructuredOutputsParams(choice=CHOICES),
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        StructuredOutputsParams(grammar='start: "(" list ")"\nlist: item ("," item){1,4}\nitem: /[a-z]{1,3}/'),
        None,
    ]
    return kinds[number % len(kinds)]


def check(constraint: StructuredOutputsParams | None, output: RequestOutput) -> None:
    if constraint is None:
        assert output.outputs[0].error is None
        return
    text = finished(output)
    if constraint.kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
        assert not constraint.disable_any_whitespace or '":' in text.replace('": ', "!")
    elif constraint.kind == "choice":
        assert text in CHOICES
    else:
        assert re.fullmatch(REGEX if constraint.kind == "regex" else r"\([a-z]{1,3}(,[a-z]{1,3}){1,4}\)", text), text


def test_random_schemas_thirty_two_at_once(llm: LLM) -> None:
    schemas = [random_schema(number) for number in range(64)]
    outputs = run(llm, [StructuredOutputsParams(json=schema) for schema in schemas])
    for schema, output in zip(schemas, outputs, strict=True):
        # A schema with references may be long: what did not end is not judged, but nearly all of them end.
        if output.outputs[0].finish_reason == FinishReason.STOP:
            jsonschema.Draft202012Validator(schema).validate(json.loads(output.outputs[0].text))
    num_ended = sum(output.outputs[0].finish_reason == FinishReason.STOP for output in outputs)
    assert num_ended >= 58, num_ended
    assert not any(output.outputs[0].error for output in outputs)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_same_valid_outputs_however_they_are_run(tiny: Path, settings: dict[str, Any]) -> None:
    constraints = [mixed(number) for number in range(24)]
    with make(tiny, max_num_seqs=32) as plain:
        expected = run(plain, constraints, logprobs=1, max_tokens=120)
    with make(tiny, **settings) as other:
        outputs = run(other, constraints, logprobs=1, max_tokens=120)
        stats = other.stats()
    for constraint, output, reference in zip(constraints, outputs, expected, strict=True):
        if constraint is not None and output.outputs[0].finish_reason == FinishReason.STOP:
            check(constraint, output)
        if settings != SETTINGS["every token sampled"]:
            assert output.outputs[0].token_ids == reference.outputs[0].token_ids
            sampled = [next(iter(position)) for position in output.outputs[0].logprobs or []]
            assert sampled == output.outputs[0].token_ids, "every token has its log probability, forced ones too"
    assert stats.num_grammar_queries_total == 20
    assert stats.num_grammar_hits_total == 15
    if settings == SETTINGS["preemptions"]:
        assert stats.num_preemptions_total > 0


def test_every_kind_ends_well(llm: LLM) -> None:
    constraints = [mixed(number) for number in range(36)]
    for constraint, output in zip(constraints, run(llm, constraints), strict=True):
        check(constraint, output)


def test_fixed_text_takes_fewer_steps(tiny: Path) -> None:
    constraint = StructuredOutputsParams(json={"const": {"a_long_name_of_a_property": "and its value"}})
    steps = []
    for jump in (32, 0):
        with make(tiny, structured_output_max_jump_tokens=jump, async_scheduling=False) as llm:
            seen: list[int] = []
            real_step = llm.engine.core.step

            def counted(real_step: Any = real_step, seen: list[int] = seen) -> Any:
                seen.append(1)
                return real_step()

            llm.engine.core.step = counted  # type: ignore[method-assign]
            [output] = run(llm, [constraint])
            assert json.loads(finished(output)) == {"a_long_name_of_a_property": "and its value"}
            steps.append(len(seen))
    assert steps[0] < steps[1] / 2, steps


def test_several_completions_and_greedy(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=3, structured_outputs=StructuredOutputsParams(regex=REGEX))
    [output] = llm.generate("the", params, use_tqdm=False)
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch(REGEX, text) for text in texts)
    assert len(set(texts)) > 1
    greedy = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=CHOICES), ignore_eos=True)
    [output] = llm.generate("the", greedy, use_tqdm=False)
    assert finished(output) in CHOICES


def test_thinking_comes_first(llm: LLM) -> None:
    close = tuple(llm.tokenizer.encode(". ", add_special_tokens=False))[:1]
    span = ReasoningSpan(end_token_ids=close, is_open=True)
    constraint = StructuredOutputsParams(choice=CHOICES, reasoning=span)
    outputs = run(llm, [constraint] * 16, max_tokens=400, logit_bias={close[0]: 6.0})
    for output in outputs:
        token_ids = output.outputs[0].token_ids
        if output.outputs[0].finish_reason == FinishReason.STOP:
            answer = token_ids[token_ids.index(close[0]) + 1 : -1]
            assert llm.tokenizer.decode(answer) in CHOICES
        else:
            assert close[0] not in token_ids
    assert any(output.outputs[0].finish_reason == FinishReason.STOP for output in outputs)


def test_the_prefix_cache_serves_constrained_requests(llm: LLM) -> None:
    prompt = "a shared beginning of some length, " * 4
    params = SamplingParams(temperature=1.5, seed=5, structured_outputs=StructuredOutputsParams(regex=REGEX))
    first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens > 0
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (StructuredOutputsParams(regex="(a"), "unclosed group"),
        (StructuredOutputsParams(json=UNEVALUATED), "unevaluatedProperties"),
        (StructuredOutputsParams(json={"enum": []}), "Unsatisfiable"),
        (StructuredOutputsParams(json="{"), "not JSON"),
        (StructuredOutputsParams(grammar="start: nothing"), "nothing"),
        (StructuredOutputsParams(regex="a" * (2 << 20)), "at most"),
    ],
)
def test_a_wrong_constraint_is_refused_before_anything_runs(
    llm: LLM, constraint: StructuredOutputsParams, text: str
) -> None:
    with pytest.raises(RequestError, match=text) as error:
        run(llm, [None, constraint])
    assert str(error.value.param).startswith("structured_outputs.")
    assert not llm.engine.has_unfinished_requests()
    assert llm.stats().num_waiting == llm.stats().num_running == 0


def test_what_excludes_every_token_fails_alone(llm: LLM) -> None:
    digits = [i for i in range(llm.engine.info.vocab_size) if llm.tokenizer.token_text(i).isdigit()]
    impossible = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"),
        bad_words_token_ids=tuple((i,) for i in digits),
        max_tokens=20,
    )
    good = SamplingParams(temperature=1.5, structured_outputs=StructuredOutputsParams(regex=REGEX), max_tokens=60)
    outputs = llm.generate(["a", "b", "c"], [good, impossible, good], use_tqdm=False)
    assert outputs[1].outputs[0].finish_reason == FinishReason.ERROR
    assert "structured_outputs" in str(outputs[1].outputs[0].error)
    for output in (outputs[0], outputs[2]):
        assert re.fullmatch(REGEX, finished(output))


def test_a_constraint_that_takes_too_long_is_refused_and_there_the_next_time(tiny: Path) -> None:
    words = "|".join(f"word{number * 7919}" for number in range(19_000))
    with make(tiny, structured_output_timeout=0.05) as llm:
        while sum(llm.stats().grammar_compile_counts_total) < 1:
            with contextlib.suppress(RequestError):
                run(llm, [StructuredOutputsParams(regex="a")])  # the vocabulary has been read then
        with pytest.raises(RequestError, match=r"within 0\.05 s; the largest part is") as error:
            run(llm, [StructuredOutputsParams(regex=words)])
        assert error.value.code == "grammar_timeout"
        deadline_s = time.monotonic() + 20
        while llm.stats().grammar_compile_counts_total and sum(llm.stats().grammar_compile_counts_total) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        [output] = run(llm, [StructuredOutputsParams(regex=words)])
        assert finished(output).startswith("word")


def test_the_second_backend_serves_the_same_engine(tiny: Path) -> None:
    with make(tiny, structured_output_backend="outlines") as llm:
        constraints = [mixed(number) for number in (1, 2, 5)] * 4
        for constraint, output in zip(constraints, run(llm, constraints), strict=True):
            check(constraint, output)
        schema = {"type": "object", "properties": {"a": {"enum": ["x", 12]}}, "required": ["a"]}
        [output] = run(llm, [StructuredOutputsParams(json=schema)])
        jsonschema.validate(json.loads(finished(output)), schema)
        with pytest.raises(RequestError, match="not supported by the backend 'outlines'"):
            run(llm, [mixed(4)])
        with pytest.raises(RequestError, match="does not follow: maximum, minimum"):
            run(llm, [mixed(0)])


def test_engines_in_several_threads_share_nothing(tiny: Path) -> None:
    def texts(seed: int) -> list[str]:
        with make(tiny, max_num_seqs=4) as llm:
            return [finished(output) for output in run(llm, [StructuredOutputsParams(regex=REGEX)] * 4)]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(texts, range(2))
    assert first == second
