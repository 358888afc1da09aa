"""Block hashes: equal content gives equal hashes, other content other ones, in every process and by every route."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from typing import Any

import cbor2
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import ConfigError, RequestError
from quire_kv_cache import BlockHasher, hash_blocks
from quire_testkit.conformance.block_allocator import make_request

ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
TOKENS = st.integers(0, 2**32 - 1)
SPANS = st.tuples(st.integers(0, 12), st.integers(1, 6), st.sampled_from(["a", "b", "ab", ""])).map(
    lambda span: (span[0], span[0] + span[1], span[2])
)


def test_sha256_chain_is_what_the_documentation_says() -> None:
    root = hashlib.sha256(b"quire kv cache: root of the block hash chain, version 1, sha256").digest()
    first = hashlib.sha256(root + struct.pack("<2I", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 2**32 - 1)).digest()
    assert hash_blocks([1, 2, 3, 2**32 - 1, 5], 2) == [first, second]


def test_cbor_chain_is_what_the_documentation_says() -> None:
    root = xxhash.xxh3_128_digest(b"quire kv cache: root of the block hash chain, version 1, xxhash_cbor")
    first = xxhash.xxh3_128_digest(cbor2.dumps([root, [1, 2], None], canonical=True))
    salted = xxhash.xxh3_128_digest(cbor2.dumps([root, [1, 2], [[0, 0, 0, "s"]]], canonical=True))
    assert hash_blocks([1, 2], 2, algorithm="xxhash_cbor") == [first]
    assert hash_blocks([1, 2], 2, algorithm="xxhash_cbor", cache_salt="s") == [salted]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_in_another_process(algorithm: str) -> None:
    code = f"from quire_kv_cache import hash_blocks; print(hash_blocks(range(8), 4, algorithm={algorithm!r})[1].hex())"
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert run.stdout.strip() == hash_blocks(range(8), 4, algorithm=algorithm)[1].hex()


def test_algorithms_do_not_meet() -> None:
    assert len({hash_blocks(range(4), 4, algorithm=algorithm)[0] for algorithm in ALGORITHMS}) == 4


@settings(deadline=None)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    block_size=st.sampled_from([1, 2, 4]),
    tokens=st.lists(TOKENS, max_size=14),
    cuts=st.lists(st.integers(0, 14), max_size=3),
    salt=st.none() | st.sampled_from(["", "x"]),
    keys=st.lists(SPANS, max_size=3).map(tuple),
)
def test_extending_in_pieces_equals_hashing_at_once(
    algorithm: str, block_size: int, tokens: list[int], cuts: list[int], salt: str | None, keys: Any
) -> None:
    whole = hash_blocks(tokens, block_size, algorithm=algorithm, cache_salt=salt, extra_keys=keys)
    assert len(whole) == len(tokens) // block_size
    hasher = BlockHasher(algorithm, block_size)
    request = make_request("a", tokens[: min(cuts, default=0)], cache_salt=salt, cache_extra_keys=keys)
    for cut in [*sorted(cuts), len(tokens)]:
        request.output_token_ids = tokens[request.num_prompt_tokens : max(cut, request.num_prompt_tokens)]
        hasher.extend(request)
    assert request.block_hashes == whole


@settings(deadline=None)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    first=st.tuples(
        st.lists(st.integers(0, 1), min_size=4, max_size=8),
        st.none() | st.sampled_from(["a", ""]),
        st.lists(SPANS, max_size=2),
    ),
    second=st.tuples(
        st.lists(st.integers(0, 1), min_size=4, max_size=8),
        st.none() | st.sampled_from(["a", ""]),
        st.lists(SPANS, max_size=2),
    ),
)
def test_hashes_are_equal_exactly_when_the_content_is(algorithm: str, first: Any, second: Any) -> None:
    def content(end_block: int, tokens: list[int], salt: str | None, keys: list[Any]) -> Any:
        spans = [
            [
                (max(start - 2 * b, 0), min(end - 2 * b, 2), key)
                for start, end, key in keys
                if start < 2 * b + 2 and end > 2 * b
            ]
            for b in range(end_block)
        ]
        return tokens[: 2 * end_block], salt, spans

    hashes = [hash_blocks(t, 2, algorithm=algorithm, cache_salt=s, extra_keys=k) for t, s, k in (first, second)]
    for block in range(min(map(len, hashes))):
        same_content = content(block + 1, *first) == content(block + 1, *second)
        assert (hashes[0][block] == hashes[1][block]) == same_content


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_part_of_an_extra_key_counts(algorithm: str) -> None:
    def last(*keys: tuple[int, int, str], salt: str | None = None) -> bytes:
        return hash_blocks([7] * 8, 4, algorithm=algorithm, extra_keys=keys, cache_salt=salt)[-1]

    variants = [
        last(),
        last(salt="a"),
        last(salt=""),
        last((0, 1, "a")),
        last((0, 1, "")),
        last((0, 2, "a")),
        last((1, 2, "a")),
        last((0, 1, "a"), (1, 2, "b")),
        last((0, 1, "ab"), (1, 2, "")),
        last((4, 5, "a")),
        last((0, 8, "a")),
        last((0, 4, "a"), (4, 8, "a")),
    ]
    # The last two say the same of every block: one span over both, or one span per block.
    assert variants[-1] == variants[-2]
    assert len(set(variants[:-1])) == len(variants) - 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_cannot_spell_two_keys(algorithm: str) -> None:
    """Whoever chooses a key's text could else write another request's keys, borders and all, into it."""
    lengths = [struct.pack("<I", length) for length in (0, 1, 2, 3)]  # what might stand there for the second key's
    for border in (struct.pack("<BII", 1, 0, 4) + length for length in (b"", *lengths)):
        two = hash_blocks([7] * 4, 4, algorithm=algorithm, extra_keys=((0, 4, "x"), (0, 4, "y")))
        one = hash_blocks([7] * 4, 4, algorithm=algorithm, extra_keys=((0, 4, f"x{border.decode()}y"),))
        assert one != two, border
    split = [
        hash_blocks([7] * 4, 4, algorithm=algorithm, extra_keys=((0, 4, a), (0, 4, b)))
        for a, b in (("ab", "c"), ("a", "bc"), ("abc", ""))
    ]
    assert len(set(map(tuple, split))) == 3


def test_a_key_beyond_the_block_does_not_count() -> None:
    with_key = hash_blocks(range(8), 4, extra_keys=((4, 8, "a"),))
    without = hash_blocks(range(8), 4)
    assert with_key[0] == without[0]
    assert with_key[1] != without[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_impossible_token_ids_are_the_requests_error(algorithm: str, bad: Any) -> None:
    request = make_request("a", [1, 2, bad, 4])
    with pytest.raises(RequestError, match="token ids must be integers") as error:
        BlockHasher(algorithm, 2).extend(request)
    assert repr(bad) in str(error.value)
    assert request.block_hashes == []


def test_impossible_hashers_are_refused() -> None:
    with pytest.raises(ConfigError, match="md5"):
        BlockHasher("md5")
    with pytest.raises(ConfigError, match="block_size"):
        hash_blocks([1], 0)
