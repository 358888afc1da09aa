"""The IO processor `greetings`: names in, a vector of each greeting out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire_engine import EngineInfo
from quire_interfaces import PoolingParams

__all__ = ["Greetings"]


class Greetings:
    """Implements `quire_server.io_processors.IOProcessor`."""

    def __init__(self, info: EngineInfo) -> None:
        self._model = info.model

    def parse_data(self, data: Any) -> list[str]:
        """A list of names; anything else is answered with 400."""
        if not isinstance(data, list) or not data or not all(isinstance(name, str) for name in data):
            raise ValueError("give a list of names")
        return data

    def pre_process(self, data: list[str]) -> Sequence[str]:
        """One prompt per name."""
        return [f"Hello, {name}." for name in data]

    def pooling_params(self, data: list[str], params: PoolingParams) -> PoolingParams:
        """As the request has them."""
        return params

    def post_process(self, data: list[str], outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> Any:
        """Name -> vector."""
        vectors = [output.outputs.tolist() for output in outputs]
        return {"model": self._model, "greetings": dict(zip(data, vectors, strict=True))}
