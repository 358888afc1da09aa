"""Similarities of vectors that scores are made of."""

from __future__ import annotations

import struct

import pytest

from quire_interfaces import PooledOutput
from quire_server.scoring import cosine, max_sim


def pooled(*rows: list[float]) -> PooledOutput:
    numbers = [number for row in rows for number in row]
    return PooledOutput(struct.pack(f"<{len(numbers)}f", *numbers), (len(rows), len(rows[0]) if rows else 0))


def test_max_sim_sums_the_largest_product_of_each_query_token() -> None:
    query, document = pooled([1, 0], [0, 1], [-1, 0]), pooled([2, -1], [1, 3])
    assert max_sim(query, document) == 2 + 3 - 1
    assert max_sim(document, query) == 2 + 3
    assert max_sim(query, pooled()) == 0


def test_cosine_of_vectors_and_of_nothing() -> None:
    one, two = PooledOutput(struct.pack("<2f", 3, 4), (2,)), PooledOutput(struct.pack("<2f", 4, 3), (2,))
    assert cosine(one, two) == pytest.approx(24 / 25)
    assert cosine(one, PooledOutput(struct.pack("<2f", 0, 0), (2,))) == 0
