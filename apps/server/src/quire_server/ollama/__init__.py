"""The door for Ollama's clients: its API, from `/api/chat` to `/api/version`.

Each route translates its body into the same calls as the OpenAI routes (`turn.py`, `completions.py`, `pooling_run.py`)
and their outputs into Ollama's lines. What belongs to Ollama's own store of models (Modelfiles, blobs, copies) is
refused by name, with what to do instead.
"""

from __future__ import annotations

from quire_server.door_route import DoorRoute
from quire_server.ollama.chat import chat
from quire_server.ollama.embeddings import embed, embeddings
from quire_server.ollama.generate import generate
from quire_server.ollama.models import ps, show, tags, version
from quire_server.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
    OllamaStoreRequest,
)
from quire_server.ollama.store import copy, create, delete, has_blob, pull, push, write_blob
from quire_server.openapi import JSON, JSON_LINES, NOTHING

__all__ = ["OLLAMA_ROUTES"]

_LINES = {**JSON, **JSON_LINES}

OLLAMA_ROUTES: tuple[DoorRoute, ...] = (
    DoorRoute("POST", "/api/chat", chat, _LINES, OllamaChatRequest, generates=True),
    DoorRoute("POST", "/api/generate", generate, _LINES, OllamaGenerateRequest, generates=True),
    DoorRoute("POST", "/api/embed", embed, JSON, OllamaEmbedRequest, needs_awake=False, computes=True),
    DoorRoute("POST", "/api/embeddings", embeddings, JSON, OllamaEmbeddingsRequest, needs_awake=False, computes=True),
    DoorRoute("GET", "/api/tags", tags),
    DoorRoute("GET", "/api/ps", ps),
    DoorRoute("GET", "/api/version", version),
    DoorRoute("POST", "/api/show", show, JSON, OllamaShowRequest, needs_awake=False),
    DoorRoute("POST", "/api/pull", pull, _LINES, OllamaPullRequest, needs_awake=False),
    DoorRoute("POST", "/api/push", push, JSON, OllamaStoreRequest, needs_awake=False),
    DoorRoute("POST", "/api/create", create, JSON, OllamaStoreRequest, needs_awake=False),
    DoorRoute("POST", "/api/copy", copy, JSON, OllamaStoreRequest, needs_awake=False),
    DoorRoute("DELETE", "/api/delete", delete, JSON, OllamaStoreRequest, needs_awake=False),
    DoorRoute("GET", "/api/blobs/{digest}", has_blob, NOTHING),
    DoorRoute("POST", "/api/blobs/{digest}", write_blob, NOTHING),
)
