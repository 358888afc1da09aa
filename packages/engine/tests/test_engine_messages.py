"""Messages survive the way between processes, and nothing else gets through."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineProgress,
    EngineReady,
    EngineStopped,
    Outputs,
    RequestRejected,
    Shutdown,
    UtilityCall,
    UtilityReply,
    decode_client_message,
    decode_core_message,
    encode_message,
    merge_outputs,
    pack_token_ids,
    unpack_token_ids,
)
from quire_interfaces import (
    ContextLengthError,
    EngineCoreOutput,
    FinishReason,
    OutputKind,
    OverloadedError,
    PooledOutput,
    PoolingParams,
    RequestError,
    RequestFailure,
    RequestOptions,
    SamplingParams,
    SchedulerStats,
    TokenExperts,
    TokenLogprobs,
)

ids = st.lists(st.integers(0, 2**32 - 1), max_size=50)
texts = st.text(max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 10**6), min_size=1, max_size=4).map(tuple),
    bad_words_token_ids=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), max_size=3).map(
        tuple
    ),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    extra_args=st.none() | st.dictionaries(texts, st.integers(-5, 5) | texts | st.booleans(), max_size=3),
)
logprobs = st.builds(
    TokenLogprobs, st.lists(st.integers(0, 99), max_size=3), st.lists(floats, max_size=3), st.integers(1, 9)
)
core_outputs = st.builds(
    EngineCoreOutput,
    texts,
    ids,
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.integers(0, 99),
    st.none() | st.lists(logprobs, max_size=3),
    st.none() | st.lists(logprobs, max_size=3),
    st.integers(0, 99),
    st.none() | st.builds(RequestFailure, texts, st.none() | texts, st.none() | texts, st.none() | texts),
    st.none() | st.builds(PooledOutput, st.binary(max_size=9), st.lists(st.integers(0, 9), max_size=2).map(tuple)),
    st.none()
    | st.dictionaries(texts, st.integers(-5, 5) | texts | st.lists(st.integers(0, 99), max_size=3), max_size=3),
    st.none()
    | st.builds(
        TokenExperts,
        st.integers(0, 9999),
        st.integers(1, 9),
        st.integers(1, 9),
        st.sampled_from(["uint8", "uint16"]),
        st.binary(max_size=9),
    ),
)
client_messages = (
    st.builds(
        AddRequest,
        request_id=texts,
        prompt=ids.map(pack_token_ids),
        sampling_params=params,
        seed=st.integers(-(2**63), 2**63 - 1),
        pooling_params=st.none()
        | st.builds(
            PoolingParams,
            task=st.sampled_from(["embed", "token_embed", None]),
            dimensions=st.none() | st.integers(1, 999),
            returned_token_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple),
            extra_kwargs=st.none() | st.dictionaries(texts, texts, max_size=2),
        ),
        max_tokens=st.integers(1, 10**6),
        stop_token_ids=st.frozensets(st.integers(0, 10**6), max_size=5),
        output_token_ids=ids,
        options=st.builds(
            RequestOptions,
            priority=st.integers(-100, 100),
            cache_salt=st.none() | texts,
            adapter=st.none() | texts,
            tenant=st.none() | texts,
            output_kind=st.none() | st.sampled_from(OutputKind),
        ),
        cache_extra_keys=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), texts), max_size=3).map(tuple),
        arrival_time_s=floats,
    )
    | st.builds(AbortRequests, request_ids=st.lists(texts, max_size=5))
    | st.builds(
        UtilityCall, call_id=st.integers(0, 10**9), method=texts, arguments=st.dictionaries(texts, st.booleans())
    )
    | st.builds(Shutdown, drain_s=floats)
)
core_messages = (
    st.builds(
        Outputs,
        outputs=st.lists(core_outputs, max_size=4),
        started=st.lists(texts, max_size=3),
        started_time_s=floats,
        step_tokens=st.lists(st.integers(1, 9999), max_size=3),
        stats=st.none() | st.builds(SchedulerStats, num_running=st.integers(0, 99), kv_cache_usage=st.floats(0, 1)),
        rejected=st.lists(
            st.builds(RequestRejected, request_id=texts, kind=st.just("request"), message=texts), max_size=2
        ),
    )
    | st.builds(UtilityReply, call_id=st.integers(0, 99), result=st.none() | texts, error=st.none() | texts)
    | st.builds(EngineProgress, stage=texts, fraction=floats)
    | st.builds(EngineFailed, cause=texts, remedy=texts, is_wrong_setting=st.booleans())
    | st.builds(EngineStopped, num_aborted=st.integers(0, 99))
    | st.just(
        EngineReady(info=EngineInfo(max_model_len=9, vocab_size=7, memory_bytes={"weights": 2**40}, extra={"a": [1]}))
    )
)


@given(client_messages)
def test_client_messages_survive(message: AddRequest | AbortRequests | UtilityCall | Shutdown) -> None:
    assert decode_client_message(encode_message(message)) == message


@given(core_messages)
@settings(max_examples=40)  # each takes long to draw
def test_core_messages_survive(message: Outputs) -> None:
    assert decode_core_message(encode_message(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for decode in (decode_client_message, decode_core_message):
        with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
            decode(data)


def test_each_side_refuses_the_other_sides_messages() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_core_message(encode_message(Shutdown(drain_s=1.0)))
    with pytest.raises(msgspec.ValidationError):
        decode_client_message(encode_message(EngineStopped()))


@given(ids)
def test_token_ids_survive(token_ids: list[int]) -> None:
    packed = pack_token_ids(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_token_ids(packed) == token_ids


@pytest.mark.parametrize("token_ids", [[-1], [2**32], [1.5], ["a"], [None]])
def test_what_is_no_token_id_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(RequestError, match="prompt token ids"):
        pack_token_ids(token_ids)


def test_add_request_becomes_a_request() -> None:
    message = AddRequest(
        request_id="a",
        prompt=pack_token_ids([5, 6]),
        sampling_params=SamplingParams(prompt_logprobs=1, logprobs=2),
        seed=9,
        max_tokens=4,
        stop_token_ids=frozenset({1}),
        options=RequestOptions(priority=3, cache_salt="s", adapter="a", tenant="t"),
    )
    request = message.to_request()
    assert request.prompt_token_ids == [5, 6]
    assert (request.seed, request.max_tokens, request.stop_token_ids) == (9, 4, {1})
    assert request.options is message.options
    assert not request.reads_prefix_cache
    resumed = message.resumed([7, 8])
    assert resumed.to_request().output_token_ids == [7, 8]
    assert resumed.to_request().reads_prefix_cache
    assert resumed.sampling_params.logprobs == 2
    assert message.resumed([]).sampling_params.prompt_logprobs == 1


def test_rejections_keep_their_error() -> None:
    error = RequestRejected.from_error("r", OverloadedError("full", retry_after_s=7.0)).to_error()
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 7.0
    error = RequestRejected.from_error("r", ContextLengthError("too long")).to_error()
    assert isinstance(error, ContextLengthError)
    assert (str(error), error.param, error.code) == ("too long", "prompt", "context_length_exceeded")
    sizes = {"num_prompt_tokens": 9, "max_model_len": 8, "max_tokens": 3}
    given = ContextLengthError("no room", param="max_tokens", code="kv_cache_too_small", **sizes)
    error = RequestRejected.from_error("r", given).to_error()
    assert vars(error) == vars(given)
    error = RequestRejected.from_error("r", RequestError("bad", param="n")).to_error()
    assert type(error) is RequestError


@given(st.lists(core_outputs, min_size=1, max_size=5))
def test_merged_outputs_lose_nothing(outputs: list[EngineCoreOutput]) -> None:
    tokens = [token for each in outputs for token in each.new_token_ids]
    positions = [position for each in outputs for position in each.logprobs or []]
    last = outputs[-1]
    merged = outputs[0]
    untouched = list(outputs[0].new_token_ids)
    first_list = outputs[0].new_token_ids
    for each in outputs[1:]:
        merged = merge_outputs(merged, each)
    assert merged.new_token_ids == tokens
    assert (merged.logprobs or []) == positions
    assert (merged.finish_reason, merged.stop_token_id, merged.failure) == (
        last.finish_reason,
        last.stop_token_id,
        last.failure,
    )
    assert first_list == untouched
