"""GET /api/tags, /api/ps, /api/version and POST /api/show: what is served, in Ollama's words."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire import AsyncLLM, __version__
from quire.assemble import read_model_config
from quire_interfaces import Modality, QuireError
from quire_models.config import ModelConfig
from quire_models.hub import resolve_model
from quire_models.ledger import num_parameters
from quire_models.made_folder import is_mistral_format
from quire_server.body import read_model
from quire_server.context import ServerContext, in_thread_when
from quire_server.ollama.names import own_name
from quire_server.ollama.protocol import OllamaShowRequest
from quire_server.responses import json_response

__all__ = ["NEVER", "OLLAMA_VERSION", "ps", "show", "tags", "unloaded_card", "version"]

OLLAMA_VERSION = "0.13.0"
"""The version of Ollama whose API is spoken here: clients ask for it before they use what is new."""
NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays as long as the server."""
_SCALES = (("B", 1e9), ("M", 1e6), ("K", 1e3))
_BITS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class _Files:
    """What a model's folder says."""

    size: int
    """Bytes."""
    digest: str
    modified_at: str


@functools.cache
def _files(folder: Path) -> _Files:
    files = [folder] if folder.is_file() else sorted(each for each in folder.rglob("*") if each.is_file())
    stats = [(each.name if folder.is_file() else each.relative_to(folder).as_posix(), each.stat()) for each in files]
    text = "\n".join(f"{name} {stat.st_size}" for name, stat in stats)
    config = folder / "config.json"
    digest = hashlib.sha256(text.encode() + (config.read_bytes() if config.is_file() else b"")).hexdigest()
    modified_s = max((stat.st_mtime for _, stat in stats), default=0.0)
    modified_at = datetime.fromtimestamp(modified_s, UTC).isoformat().replace("+00:00", "Z")
    return _Files(sum(stat.st_size for _, stat in stats), digest, modified_at)


def unloaded_card(name: str, path: Path) -> dict[str, Any]:
    """A model that is not loaded, as /api/tags lists it, by its files alone.

    Args:
        name: Of the model.
        path: Its folder or GGUF file.
    """
    details: dict[str, Any] = {"format": "gguf", "family": "", "parameter_size": "", "quantization_level": ""}
    with contextlib.suppress(QuireError):
        if path.is_dir():
            details = _details(ModelConfig.from_path(resolve_model(path) if is_mistral_format(path) else path))
    files = _files(path)
    facts = {"size": files.size, "digest": files.digest, "modified_at": files.modified_at}
    return {"name": name, "model": name, **facts, "details": details}


def _details(config: ModelConfig) -> dict[str, Any]:
    quantization = config.quantization_method or _BITS.get(config.dtype)
    family = config.model_type
    return {
        "parent_model": "",
        "format": "gguf" if config.quantization_method == "gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _scaled(num_parameters(config)),
        "quantization_level": (quantization or config.dtype).upper(),
    }


def _scaled(count: int) -> str:
    """8.0B, 596.0M."""
    for letter, scale in _SCALES:
        if count >= scale:
            return f"{count / scale:.1f}{letter}"
    return str(count)


def _card(llm: AsyncLLM, name: str) -> dict[str, Any]:
    files = _files(llm.folder)
    return {"name": name, "model": name, "size": files.size, "digest": files.digest, "details": _details_of(llm)}


def _details_of(llm: AsyncLLM) -> dict[str, Any]:
    return _details(read_model_config(llm.config, llm.folder))


def _served(context: ServerContext) -> list[tuple[str, AsyncLLM]]:
    """Name and model of everything that requests may name."""
    names = dict.fromkeys((*context.model_names, *context.adapters))
    served = [(name, context.llm) for name in names]
    if context.pooling_llm is not None and context.pooling_model is not None:
        served.append((context.pooling_model, context.pooling_llm))
    return served


async def tags(context: ServerContext, request: Request) -> Response:
    """GET /api/tags: the served models, each under all of its names, and the adapters."""

    def answer() -> Response:
        cards = [{**_card(llm, name), "modified_at": _files(llm.folder).modified_at} for name, llm in _served(context)]
        return json_response({"models": cards})

    return await in_thread_when(True, answer)


async def ps(context: ServerContext, request: Request) -> Response:
    """GET /api/ps: what is loaded, which is all of it until the server ends."""

    def answer() -> Response:
        cards = []
        for name, llm in _served(context):
            info = llm.engine.info
            size = sum(info.memory_bytes.values())
            facts = {
                "size": size,
                "size_vram": 0 if info.device.startswith("cpu") else size,
                "expires_at": NEVER,
                "context_length": info.max_model_len,
            }
            cards.append({**_card(llm, name), **facts})
        return json_response({"models": cards})

    return await in_thread_when(True, answer)


async def version(context: ServerContext, request: Request) -> Response:
    """GET /api/version: the version of Ollama whose API this is, and Quire's own."""
    return json_response({"version": OLLAMA_VERSION, "quire": __version__})


async def show(context: ServerContext, request: Request) -> Response:
    """POST /api/show: template, capabilities and sizes of a model."""
    body = await read_model(context, request, OllamaShowRequest, any_content_type=True)
    name = own_name(context, body.named)
    context = context.for_pooling(name)
    context.resolve_model(name)
    return await in_thread_when(True, lambda: json_response(_shown(context, body.named)))


def _shown(context: ServerContext, name: str) -> dict[str, Any]:
    llm = context.llm
    config, info = read_model_config(llm.config, llm.folder), llm.engine.info
    template = llm.renderer.tokenizer_config.get("chat_template") or ""
    parameters = [f"{key} {value}" for key, value in llm.generation_defaults.items()]
    family = config.model_type
    return {
        "modelfile": f"# Quire reads no Modelfile; this model is\nFROM {llm.folder.name}\n",
        "parameters": "\n".join(parameters),
        "template": template if isinstance(template, str) else "",
        "details": _details(config),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": num_parameters(config),
            f"{family}.context_length": info.max_model_len,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.num_layers,
            f"{family}.feed_forward_length": config.intermediate_size,
            f"{family}.attention.head_count": config.num_heads,
            f"{family}.attention.head_count_kv": config.num_kv_heads,
            f"{family}.vocab_size": config.vocab_size,
        },
        "capabilities": _capabilities(context),
        "modified_at": _files(llm.folder).modified_at,
    }


def _capabilities(context: ServerContext) -> list[str]:
    llm = context.llm
    form, info = llm.renderer.chat_format, llm.engine.info
    media = () if llm.media is None else llm.media.placeholders
    has = {
        "completion": info.runner != "pooling",
        "tools": info.runner != "pooling" and form.tools is not None,
        "thinking": info.runner != "pooling" and form.reasoning is not None,
        "insert": info.runner != "pooling" and llm.renderer.fill_in_middle is not None,
        "vision": Modality.IMAGE in media,
        "audio": Modality.AUDIO in media,
        "embedding": "embed" in info.pooling_tasks,
    }
    return [name for name, is_there in has.items() if is_there]
