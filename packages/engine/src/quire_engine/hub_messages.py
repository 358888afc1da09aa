"""What API processes and the process that has the engines (`EngineHub`) say to each other, beside what an engine core
and its client do: tagged msgspec structs, encoded as MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec

from quire_engine.messages import (
    AddRequest,
    EngineFailed,
    EngineReady,
    Outputs,
    UtilityCall,
    UtilityReply,
    _Message,
)
from quire_interfaces import FinishReason

__all__ = [
    "EndRequests",
    "FrontMessage",
    "FrontReady",
    "FrontReport",
    "HubMessage",
    "HubStatus",
    "Notice",
    "OpenRequests",
    "decode_front_message",
    "decode_hub_message",
    "encode",
]


class OpenRequests(_Message):
    """Requests that share one stream; see `EngineClient.open`."""

    requests: list[AddRequest]
    n: int = 1


class EndRequests(_Message):
    """Stop these requests now and say nothing more about them; see `EngineClient.abort`."""

    request_ids: list[str]
    reason: FinishReason


class FrontReady(_Message):
    """The API process answers HTTP from now on."""


class FrontReport(_Message):
    """Something that an API process alone sees and that is counted for all."""

    name: str
    arguments: list[Any] = msgspec.field(default_factory=list)


class Notice(_Message):
    """What an API process tells all others: a request that concerns what one of them has."""

    name: str
    arguments: list[Any] = msgspec.field(default_factory=list)


class HubStatus(_Message):
    """What API processes answer from without asking: sent whenever it changes."""

    is_loading: bool
    is_resting: bool
    is_asleep: bool
    stalled_s: float
    """0.0 unless the engine is stalled."""
    adapters: dict[str, str] = msgspec.field(default_factory=dict)


FrontMessage = OpenRequests | EndRequests | UtilityCall | FrontReady | FrontReport | Notice
"""API process to hub."""
HubMessage = Outputs | UtilityReply | EngineReady | EngineFailed | HubStatus | Notice
"""Hub to API process."""

_encoder = msgspec.msgpack.Encoder()
_front_decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
_hub_decoder: msgspec.msgpack.Decoder[HubMessage] = msgspec.msgpack.Decoder(HubMessage)


def encode(message: FrontMessage | HubMessage) -> bytes:
    """To bytes. Raises TypeError where something in the message is no plain data."""
    return _encoder.encode(message)


def decode_front_message(data: bytes) -> FrontMessage:
    """From bytes sent by an API process. Raises msgspec.MsgspecError where they are no such message."""
    return _front_decoder.decode(data)


def decode_hub_message(data: bytes) -> HubMessage:
    """From bytes sent by the hub. Raises like `decode_front_message`."""
    return _hub_decoder.decode(data)
