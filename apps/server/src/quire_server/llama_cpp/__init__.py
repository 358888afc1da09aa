"""The door for clients of llama.cpp's server: `/completion`, `/infill`, `/props` and the routes beside them.

`/tokenize`, `/detokenize` and `/rerank` are those of the other protocols, which take llama.cpp's bodies, too.
"""

from __future__ import annotations

from quire_server.door_route import DoorRoute
from quire_server.llama_cpp.completion import completion, infill
from quire_server.llama_cpp.properties import (
    adapters,
    apply_template,
    change_slot,
    embedding,
    health,
    props,
    set_adapters,
    set_props,
    slots,
)
from quire_server.llama_cpp.protocol import LlamaCompletionRequest, LlamaEmbeddingRequest, LlamaInfillRequest
from quire_server.openapi import EVENTS, JSON, LIST, OBJECT_OR_LISTS, json_of
from quire_server.pooling_answers import RerankAnswer
from quire_server.pooling_protocol import RerankRequest
from quire_server.protocol import ChatCompletionRequest
from quire_server.scoring import rerank

__all__ = ["LLAMA_CPP_ROUTES"]

_COMPLETIONS = {**OBJECT_OR_LISTS, **EVENTS}
_RANKING = json_of(RerankAnswer)
_FAIL = {"fail_on_no_slot": {"type": "integer", "enum": [0, 1], "default": 0}}
_ACTION = {"action": {"type": "string", "enum": ["save", "restore", "erase"]}}

LLAMA_CPP_ROUTES: tuple[DoorRoute, ...] = (
    DoorRoute("POST", "/completion", completion, _COMPLETIONS, LlamaCompletionRequest, generates=True),
    DoorRoute("POST", "/completions", completion, _COMPLETIONS, LlamaCompletionRequest, generates=True),
    DoorRoute("POST", "/infill", infill, _COMPLETIONS, LlamaInfillRequest, generates=True),
    DoorRoute("POST", "/apply-template", apply_template, JSON, ChatCompletionRequest, generates=True),
    DoorRoute("POST", "/embedding", embedding, LIST, LlamaEmbeddingRequest, needs_awake=False, computes=True),
    DoorRoute("POST", "/embeddings", embedding, LIST, LlamaEmbeddingRequest, needs_awake=False, computes=True),
    DoorRoute("POST", "/reranking", rerank, _RANKING, RerankRequest, needs_awake=False, computes=True),
    DoorRoute("POST", "/v1/reranking", rerank, _RANKING, RerankRequest, needs_awake=False, computes=True),
    DoorRoute("GET", "/v1/health", health),
    DoorRoute("GET", "/props", props),
    DoorRoute("POST", "/props", set_props),
    DoorRoute("GET", "/slots", slots, LIST, query=_FAIL),
    DoorRoute("POST", "/slots/{id_slot}", change_slot, query=_ACTION),
    DoorRoute("GET", "/lora-adapters", adapters, LIST),
    DoorRoute("POST", "/lora-adapters", set_adapters),
)
