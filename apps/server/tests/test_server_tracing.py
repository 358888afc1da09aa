"""Traces, as a collector of OpenTelemetry's own protocol reads them."""

from __future__ import annotations

import gzip
import itertools
import json
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from quire_interfaces import ConfigError
from quire_observability import current_spans, span
from quire_server.otlp_encoding import EncodedSpans
from quire_server.tracing import check_endpoint

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "Authorization": "Bearer sk-secret"}
CALL = "<tool_call>\n" + json.dumps({"name": "divide", "arguments": {"a": 1, "b": 0}}) + "\n</tool_call>"


class Collector:
    """Takes spans over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        self.services: set[str] = set()
        self.arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                message = ExportTraceServiceRequest.FromString(body)
                with collector.arrived:
                    collector.raw += body
                    for resource in message.resource_spans:
                        named = {each.key: each.value.string_value for each in resource.resource.attributes}
                        collector.services.add(named["service.name"])
                        collector.spans += [each for scope in resource.scope_spans for each in scope.spans]
                    collector.arrived.notify_all()
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def trace(self, trace_id: str, num_spans: int) -> dict[str, list[Span]]:
        """Name -> spans of a trace, once there are so many."""

        def found() -> list[Span]:
            return [each for each in self.spans if each.trace_id.hex() == trace_id]

        with self.arrived:
            assert self.arrived.wait_for(lambda: len(found()) >= num_spans, 30), [each.name for each in self.spans]
            names: dict[str, list[Span]] = {}
            for each in found():
                names.setdefault(each.name, []).append(each)
        return names


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
        patch.setenv("OTEL_SERVICE_NAME", "quire-test")
        yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.fixture(scope="module")
def server(make_scripted: Any, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("mcp") / "servers.json"
    tools = {"command": sys.executable, "args": [str(Path(__file__).parent / "server_mcp_tools.py")]}
    path.write_text(json.dumps({"mcpServers": {"tools": tools}}))
    return make_scripted(
        mcp_servers=str(path), engine={"max_model_len": 4096}, otlp_traces_endpoint=collector.url, access_log=True
    )


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def headers(trace_id: str) -> dict[str, str]:
    return {**HEADERS, "traceparent": f"00-{trace_id}-{PARENT}-01"}


def test_a_chat_is_a_span_with_its_phases(server: Any, collector: Collector) -> None:
    body = {"messages": [{"role": "user", "content": "¤my own words¥"}], "n": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    trace_id = TRACE[:-1] + "1"
    with server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers(trace_id)) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    usage = json.loads(lines[-1][6:])["usage"]
    spans = collector.trace(trace_id, 9)
    (root,) = spans["POST /v1/chat/completions"]
    assert root.parent_span_id.hex() == PARENT
    assert root.kind == Span.SPAN_KIND_SERVER
    told = attributes(root)
    assert (told["http.request.method"], told["http.response.status_code"]) == ("POST", 200)
    assert told["http.response.header.x-request-id"] == response.headers["x-request-id"]
    sequences = spans["chat tiny"]
    assert len(sequences) == 2
    for each in sequences:
        assert each.parent_span_id == root.span_id
        told = attributes(each)
        assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "tiny"
        assert told["gen_ai.request.choice.count"] == 2
        assert 0 <= told["gen_ai.latency.time_in_queue"] <= told["gen_ai.latency.time_to_first_token"]
        assert told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
        phases = [spans[name][index] for name in ("queue", "prefill", "decode") for index in (0, 1)]
        own = [phase for phase in phases if phase.parent_span_id == each.span_id]
        assert [phase.name for phase in own] == ["queue", "prefill", "decode"]
        for one, other in itertools.pairwise(own):
            assert one.end_time_unix_nano == other.start_time_unix_nano
        assert own[0].start_time_unix_nano == each.start_time_unix_nano
        assert each.start_time_unix_nano >= root.start_time_unix_nano
        assert own[-1].end_time_unix_nano <= each.end_time_unix_nano <= root.end_time_unix_nano
    assert sum(attributes(each)["gen_ai.usage.output_tokens"] for each in sequences) == usage["completion_tokens"]
    assert collector.services == {"quire-test"}


def test_tools_are_spans_and_failures_are_said(server: Any, collector: Collector) -> None:
    trace_id = TRACE[:-1] + "2"
    tool = {"type": "mcp", "server_label": "tools", "require_approval": "never"}
    body = {"model": "tiny", "input": f"¤{CALL}¥", "tools": [tool], "max_tool_calls": 1}
    response = server.client.post("/v1/responses", json=body, headers=headers(trace_id), timeout=60)
    assert response.status_code == 200, response.text
    spans = collector.trace(trace_id, 4)
    (call,) = spans["execute_tool divide"]
    told = attributes(call)
    assert (told["gen_ai.tool.name"], told["server.address"]) == ("divide", "tools")
    assert told["error.type"] == "MCPToolError"
    assert call.status.code == 2
    (root,) = spans["POST /v1/responses"]
    assert call.parent_span_id == root.span_id
    assert root.status.code != 2, "the response itself is whole"
    assert len(spans["chat tiny"]) >= 1


def test_nothing_private_is_in_a_trace(server: Any, collector: Collector) -> None:
    trace_id = TRACE[:-1] + "3"
    refused = server.client.post("/v1/completions?key=sk-query", json={"prompt": 5}, headers=headers(trace_id))
    assert refused.status_code == 400
    (root,) = collector.trace(trace_id, 1)["POST /v1/completions"]
    assert attributes(root)["http.response.status_code"] == 400
    assert server.client.get("/health").status_code == 200
    for words in (b"my own words", b"sk-secret", b"sk-query", b"/health", b"/metrics"):
        assert words not in collector.raw


def test_a_collector_that_is_away_costs_nothing(make_live: Any) -> None:
    server = make_live(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    for _ in range(3):
        assert server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_logs_name_the_trace(launch: Any, collector: Collector) -> None:
    process = launch(server={"log_format": "json", "access_log": True, "otlp_traces_endpoint": collector.url})
    trace_id = TRACE[:-1] + "4"
    url = process.wait_for(r'"address": "(http://[^"]+)"')[1]
    body = {"prompt": "a", "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers(trace_id))
    assert answer.status_code == 200
    (root,) = collector.trace(trace_id, 1)["POST /v1/completions"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.end(30) == 0, process.output
    records = [json.loads(line) for line in process.output.splitlines() if line.startswith("{")]
    (line,) = [each for each in records if each["logger"] == "quire_server.access"]
    assert (line["trace_id"], line["span_id"]) == (trace_id, root.span_id.hex())
    assert all("trace_id" not in each for each in records if each is not line)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x/y", "", "http://"])
def test_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        check_endpoint(endpoint)


def test_protocols_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="http/protobuf or grpc"):
        check_endpoint("http://localhost:4318")


def test_spans_are_noted_for_who_asks() -> None:
    with span("alone", {}):
        assert current_spans.get() is None
    found: list[Any] = []
    token = current_spans.set(found)
    try:
        with pytest.raises(KeyError), span("fails", {"a": "b"}):
            raise KeyError
    finally:
        current_spans.reset(token)
    (record,) = found
    assert (record.name, record.attributes, record.error) == ("fails", {"a": "b"}, "KeyError")
    assert record.end_s >= record.start_s > 0


def test_spans_are_written_as_by_the_official_encoder() -> None:
    resource = Resource({"service.name": "quire", "numbers": (1, 2)})
    scopes = InstrumentationScope("quire"), InstrumentationScope("other", "2.0")
    parents = None, SpanContext(1 << 100, 77, True), SpanContext(5, 6, False, trace_state=TraceState([("a", "b")]))
    plain = {
        "text": "\u00e9" * 200,
        "count": 300,
        "below": -7,
        "most": 2**63 - 1,
        "share": 0.25,
        "yes": True,
        "no": False,
        "zero": 0,
    }
    spans = [
        ReadableSpan(
            name,
            context=SpanContext(3, number + 1, False, TraceFlags(1), TraceState([("a", "b")]) if number == 5 else None),
            parent=parents[number % 3],
            resource=resource,
            attributes=attributes,
            events=[Event("failed", {"why": "x"}, 9)] if number == 3 else (),
            links=[Link(SpanContext(1, 2, False))] if number == 4 else (),
            status=status,
            start_time=number,
            end_time=10**18 + number,
            kind=kind,
            instrumentation_scope=scopes[number % 2],
        )
        for number, (name, attributes, status, kind) in enumerate([
            ("a chat", plain, Status(StatusCode.UNSET), SpanKind.SERVER),
            ("", {}, Status(StatusCode.ERROR), SpanKind.INTERNAL),
            ("x" * 300, {"list": (1, 2)}, Status(StatusCode.OK), SpanKind.CLIENT),
            ("event", {}, Status(StatusCode.ERROR), SpanKind.PRODUCER),
            ("link", {}, Status(StatusCode.UNSET), SpanKind.CONSUMER),
            ("state", plain, Status(StatusCode.UNSET), SpanKind.SERVER),
            ("why", plain, Status(StatusCode.ERROR, "why"), SpanKind.SERVER),
        ])
    ]  # fmt: skip
    message = ExportTraceServiceRequest.FromString(EncodedSpans(spans).SerializePartialToString())
    assert message == encode_spans(spans)
