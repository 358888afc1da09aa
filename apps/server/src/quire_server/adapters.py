"""Routes that load and unload adapters while the server runs. Paths and bodies are vLLM's."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire_interfaces import RequestError
from quire_server.body import read_model
from quire_server.context import ServerContext

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
    await context.llm.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(context: ServerContext, request: Request) -> Response:
    """Serve an adapter no longer."""
    body = await read_model(context, request, UnloadLoRAAdapterRequest)
    await context.llm.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
