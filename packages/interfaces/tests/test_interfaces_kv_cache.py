"""How many blocks a request holds at most, by what the layers keep: against looking at every position."""

from __future__ import annotations

import pytest

from quire_interfaces import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    LatentAttentionSpec,
    MambaSpec,
    SlidingLatentSpec,
    SlidingWindowSpec,
    StateTensor,
)

SIZES = {"num_kv_heads": 1, "head_dim": 8, "dtype": "bfloat16"}


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 40])
def test_all_tokens(block_size: int, num_tokens: int) -> None:
    spec = FullAttentionSpec(block_size=block_size, **SIZES)  # type: ignore[arg-type]
    assert spec.max_blocks(num_tokens) == len({position // block_size for position in range(num_tokens)})


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_a_window_wherever_it_begins(window: int) -> None:
    spec = SlidingWindowSpec(block_size=4, sliding_window=window, **SIZES)  # type: ignore[arg-type]
    read = [{place // 4 for place in range(max(position - window + 1, 0), position + 1)} for position in range(40)]
    for num_tokens in range(1, 41):
        most = max(map(len, read[:num_tokens]))
        assert most <= spec.max_blocks(num_tokens) <= -(-num_tokens // 4)
    assert spec.max_blocks(40) == max(map(len, read))
    latent = SlidingLatentSpec(block_size=4, sliding_window=window, width=24, dtype="bfloat16")
    assert [latent.max_blocks(num) for num in range(1, 41)] == [spec.max_blocks(num) for num in range(1, 41)]
    assert latent.block_bytes == LatentAttentionSpec(block_size=4, width=24, dtype="bfloat16").block_bytes == 192


def test_a_chunk() -> None:
    spec = ChunkedLocalSpec(block_size=4, chunk_tokens=8, **SIZES)  # type: ignore[arg-type]
    assert [spec.max_blocks(num_tokens) for num_tokens in (1, 4, 5, 8, 9, 100)] == [1, 1, 2, 2, 2, 2]


def test_a_state_and_the_one_before_it() -> None:
    spec = MambaSpec(block_size=4, states=(StateTensor("ssm", (3,), "float32"),))
    assert [spec.max_blocks(num_tokens) for num_tokens in (1, 4, 5, 8, 9, 100)] == [1, 1, 2, 2, 2, 2]
