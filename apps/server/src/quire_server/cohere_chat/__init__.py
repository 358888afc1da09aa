"""Cohere's chat, second version: `/cohere/v2/chat` as vLLM has it, and `/v2/chat`, where Cohere's client looks for it.

A body becomes that of a chat completion (`protocol`), and the model's answer Cohere's events and messages (`answers`).
"""

from __future__ import annotations

from quire_server.cohere_chat.answers import CohereChatAnswer, cohere_chat
from quire_server.cohere_chat.protocol import CohereChatRequest
from quire_server.door_route import DoorRoute
from quire_server.openapi import json_of

__all__ = ["COHERE_CHAT_ROUTES"]

COHERE_CHAT_ROUTES: tuple[DoorRoute, ...] = tuple(
    DoorRoute("POST", path, cohere_chat, json_of(CohereChatAnswer, events=True), CohereChatRequest, generates=True)
    for path in ("/cohere/v2/chat", "/v2/chat")
)
