"""Block hashes: a chain in which each hash names a block's tokens and everything before them.

    hash[i] = H(hash[i-1] || token ids of block i || extra keys of block i)
    encoder = H(root || number of tokens || all tokens that the encoder reads || all extra keys)

Two blocks with equal hashes hold the same KV, so a hash is the key under which a block can be shared. The chain starts
from a constant, so the same prompt has the same hashes in every process and on every machine (routers and offload
stores rely on it); tenants are kept apart by `cache_salt`, which enters the first block and so every later one. Where
there is an encoder, all that the decoder computes depends on what it read: its chain starts from the encoder's hash.

This module knows tokens, keys and digests; it knows nothing of blocks in memory.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from quire_interfaces import ConfigError, RequestError
from quire_kv_cache.config import HASH_ALGORITHMS

if TYPE_CHECKING:
    from quire_interfaces import Request

__all__ = ["BlockHasher", "ExtraKey", "block_extra_keys", "hash_blocks"]

ExtraKey = tuple[int, int, str]
"""(first token, end token, key), as in `Request.cache_extra_keys`."""

_Digest = Callable[[bytes], bytes]
_SALT, _KEY = 0, 1


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class BlockHasher:
    """Hashes token blocks with one algorithm and one block size.

    Args:
        algorithm: "sha256" (32-byte hashes), "xxhash" (XXH3, 16 bytes), or either with "_cbor".
        block_size: Tokens in a block.
    """

    __slots__ = ("_cbor", "_digest", "_one_block", "algorithm", "block_size", "root")

    def __init__(self, algorithm: str = "sha256", block_size: int = 16) -> None:
        if algorithm not in HASH_ALGORITHMS:
            choices = ", ".join(HASH_ALGORITHMS)
            raise ConfigError(
                f"prefix_caching_hash_algo must be one of {choices}, got {algorithm!r}",
                field="prefix_caching_hash_algo",
            )
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}", field="block_size")
        self.algorithm = algorithm
        self.block_size = block_size
        self._one_block = struct.Struct(f"<{block_size}I")
        self._cbor = algorithm.endswith("_cbor")
        self._digest: _Digest = _sha256
        if not algorithm.startswith("sha256"):
            import xxhash  # only these two algorithms need it

            self._digest = xxhash.xxh3_128_digest
        self.root = self._digest(b"quire kv cache: root of the block hash chain, version 1, " + algorithm.encode())
        """Stands where the first block's parent hash would be."""

    def extend(self, request: Request) -> None:
        """Append to `request.block_hashes` the hashes of all whole blocks of known tokens that it lacks.

        Raises:
            RequestError: a token id is not an integer from 0 to 2**32 - 1; `block_hashes` is unchanged.
        """
        hashes = request.block_hashes
        size = self.block_size
        num_done = len(hashes)
        num_blocks = request.num_tokens // size
        if num_blocks <= num_done:
            return
        tokens = request.token_ids(num_done * size, num_blocks * size)
        if num_blocks == num_done + 1 and num_done and not request.cache_extra_keys and not self._cbor:
            # The block that a decode completes: most calls are for one. A salt enters only the first block.
            try:
                packed = self._one_block.pack(*tokens)
            except struct.error:
                packed = _pack(tokens, size)  # says what is wrong
            hashes.append(self._digest(hashes[-1] + packed))
            return
        parent = hashes[-1] if hashes else self.encoder_hash(request) if request.encoder_token_ids else None
        hashes.extend(self.hash(tokens, parent, num_done, request.options.cache_salt, request.cache_extra_keys))

    def encoder_hash(self, request: Request) -> bytes:
        """Of the whole encoder input: every output of an encoder depends on all of it. Kept in the request.

        Raises:
            RequestError: a token id is not an integer from 0 to 2**32 - 1.
        """
        if not request.encoder_hash:
            request.encoder_hash = self.hash_encoder(
                request.encoder_token_ids, request.options.cache_salt, request.cache_extra_keys
            )
        return request.encoder_hash

    def hash_encoder(
        self, token_ids: Sequence[int], cache_salt: str | None = None, extra_keys: Sequence[ExtraKey] = ()
    ) -> bytes:
        """The hash of these tokens as an encoder's input. Raises as `encoder_hash` does."""
        keys = [(_KEY, start, end, key) for start, end, key in extra_keys]
        if cache_salt is not None:
            keys.append((_SALT, 0, 0, cache_salt))
        count = len(token_ids)
        packed = _pack(token_ids, count)
        return self._digest(self.root + b"encoder" + struct.pack("<I", count) + packed + _encode(keys))

    def encoder_block_hashes(self, request: Request) -> list[bytes]:
        """Of the blocks that hold the keys and values of the encoder input, the last one perhaps not filled."""
        num_blocks = -(-len(request.encoder_token_ids) // self.block_size)
        whole = self.encoder_hash(request)
        return [self._digest(whole + b"encoder block" + struct.pack("<I", block)) for block in range(num_blocks)]

    def hash(
        self,
        token_ids: Sequence[int],
        parent: bytes | None = None,
        first_block: int = 0,
        cache_salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
    ) -> list[bytes]:
        """Hashes of the whole blocks of `token_ids`, which begin at block `first_block` of their sequence.

        Args:
            token_ids: Known tokens; those after the last whole block are ignored.
            parent: Hash of the block before; None at the beginning of a sequence.
            first_block: Index of the first block, to place `extra_keys` and the salt.
            cache_salt: Enters the hash of block 0.
            extra_keys: Spans of the whole sequence whose content the token ids do not identify.

        Raises:
            RequestError: a token id is not an integer from 0 to 2**32 - 1.
        """
        size = self.block_size
        num_blocks = len(token_ids) // size
        if num_blocks == 0:
            return []
        data = _pack(token_ids, num_blocks * size)
        extras = _extras_per_block(first_block, first_block + num_blocks, size, cache_salt, extra_keys)
        if self._cbor:
            return self._hash_cbor(token_ids, self.root if parent is None else parent, first_block, num_blocks, extras)
        return self._hash_packed(data, self.root if parent is None else parent, first_block, extras)

    def _hash_packed(
        self, data: bytes, parent: bytes, first_block: int, extras: dict[int, list[tuple[int, int, int, str]]]
    ) -> list[bytes]:
        blocks = struct.iter_unpack(f"{4 * self.block_size}s", data)
        if not extras:
            # One hash per block of a long prompt: everything that can stand outside the loop does.
            if self._digest is _sha256:
                sha256 = hashlib.sha256
                return [parent := sha256(parent + block).digest() for (block,) in blocks]
            digest = self._digest
            return [parent := digest(parent + block) for (block,) in blocks]
        hashes = []
        for index, (block,) in enumerate(blocks, first_block):
            parent = self._digest(parent + block + _encode(extras.get(index, ())))
            hashes.append(parent)
        return hashes

    def _hash_cbor(
        self,
        token_ids: Sequence[int],
        parent: bytes,
        first_block: int,
        num_blocks: int,
        extras: dict[int, list[tuple[int, int, int, str]]],
    ) -> list[bytes]:
        import cbor2  # slow to import, and only these two algorithms need it

        size = self.block_size
        hashes = []
        for i in range(num_blocks):
            tokens = list(token_ids[i * size : (i + 1) * size])
            extra = [list(key) for key in extras.get(first_block + i, ())] or None
            parent = self._digest(cbor2.dumps([parent, tokens, extra], canonical=True))
            hashes.append(parent)
        return hashes


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int = 16,
    *,
    algorithm: str = "sha256",
    cache_salt: str | None = None,
    extra_keys: Sequence[ExtraKey] = (),
) -> list[bytes]:
    """Hashes of the whole blocks of a sequence, equal to those the cache manager computes.

    Raises:
        ConfigError: no such algorithm or block size.
        RequestError: a token id is not an integer from 0 to 2**32 - 1.
    """
    return BlockHasher(algorithm, block_size).hash(token_ids, None, 0, cache_salt, extra_keys)


def block_extra_keys(
    first_block: int, end_block: int, block_size: int, cache_salt: str | None, extra_keys: Sequence[ExtraKey]
) -> list[tuple[str, ...] | None]:
    """Per block in [first_block, end_block): the keys that entered its hash beside tokens, None for none."""
    extras = _extras_per_block(first_block, end_block, block_size, cache_salt, extra_keys)
    return [
        tuple(key for _, _, _, key in extras[block]) if block in extras else None
        for block in range(first_block, end_block)
    ]


def _extras_per_block(
    first_block: int, end_block: int, size: int, cache_salt: str | None, extra_keys: Sequence[ExtraKey]
) -> dict[int, list[tuple[int, int, int, str]]]:
    """Block index -> (kind, first slot, end slot, key) of each key that touches it, in the order given.

    The slots are part of the identity: the same two images meeting at another slot are other content, although
    placeholder tokens and keys are the same.
    """
    extras: dict[int, list[tuple[int, int, int, str]]] = {}
    for start, end, key in extra_keys:
        for block in range(max(start // size, first_block), min(-(-end // size), end_block)):
            base = block * size
            span = (_KEY, max(start - base, 0), min(end - base, size), key)
            extras.setdefault(block, []).append(span)
    if cache_salt is not None and first_block == 0 < end_block:
        extras.setdefault(0, []).append((_SALT, 0, 0, cache_salt))
    return extras


def _encode(extras: Iterable[tuple[int, int, int, str]]) -> bytes:
    """Length-prefixed, so that no two lists of keys have the same bytes."""
    parts = []
    for kind, first_slot, end_slot, key in extras:
        text = key.encode("utf-8", "surrogatepass")
        parts.append(struct.pack("<BIII", kind, first_slot, end_slot, len(text)))
        parts.append(text)
    return b"".join(parts)


def _pack(token_ids: Sequence[int], count: int) -> bytes:
    """The first `count` token ids as little-endian 32-bit integers."""
    tokens = token_ids if len(token_ids) == count else token_ids[:count]
    try:
        data = struct.pack(f"<{count}I", *tokens)
    except struct.error:
        bad = next((token for token in tokens if not _is_token_id(token)), None)
        raise RequestError(
            f"token ids must be integers from 0 to {2**32 - 1}, got {bad!r}", param="prompt_token_ids"
        ) from None
    return data


def _is_token_id(token: object) -> bool:
    return isinstance(token, int) and 0 <= token < 2**32
