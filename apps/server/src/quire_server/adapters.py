"""Routes that load and unload adapters while the server runs. Paths and bodies are vLLM's.

What an ordinary API key loads is its own, whatever others call theirs. What an administrator's key loads is the
server's, for all, as the adapters of the start are, and so is everything on a server without keys.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire_engine import HubClient
from quire_interfaces import ModelNotFoundError, RequestError
from quire_server.adapter_sources import allowed_adapter
from quire_server.body import read_model
from quire_server.context import OwnAdapter, ServerContext

__all__ = ["LoadLoRAAdapterRequest", "UnloadLoRAAdapterRequest", "load_lora_adapter", "unload_lora_adapter"]


class LoadLoRAAdapterRequest(BaseModel):
    """Body of POST /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    """Another adapter of this name gives way; requests that run with that one keep it."""


class UnloadLoRAAdapterRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None
    """Not used: the name tells adapters apart."""


async def load_lora_adapter(context: ServerContext, request: Request) -> Response:
    """Read an adapter, beside the engine's loop, and serve it under its name."""
    body = await read_model(context, request, LoadLoRAAdapterRequest)
    if body.lora_name in context.model_names:
        raise RequestError(
            f"{body.lora_name!r} is the name of the model itself; choose another", param="lora_name", code="name_taken"
        )
    engine_name = _engine_name(context, body.lora_name)
    known_as = context.adapters.get(body.lora_name)
    if known_as is not None and (known_as != engine_name or not body.load_inplace):
        remedy = (
            "unload it, or set load_inplace to put another in its place"
            if known_as == engine_name
            else "ask an administrator to unload it"
        )
        raise RequestError(
            f"an adapter {body.lora_name!r} is loaded already; choose another name, or {remedy}",
            param="lora_name",
            code="adapter_exists",
        )
    if engine_name != body.lora_name and isinstance(context.llm.client, HubClient):
        raise RequestError(
            "adapters of one caller go with one API process: start the server with --api-server-count 1, or have an "
            "administrator load it for all",
            code="unsupported",
        )
    place = await asyncio.to_thread(allowed_adapter, body.lora_path, context.config)
    if engine_name != body.lora_name:  # before it is there for all
        context.state.own_adapters[engine_name] = OwnAdapter(
            context.caller.owner, context.caller.tenant, body.lora_name
        )
    try:
        await context.llm.client.load_adapter(engine_name, place, replace=body.load_inplace)
    finally:
        _forget_unloaded(context, engine_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(context: ServerContext, request: Request) -> Response:
    """Serve an adapter no longer."""
    body = await read_model(context, request, UnloadLoRAAdapterRequest)
    engine_name = _engine_name(context, body.lora_name)
    if context.adapters.get(body.lora_name) != engine_name:
        own = [name for name, loaded in context.adapters.items() if loaded == _engine_name(context, name)]
        raise ModelNotFoundError(
            f"no adapter {body.lora_name!r} of yours is loaded; loaded: {', '.join(map(repr, own)) or 'none'}"
        )
    await context.llm.client.unload_adapter(engine_name)
    _forget_unloaded(context, engine_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _engine_name(context: ServerContext, name: str) -> str:
    """What the engine calls an adapter that the caller loads: keys may give the same name to different ones."""
    caller = context.caller
    return name if caller.is_admin or not caller.owner else f"{name}@{caller.tenant}"


def _forget_unloaded(context: ServerContext, engine_name: str) -> None:
    """Whose an adapter is, once it is not there."""
    if engine_name not in context.llm.client.adapters:
        context.state.own_adapters.pop(engine_name, None)
