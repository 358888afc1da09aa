"""The gRPC door with real clients: tokens as over HTTP, keys, status codes, cancelling, health, the end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import signal
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_engine import KVEventPublisher, KVEventsConfig
from quire_interfaces import BlockRemoved, BlockStored, ConfigError, FullAttentionSpec, KVCacheEvent, KVCacheGroup
from quire_server.config import ServerConfig

grpc = pytest.importorskip("grpc", reason="gRPC was NOT tried: its libraries are not installed (extra `grpc`)")
pb = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2", reason="smg-grpc-proto is not installed")
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402  # there are none without the extra
from smg_grpc_proto import vllm_engine_pb2_grpc  # noqa: E402
from smg_grpc_proto.generated import common_pb2  # noqa: E402

from quire_server.grpc_service.server import check_grpc, start_grpc  # noqa: E402

Code = grpc.StatusCode
PROMPT = [5, 6, 7]


class Door:
    """A server with both doors, and clients of the gRPC one."""

    def __init__(self, http: Any, folder: Path, **config: Any) -> None:
        self.http = http
        self.grpc = http.call(start_grpc(http.context))
        self._run = asyncio.run_coroutine_threadsafe(self.grpc.run(), http._loop)
        self.channel = grpc.insecure_channel(self.grpc.addresses["grpc_uds"])
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)

    def stop(self) -> None:
        self.channel.close()
        self._run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.http.call(self.grpc._server.wait_for_termination())

    def generate(self, prompt: list[int] | str = PROMPT, *, stream: bool = False, name: str = "", **fields: Any) -> Any:
        """The messages of an answer."""
        given = {"text": prompt} if isinstance(prompt, str) else {"tokenized": pb.TokenizedInput(input_ids=prompt)}
        params = pb.SamplingParams(**{"max_tokens": 6, "seed": 3, **fields})
        return self.stub.Generate(pb.GenerateRequest(request_id=name, sampling_params=params, stream=stream, **given))


@pytest.fixture(scope="module")
def make_door(make_live: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    doors: list[Door] = []

    def make(engine: dict[str, Any] | None = None, kv_events: dict[str, Any] | None = None, **config: Any) -> Door:
        folder = tmp_path_factory.mktemp("grpc")
        settings = {"grpc_uds": str(folder / "quire.sock"), "grpc_port": 0, **config}
        doors.append(
            Door(
                make_live(engine=engine, config={"kv_events_config": kv_events} if kv_events else None, **settings),
                folder,
            )
        )
        return doors[-1]

    yield make
    for door in doors:
        door.stop()


@pytest.fixture(scope="module")
def door(make_door: Any) -> Door:
    return make_door(engine={"pooling_tasks": ["embed"]})


def test_tokens_are_those_of_http(door: Door) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "return_token_ids": True}
    (choice,) = door.http.post("/v1/completions", asked).json()["choices"]
    (message,) = door.generate()
    answer = message.complete
    assert list(answer.output_ids) == choice["token_ids"]
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == ("length", 3, 6)
    over_port = grpc.insecure_channel(door.grpc.addresses["grpc_port"])
    with over_port:
        request = pb.GenerateRequest(text="Once", sampling_params=pb.SamplingParams(max_tokens=6, seed=3))
        (of_text,) = vllm_engine_pb2_grpc.VllmEngineStub(over_port).Generate(request)
    (expected,) = door.http.post("/v1/completions", {**asked, "prompt": "Once"}).json()["choices"]
    assert list(of_text.complete.output_ids) == expected["token_ids"]


def test_a_stream_has_chunks_and_an_end_for_each_completion(door: Door) -> None:
    whole = {each.complete.index: list(each.complete.output_ids) for each in door.generate(n=2)}
    messages = list(door.generate(n=2, stream=True))
    made: dict[int, list[int]] = {0: [], 1: []}
    for message in messages:
        if message.HasField("chunk"):
            made[message.chunk.index] += message.chunk.token_ids
            assert message.chunk.completion_tokens == len(made[message.chunk.index])
    assert made == whole
    ends = [each.complete for each in messages if each.HasField("complete")]
    assert {each.index: list(each.output_ids) for each in ends} == whole
    assert len(ends) == 2


def test_log_probabilities_and_stops(door: Door) -> None:
    (message,) = door.generate(logprobs=2, prompt_logprobs=1, temperature=0.0, max_tokens=2)
    answer = message.complete
    assert list(answer.output_logprobs.token_ids) == list(answer.output_ids)
    tops = answer.output_logprobs.top_logprobs
    assert [top.token_ids[0] for top in tops] == list(answer.output_ids)  # greedy
    assert [len(top.values) for top in tops] == [2, 2]
    assert tops[0].values[0] == answer.output_logprobs.token_logprobs[0] < 0
    assert list(answer.input_logprobs.token_ids) == PROMPT
    assert [each.HasField("value") for each in answer.input_logprobs.token_logprobs] == [False, True, True]
    first = answer.output_ids[0]
    (stopped,) = door.generate(temperature=0.0, stop_token_ids=[first])
    assert (stopped.complete.finish_reason, stopped.complete.matched_token_id) == ("stop", first)
    assert list(stopped.complete.output_ids) == [first]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"regex": "("}, None),
        ({"logit_bias": {5: 300.0}}, "logit_bias"),
    ],
)
def test_a_wrong_field_is_an_invalid_argument(door: Door, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(door.generate(**fields))
    assert refused.value.code() is Code.INVALID_ARGUMENT
    if param is not None:
        assert param in refused.value.details()
        assert dict(refused.value.trailing_metadata())["error-param"] == param


def test_other_refusals(door: Door) -> None:
    cases = [
        (pb.GenerateRequest(), Code.INVALID_ARGUMENT, "no input"),
        (pb.GenerateRequest(text="x", kv_transfer_params_json="{"), Code.INVALID_ARGUMENT, "not JSON"),
        (pb.GenerateRequest(text="x", media_refs=pb.MediaRefs()), Code.UNIMPLEMENTED, "media"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1] * 600)), Code.INVALID_ARGUMENT, "512"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[99_999])), Code.INVALID_ARGUMENT, "99999"),
    ]
    for request, code, words in cases:
        with pytest.raises(grpc.RpcError, match=words) as refused:
            list(door.stub.Generate(request))
        assert refused.value.code() is code
    with pytest.raises(grpc.RpcError, match="administrator") as refused:
        door.stub.FlushCache(common_pb2.FlushCacheRequest())
    assert refused.value.code() is Code.PERMISSION_DENIED
    for call, empty in (
        (door.stub.StartProfile, common_pb2.StartProfileRequest()),
        (door.stub.StopProfile, common_pb2.StopProfileRequest()),
    ):
        with pytest.raises(grpc.RpcError, match="administrator") as refused:
            call(empty)
        assert refused.value.code() is Code.PERMISSION_DENIED


def test_a_client_that_cancels_ends_its_request(door: Door) -> None:
    answer = door.generate(stream=True, max_tokens=500, ignore_eos=True)
    next(answer)
    assert door.http.llm.engine.num_requests() == 1
    answer.cancel()
    door.http.wait_idle()
    assert answer.code() is Code.CANCELLED


def test_a_request_is_aborted_by_its_id(door: Door) -> None:
    answer = door.generate(stream=True, max_tokens=500, ignore_eos=True, name="mine")
    next(answer)
    door.stub.Abort(pb.AbortRequest(request_ids=["mine", "unknown"]))
    *_, last = answer
    assert last.complete.finish_reason == "abort"
    assert 0 < last.complete.completion_tokens < 500
    door.http.wait_idle()


def test_vectors_are_those_of_http(door: Door) -> None:
    (expected,) = door.http.post("/v1/embeddings", {"input": PROMPT}).json()["data"]
    answer = door.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT)))
    assert list(answer.embedding) == pytest.approx(expected["embedding"], rel=1e-6)
    assert (answer.prompt_tokens, answer.embedding_dim) == (3, len(expected["embedding"]))


def test_what_is_served(door: Door) -> None:
    model = door.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.max_context_length) == ("tiny", 1024, 512)
    assert model.is_generation
    server = door.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.block_size == door.http.llm.engine.info.block_size
    (load,) = door.stub.GetLoads(pb.GetLoadsRequest()).loads
    assert load.max_total_num_tokens == 512 * server.block_size
    pieces = list(door.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    archive = b"".join(each.data for each in pieces)
    assert hashlib.sha256(archive).hexdigest() == pieces[-1].sha256
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert {"tokenizer.json", "config.json"} <= set(files.namelist())
        assert not any(name.endswith(".safetensors") for name in files.namelist())


def test_health_is_that_of_ready(door: Door) -> None:
    health = health_pb2_grpc.HealthStub(door.channel)
    watched = health.Watch(health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine"))
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    listed = health.List(health_pb2.HealthListRequest()).statuses
    assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
        ("", "vllm.grpc.engine.VllmEngine"), health_pb2.HealthCheckResponse.SERVING
    )
    assert door.stub.HealthCheck(pb.HealthCheckRequest()).healthy
    with pytest.raises(grpc.RpcError, match="no service") as refused:
        health.Check(health_pb2.HealthCheckRequest(service="else"))
    assert refused.value.code() is Code.NOT_FOUND
    door.http.context.state.is_asleep = True
    try:
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "sleeps" in door.stub.HealthCheck(pb.HealthCheckRequest()).message
        with pytest.raises(grpc.RpcError, match="sleeps") as refused:
            list(door.generate())
        assert refused.value.code() is Code.UNAVAILABLE
    finally:
        door.http.context.state.is_asleep = False
    watched.cancel()


def test_keys_and_their_limits(make_door: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("few: {key: key-few, requests_per_minute: 1}\nroot: {key: key-root, admin: true}\n")
    keys.chmod(0o600)
    stub = make_door(api_key_file=str(keys)).stub
    request = pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(max_tokens=1))
    for metadata, words in ((), "missing"), ((("authorization", "Bearer nonsense"),), "wrong"):
        with pytest.raises(grpc.RpcError, match=words) as refused:
            list(stub.Generate(request, metadata=metadata))
        assert refused.value.code() is Code.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as refused:
        stub.GetModelInfo(pb.GetModelInfoRequest())
    assert refused.value.code() is Code.UNAUTHENTICATED
    assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
    few, root = (("authorization", "Bearer key-few"),), (("x-api-key", "key-root"),)
    assert len(list(stub.Generate(request, metadata=few))) == 1
    with pytest.raises(grpc.RpcError, match="requests per minute") as refused:
        list(stub.Generate(request, metadata=few))
    assert refused.value.code() is Code.RESOURCE_EXHAUSTED
    told = dict(refused.value.trailing_metadata())
    assert 0 < int(told["retry-after"]) <= 60
    assert int(told["grpc-retry-pushback-ms"]) == 1000 * int(told["retry-after"])
    with pytest.raises(grpc.RpcError) as refused:
        stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=few)
    assert refused.value.code() is Code.PERMISSION_DENIED
    assert stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=root).success
    with pytest.raises(grpc.RpcError, match="leave num_steps out") as refused:
        stub.StartProfile(common_pb2.StartProfileRequest(num_steps=3), metadata=root)
    assert refused.value.code() is Code.INVALID_ARGUMENT
    assert stub.StartProfile(common_pb2.StartProfileRequest(), metadata=root).success
    stopped = stub.StopProfile(common_pb2.StopProfileRequest(), metadata=root)
    assert stopped.success
    assert stopped.message.split("\n") == ["rank", "method", "args", "kwargs"] * 2  # of the fake engine's two ranks


def test_calls_are_logged_and_traced(make_live: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exporting = pytest.importorskip("opentelemetry.sdk.trace.export", reason="traces were NOT tried: no extra `otel`")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from quire_server.tracing import SpanSender

    sender, kept = SpanSender("http://127.0.0.1:9"), InMemorySpanExporter()
    sender._processor.shutdown()  # nothing goes to a collector
    sender._provider, sender._processor = TracerProvider(shutdown_on_exit=False), exporting.SimpleSpanProcessor(kept)
    sender._provider.add_span_processor(sender._processor)
    sender.tracer = sender._provider.get_tracer("quire")
    http = make_live(access_log=True, grpc_uds=str(tmp_path / "quire.sock"))
    http.context.state.span_sender = sender
    door = Door(http, tmp_path)
    caplog.set_level("INFO", "quire_server.access")
    try:
        trace = "0af7651916cd43dd8448eb211c80319c"
        request = pb.GenerateRequest(
            request_id="seen",
            tokenized=pb.TokenizedInput(input_ids=PROMPT),
            sampling_params=pb.SamplingParams(max_tokens=6),
        )
        list(door.stub.Generate(request, metadata=[("traceparent", f"00-{trace}-b7ad6b7169203331-01")]))
        with pytest.raises(grpc.RpcError):
            list(door.generate(temperature=-1.0))
        door.stub.HealthCheck(pb.HealthCheckRequest())
    finally:
        door.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "quire_server.access"]
    path = "/vllm.grpc.engine.VllmEngine/Generate"
    assert len(lines) == 2
    assert lines[0].startswith(f"POST {path} 200 ")
    assert lines[0].endswith(" ms, 3 prompt tokens, 6 generation tokens")
    assert lines[1].startswith(f"POST {path} 400 ")
    spans = {span.name: span for span in kept.get_finished_spans() if f"{span.context.trace_id:032x}" == trace}
    assert spans.keys() == {f"POST {path}", "text_completion tiny", "queue", "prefill", "decode"}
    assert spans[f"POST {path}"].attributes["http.response.status_code"] == 200
    assert spans["text_completion tiny"].attributes["gen_ai.usage.output_tokens"] == 6


def test_events_of_the_kv_cache(make_door: Any, tmp_path: Path) -> None:
    events: list[KVCacheEvent] = []

    def taken() -> list[KVCacheEvent]:
        found, events[:] = list(events), []
        return found

    addresses = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    settings = {"enable_kv_cache_events": True, **addresses}
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_dim=8, dtype="float32")
    groups = [KVCacheGroup(layer_names=("a",), spec=spec)]
    publisher = KVEventPublisher(KVEventsConfig.of(settings), groups, taken)
    door = make_door(kv_events=settings)
    hashes = [bytes([255] * 8 + [1]), bytes([1] * 32)]

    def publish(*new: KVCacheEvent) -> None:
        events.extend(new)
        publisher.publish()

    try:
        stored = BlockStored(
            sequence_number=1,
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=2,
            group=0,
        )
        publish(stored)
        batches = door.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=30)
        first, second = next(batches), next(batches)
        assert (first.sequence_number, first.events[0].WhichOneof("data")) == (0, "cleared")
        (event,) = second.events
        assert [list(block.token_ids) for block in event.stored.blocks] == [[1, 2], [3, 4]]
        assert [block.block_hash for block in event.stored.blocks] == [-1, 0x0101010101010101]
        assert event.stored.medium == "GPU"
        publish(BlockRemoved(sequence_number=2, block_hashes=hashes[1:], group=0))
        third = next(batches)
        assert (third.sequence_number, list(third.events[0].removed.block_hashes)) == (2, [0x0101010101010101])
        batches.cancel()
        later = door.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=2), timeout=30)
        assert next(later).sequence_number == 2
        later.cancel()
    finally:
        publisher.close()


def test_settings_that_cannot_be_served(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--grpc-port"):
            check_grpc(ServerConfig(grpc_port=taken.getsockname()[1]))
    (tmp_path / "file").touch()
    for path, words in (tmp_path / "none" / "s", "no such folder"), (tmp_path / "file", "there already"):
        with pytest.raises(ConfigError, match=words):
            check_grpc(ServerConfig(grpc_uds=str(path)))
    with pytest.raises(ConfigError, match="ssl_ciphers"):
        check_grpc(ServerConfig(grpc_port=0, ssl_ciphers="ECDHE+AESGCM"))


def test_a_server_that_ends_lets_running_calls_finish(launch: Any, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    process = launch({"step_time_s": 0.02}, server={"grpc_uds": str(path)})
    process.url()
    with grpc.insecure_channel(f"unix:{path}") as channel:
        params = pb.SamplingParams(max_tokens=40, ignore_eos=True)
        request = pb.GenerateRequest(text="x", sampling_params=params, stream=True)
        answer = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request)
        next(answer)
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watched)
        process.popen.send_signal(signal.SIGTERM)
        *_, last = answer
        with pytest.raises(grpc.RpcError, match="shutting down"):  # and not when running calls must have ended
            list(watched)
    assert last.complete.completion_tokens == len(last.complete.output_ids) == 40
    assert process.end() == 0
    assert "heavy modules: []" in process.output
    assert not path.exists()
