"""From the bytes of a request body to a checked model. Every fault becomes a RequestError that names the field."""

from __future__ import annotations

import asyncio
import reprlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from quire_interfaces import RequestError
from quire_server.config import ServerConfig
from quire_server.content_encoding import encoding_of, inflated
from quire_server.errors import ClientGoneError, HTTPError
from quire_server.keep_alive import await_stream
from quire_server.protocol import Body
from quire_server.schema_text import decode_around_schemas

__all__ = ["check_fields", "parse_body", "parse_checked", "read_body", "read_model"]

if TYPE_CHECKING:
    from quire_server.context import ServerContext

Model = TypeVar("Model", bound=BaseModel)

_MAX_ERRORS = 1000
"""Of one body that are looked at: building them takes 2 us each."""

SMALL_BYTES = 1 << 14
"""Up to here nothing is gained by care: it is parsed within 0.5 ms, whatever it holds."""


async def read_model(
    context: ServerContext, request: Request, model: type[Model], *, any_content_type: bool = False
) -> Model:
    """The body of a request, checked.

    Args:
        context: Of the server.
        request: Whose body is read.
        model: What it must be.
        any_content_type: As for `read_body`.

    Raises:
        HTTPError: as `read_body`.
        ClientGoneError: as `read_body`.
        RequestError: as `parse_checked`.
    """
    data = await read_body(request, context.config, any_content_type=any_content_type)
    body = await parse_checked(context, data, model)
    if getattr(body, "stream", False):
        await_stream()
    return body


async def parse_checked(context: ServerContext, data: bytes, model: type[Model]) -> Model:
    """As `parse_body`, in a worker thread when it is long, and not before it is known to hold no more than is allowed.

    Raises:
        RequestError: as `parse_body`; or it holds too many values, or a constraint on the output that is too large.
    """
    await context.inspector.check(data)
    if len(data) <= SMALL_BYTES:
        return parse_body(data, model)
    return await asyncio.to_thread(parse_body, data, model)


async def read_body(request: Request, config: ServerConfig, *, any_content_type: bool = False) -> bytes:
    """The whole body, inflated. A client that sends it too slowly is refused: an open request holds memory.

    Args:
        request: Whose body is read.
        config: Its bounds.
        any_content_type: Read it as JSON whatever the client calls it, as Ollama and llama.cpp do: their pages show
            `curl -d` without a content type, which is then that of a form.

    Raises:
        HTTPError: 413 above `max_body_bytes`, as it is sent or as it is inflated (noticed before it is all there), 415
            for another content type than JSON or an unknown encoding, 408 when it does not arrive within
            `body_timeout_s`.
        RequestError: it is not what its encoding says.
        ClientGoneError: the client closed the connection before all of it was there.
    """
    max_bytes, timeout_s = config.max_body_bytes, config.body_timeout_s
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if not any_content_type and kind != "application/json" and not kind.endswith("+json"):
        raise HTTPError(415, f"the content type must be application/json, got {kind!r}", code="unsupported_media_type")
    encoding = encoding_of(request.headers.getlist("content-encoding"))
    too_large = HTTPError(
        413, f"the request body is larger than {max_bytes} bytes (--max-body-bytes)", code="body_too_large"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise HTTPError(
            408, f"the request body did not arrive within {timeout_s:g} s (--body-timeout-s)", code="timeout"
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    if encoding is not None:
        return await asyncio.to_thread(lambda: inflated(b"".join(parts), encoding, max_bytes))
    return b"".join(parts) if size <= SMALL_BYTES else await asyncio.to_thread(b"".join, parts)


def parse_body(data: bytes, model: type[Model]) -> Model:
    """JSON to a checked model.

    Raises:
        RequestError: not JSON (NaN and infinity are not), not an object, or a wrong field, named in `param`.
    """
    try:
        value = msgspec.json.decode(data) if len(data) <= SMALL_BYTES else decode_around_schemas(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}", param="body", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply", param="body", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(
            f"the request body must be a JSON object, got {type(value).__name__}", param="body", code="invalid_json"
        )
    parsed = check_fields(value, model)
    if isinstance(parsed, Body) and len(data) > SMALL_BYTES:
        parsed.mark_large()
    return parsed


def check_fields(fields: dict[str, Any], model: type[Model]) -> Model:
    """Fields to a checked model.

    Raises:
        RequestError: a field is wrong, named in `param`.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _field_error(error, model) from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply", param="body", code="invalid_json") from None


def _field_error(error: ValidationError, model: type[BaseModel]) -> RequestError:
    if error.error_count() > _MAX_ERRORS:
        return RequestError(f"the request body has {error.error_count()} wrong values", param="body")
    first = error.errors(include_url=False, include_context=False)[0]
    place = first["loc"]
    name = str(place[0]) if place else "body"
    if first["type"] == "too_many":
        path = name + "".join(map(_step, place[1:]))
        return RequestError(f"{path} {first['msg']}", param=path)
    if issubclass(model, Body) and name == model.prompt_field and first["type"] != "missing":
        message = "must be text, a list of token ids, a list of texts or a list of lists of token ids (from 0 to 2**31)"
        return RequestError(f"{name} {message}, got {_shown(first['input'])}", param=name)
    if name == "stop":
        return RequestError(f"stop must be text or a list of texts, got {_shown(first['input'])}", param="stop")
    path = name + "".join(map(_step, place[1:]))
    if first["type"] == "missing":
        return RequestError(f"{path} is required", param=path)
    return RequestError(f"{path}: {first['msg'].lower()}, got {_shown(first['input'])}", param=path)


def _step(step: int | str) -> str:
    """A step into the body. Names of union members, which pydantic puts between, are none."""
    if isinstance(step, int):
        return f"[{step}]"
    is_member = step in ("int", "str", "float", "bool") or "[" in step or step.startswith("constrained-")
    return "" if is_member else f".{step[:64]}"


def _shown(value: Any) -> str:
    """A short form whose cost does not grow with the value."""
    return reprlib.repr(value)
