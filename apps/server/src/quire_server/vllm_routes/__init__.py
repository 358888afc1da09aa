"""Routes of vLLM's that look into a server or profile it: `/start_profile`, `/collective_rpc`, `/server_info`,
`/kv_event_sources`; and those that no other API has: `/generative_scoring`.

Those of them that change or show the server for everybody are there with --enable-admin-routes, or for administrators
where some key is theirs.
"""

from __future__ import annotations

from quire_server.door_route import DoorRoute
from quire_server.openapi import JSON, NOTHING, json_of
from quire_server.vllm_routes.generative_scoring import (
    GenerativeScores,
    GenerativeScoringRequest,
    generative_scoring,
)
from quire_server.vllm_routes.ranks import CollectiveRPCRequest, collective_rpc, start_profile, stop_profile
from quire_server.vllm_routes.server_info import kv_event_sources, server_info

__all__ = ["VLLM_ROUTES"]

_FORMAT = {"type": "string", "enum": ["text", "json"], "default": "text"}

VLLM_ROUTES: tuple[DoorRoute, ...] = (
    DoorRoute(
        "POST",
        "/collective_rpc",
        collective_rpc,
        body=CollectiveRPCRequest,
        needs_awake=False,
        is_limited=False,
        is_admin=True,
    ),
    DoorRoute("POST", "/start_profile", start_profile, NOTHING, query={"prefix": {"type": "string"}}, is_admin=True),
    DoorRoute("POST", "/stop_profile", stop_profile, is_admin=True),
    DoorRoute("GET", "/server_info", server_info, JSON, query={"config_format": _FORMAT}, is_admin=True),
    DoorRoute("GET", "/kv_event_sources", kv_event_sources),
    DoorRoute(
        "POST",
        "/generative_scoring",
        generative_scoring,
        json_of(GenerativeScores),
        GenerativeScoringRequest,
        generates=True,
    ),
)
