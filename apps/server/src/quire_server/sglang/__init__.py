"""The door for SGLang's clients: `/generate`, `/get_model_info` and the routes beside them.

Routes that change the server for everybody (`/flush_cache`, `/pause_generation`, ...) are there with
--enable-admin-routes, or for administrators where some key is theirs.
"""

from __future__ import annotations

from quire_server.door_route import DoorRoute
from quire_server.openapi import EVENTS, JSON, LIST, NOTHING, OBJECT_OR_LISTS, TEXT
from quire_server.protocol import DetokenizeRequest, TokenizeRequest
from quire_server.sglang.generate import abort_request, generate
from quire_server.sglang.protocol import SGLangAbortRequest, SGLangEncodeRequest, SGLangGenerateRequest
from quire_server.sglang.server import (
    continue_generation,
    encode,
    flush_cache,
    health_generate,
    load,
    model_info,
    pause_generation,
    release_memory,
    resume_memory,
    server_info,
    weight_version,
)
from quire_server.tokenization import detokenize, tokenize

__all__ = ["SGLANG_ROUTES"]

_GENERATED = {**OBJECT_OR_LISTS, **EVENTS}

SGLANG_ROUTES: tuple[DoorRoute, ...] = (
    DoorRoute("POST", "/generate", generate, _GENERATED, SGLangGenerateRequest, generates=True),
    DoorRoute("POST", "/abort_request", abort_request, NOTHING, SGLangAbortRequest, generates=True, is_limited=False),
    DoorRoute("POST", "/encode", encode, OBJECT_OR_LISTS, SGLangEncodeRequest, needs_awake=False, computes=True),
    DoorRoute("POST", "/v1/tokenize", tokenize, OBJECT_OR_LISTS, TokenizeRequest),
    DoorRoute("POST", "/v1/detokenize", detokenize, JSON, DetokenizeRequest),
    DoorRoute("GET", "/get_model_info", model_info),
    DoorRoute("GET", "/model_info", model_info),
    DoorRoute("GET", "/get_weight_version", weight_version),
    DoorRoute("GET", "/get_server_info", server_info),
    DoorRoute("GET", "/get_load", load, LIST),
    DoorRoute("GET", "/health_generate", health_generate, NOTHING),
    DoorRoute("GET", "/flush_cache", flush_cache, TEXT, is_admin=True),
    DoorRoute("POST", "/flush_cache", flush_cache, TEXT, is_admin=True),
    DoorRoute("POST", "/pause_generation", pause_generation, is_admin=True),
    DoorRoute("POST", "/continue_generation", continue_generation, is_admin=True),
    DoorRoute("POST", "/release_memory_occupation", release_memory, is_admin=True),
    DoorRoute("POST", "/resume_memory_occupation", resume_memory, is_admin=True),
)
