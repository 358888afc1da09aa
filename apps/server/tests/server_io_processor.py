"""An IO-processor plug-in for tests: the vectors of words that a request lists, under the words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire_engine import EngineInfo
from quire_interfaces import PoolingParams


class WordVectors:
    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    def parse_data(self, data: Any) -> list[str]:
        if not isinstance(data, dict) or not isinstance(data.get("words"), list):
            raise ValueError("give words, a list")
        return list(data["words"])

    def pre_process(self, data: list[str]) -> list[str]:
        return data

    def pooling_params(self, data: list[str], params: PoolingParams) -> PoolingParams:
        return dataclasses.replace(params, task="embed")

    def post_process(self, data: list[str], outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> Any:
        vectors = {word: output.outputs.tolist() for word, output in zip(data, outputs, strict=True)}
        return {"model": self._info.model, "vectors": vectors}
