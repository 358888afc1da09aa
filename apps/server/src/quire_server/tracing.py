"""Traces of requests for OpenTelemetry, by OTLP: the ASGI layer around all others, and what sends.

A request is a span of the kind server, below that of the caller (W3C trace context); below it are a span for each
sequence that the engine computed, with the attributes of OpenTelemetry's semantic conventions for generative AI and
spans of its phases (queue, prefill, decode), and a span for each call of a tool. No span holds text of a request or an
answer. Needs the extra `otel`; only servers with `--otlp-traces-endpoint` import this module.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import random
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire import __version__
from quire_interfaces import ConfigError
from quire_observability import RequestTimes, SpanRecord, TraceIds, current_requests, current_spans, current_trace
from quire_server.access_log import CLIENT_GONE, PROBES

try:
    from opentelemetry.propagate import extract
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode

    from quire_server.otlp_encoding import use_fast_encoding
except ImportError as error:
    raise ConfigError(
        f"traces need the OpenTelemetry SDK: {error}; install quire-server[otel]", field="otlp_traces_endpoint"
    ) from None

__all__ = ["SpanSender", "Tracing", "check_endpoint"]

FLUSH_S = 3.0
"""At the end, how long spans that wait may take to be sent."""
_UNSET = Status(StatusCode.UNSET)
_NONE: Mapping[str, Any] = {}
_SILENT = (*PROBES, "/load")
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_OPERATIONS = (
    ("/embeddings", "embeddings"), ("/embed", "embeddings"), ("/pooling", "embeddings"), ("/encode", "embeddings"),
    ("/Embed", "embeddings"),
    ("/rerank", "rerank"), ("/score", "rerank"), ("/classify", "classify"), ("/predict", "classify"),
    ("/chat", "chat"), ("/messages", "chat"), ("/responses", "chat"),
)  # fmt: skip
"""Part of a path -> `gen_ai.operation.name`; others are text_completion."""


class _Resource(Resource):
    """The exporter sorts spans by resource, and a `Resource` writes itself as JSON for each hash: a third of the time
    that encoding takes."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash


class SpanSender:
    """Makes spans and sends them to a collector. `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`,
    `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS` and the other variables of the SDK hold.

    Args:
        endpoint: URL of the collector; without a path, /v1/traces is taken where OTLP goes over HTTP.

    Raises:
        ConfigError: no URL, or a protocol that is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        own = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "quire", "service.version": __version__}
        self._provider = TracerProvider(resource=_Resource(Resource.create(own)), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(_exporter(endpoint))
        self._provider.add_span_processor(self._processor)
        self._scope = InstrumentationScope("quire")
        self.tracer = self._provider.get_tracer("quire")

    def add_child(
        self,
        parent: SpanContext,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Any],
        status: Status | None = None,
    ) -> SpanContext:
        """A span that has ended already, below one that is recorded. Nobody can add to it any more, so that it is made
        without what the SDK keeps for spans that go on, in a quarter of the time."""
        own = SpanContext(parent.trace_id, random.getrandbits(64) or 1, False, parent.trace_flags, parent.trace_state)
        span = ReadableSpan(
            name,
            context=own,
            parent=parent,
            resource=self._provider.resource,
            attributes=attributes,
            status=status or _UNSET,
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)
        return own

    async def run(self) -> None:
        """Wait until cancelled, then send what waits, for `FLUSH_S` at most."""
        try:
            await asyncio.Event().wait()
        finally:
            # On a thread that nobody waits for at the end: a collector that is away is tried again and again.
            flush = threading.Thread(target=self._provider.force_flush, args=(int(FLUSH_S * 1000),), daemon=True)
            flush.start()
            end_s = time.monotonic() + FLUSH_S
            while flush.is_alive() and time.monotonic() < end_s:
                await asyncio.sleep(0.02)


def check_endpoint(endpoint: str) -> None:
    """Whether spans could be sent there, as far as that is known without sending any.

    Raises:
        ConfigError: as `SpanSender`.
    """
    _exporter(endpoint).shutdown()


def _exporter(endpoint: str) -> SpanExporter:
    protocol = os.environ.get(_PROTOCOL) or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL such as http://localhost:4318, got {endpoint!r}",
            field="otlp_traces_endpoint",
        )
    if protocol == "grpc":
        try:
            grpc = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        except ImportError as error:
            raise ConfigError(
                f"{_PROTOCOL}=grpc needs opentelemetry-exporter-otlp-proto-grpc: {error}; install it, or send by "
                "http/protobuf",
                field="otlp_traces_endpoint",
            ) from None
        over_grpc: SpanExporter = grpc.OTLPSpanExporter(endpoint=endpoint)
        return over_grpc
    if protocol != "http/protobuf":
        raise ConfigError(f"{_PROTOCOL} must be http/protobuf or grpc, got {protocol!r}", field="otlp_traces_endpoint")
    http = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    use_fast_encoding(http)
    path = url.path if url.path.strip("/") else "/v1/traces"
    over_http: SpanExporter = http.OTLPSpanExporter(endpoint=url._replace(path=path).geturl())
    return over_http


class Tracing:
    """Wraps the whole app.

    Args:
        app: Everything else.
        sender: Makes the spans.
        model: Name under which the model is served.
    """

    def __init__(self, app: ASGIApp, sender: SpanSender, model: str) -> None:
        self._app, self._sender, self._model = app, sender, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path.endswith(_SILENT) or "/page/" in path:
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        span = self._sender.tracer.start_span(
            f"{method} {path}",
            context=extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path, "url.scheme": scope.get("scheme", "http")},
        )
        ids = span.get_span_context()
        requests: list[RequestTimes] = []
        spans: list[SpanRecord] = []
        current_requests.set(requests)
        current_spans.set(spans)
        current_trace.set(TraceIds(f"{ids.trace_id:032x}", f"{ids.span_id:016x}"))
        status = CLIENT_GONE

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name, value in message.get("headers", ()):
                    if name == b"x-request-id":
                        span.set_attribute("http.response.header.x-request-id", value.decode("latin-1"))
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except Exception as error:
            status = 500
            span.record_exception(error)
            raise
        finally:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_attribute("error.type", str(status))
                span.set_status(Status(StatusCode.ERROR))
            if span.is_recording():
                self._add_children(span, path, requests, spans)
            span.end()

    def _add_children(self, span: Span, path: str, requests: list[RequestTimes], spans: list[SpanRecord]) -> None:
        clock = time.time_ns() - time.monotonic_ns()
        operation = next((name for part, name in _OPERATIONS if part in path), "text_completion")
        parent = span.get_span_context()
        for each in requests:
            self._add_sequence(parent, operation, each, clock)
        for record in spans:
            end_s = record.end_s or time.monotonic()
            attributes, status = record.attributes, None
            if record.error is not None:
                attributes = {**attributes, "error.type": record.error}
                status = Status(StatusCode.ERROR)
            start_ns, end_ns = _ns(record.start_s, clock), _ns(end_s, clock)
            self._sender.add_child(parent, record.name, start_ns, end_ns, attributes, status)

    def _add_sequence(self, parent: SpanContext, operation: str, times: RequestTimes, clock: int) -> None:
        end_s = times.finished_time_s or time.monotonic()
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.choice.count": times.n,
            "gen_ai.usage.input_tokens": times.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": times.num_cached_tokens,
            "gen_ai.usage.output_tokens": times.num_generation_tokens,
            "gen_ai.latency.e2e": end_s - times.arrival_time_s,
            "quire.num_preemptions": times.num_preemptions,
        }
        if operation in ("chat", "text_completion"):
            attributes["gen_ai.request.max_tokens"] = times.max_tokens
        if times.scheduled_time_s:
            attributes["gen_ai.latency.time_in_queue"] = times.scheduled_time_s - times.arrival_time_s
        if times.first_token_time_s:
            attributes["gen_ai.latency.time_to_first_token"] = times.first_token_time_s - times.arrival_time_s
        name = f"{operation} {self._model}"
        child = self._sender.add_child(parent, name, _ns(times.arrival_time_s, clock), _ns(end_s, clock), attributes)
        moments = (times.arrival_time_s, times.scheduled_time_s, times.first_token_time_s, times.last_token_time_s)
        for phase, (start_s, stop_s) in zip(("queue", "prefill", "decode"), itertools.pairwise(moments), strict=True):
            if not start_s:
                break
            self._sender.add_child(child, phase, _ns(start_s, clock), _ns(stop_s or end_s, clock), _NONE)


def _ns(time_s: float, clock: int) -> int:
    """Nanoseconds since 1970 of a time of `time.monotonic()`."""
    return int(time_s * 1e9) + clock
