"""Answers with long lists, in parts: what is sent is not held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from quire_server.pooling_answers import PoolingAnswer
from quire_server.pooling_run import Pooled, output_of

__all__ = ["list_parts", "num_answer_bytes"]

_NUM_ITEMS = 64
"""Items of a part."""
_EMPTY = b'"data":[]'
_encoder = msgspec.json.Encoder()


def num_answer_bytes(outputs: Sequence[Pooled]) -> int:
    """Bytes of all vectors, float32."""
    return sum(len(output.data) for each in outputs if (output := output_of(each)) is not None)


def list_parts(answer: PoolingAnswer[Any], items: Iterator[Any]) -> Iterator[bytes]:
    """The JSON of an answer whose list is still empty, with the items that belong there. A worker thread makes each
    part when the one before has been sent."""
    before, _, behind = _encoder.encode(answer).partition(_EMPTY)
    begin = before + _EMPTY[:-1]
    while part := list(islice(items, _NUM_ITEMS)):
        yield begin + _encoder.encode(part)[1:-1]
        begin = b","
    yield (begin if begin != b"," else b"") + b"]" + behind
