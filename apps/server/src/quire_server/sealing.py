"""Thoughts and summaries as the opaque contents that clients keep and send back.

Thoughts are encrypted and authenticated with a key of the server's, so that nobody reads or changes them on the way.
Summaries are only packed: whoever loses one loses the conversation, so they outlive every key. Neither raises for what
another server wrote.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import zlib
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Sealer", "Summary", "kept_key", "make_sealer", "open_summary", "pack_summary"]

_NONCE_BYTES, _TAG_BYTES, _KEY_BYTES = 16, 32, 32
_SEALED, _SUMMARY = b"quire-thoughts-1:", b"quire-summary-1:"
_SEALED_SUMMARIES = (b"quire-summary-2:", b"quire-summary-3:")
"""Marks of those that do not replace what was before them, and of those that do."""
_MAX_CHARS = 16 * 2**20


class Sealer:
    """Encrypts and authenticates texts: a key stream of SHAKE-256, and a keyed BLAKE2b over nonce and cipher text.

    Args:
        key: Secret bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._stream_key = hashlib.blake2b(b"stream", key=key, digest_size=_KEY_BYTES).digest()
        self._tag_key = hashlib.blake2b(b"tag", key=key, digest_size=_KEY_BYTES).digest()

    def seal(self, text: str, mark: bytes = _SEALED) -> str:
        """The text as base64 that only `open` of the same key reads, and of the same mark, which says what it is."""
        plain, nonce = text.encode("utf-8", "replace"), secrets.token_bytes(_NONCE_BYTES)
        covered = nonce + self._mixed(plain, nonce)
        return base64.b64encode(mark + covered + self._tag(mark, covered)).decode()

    def open(self, sealed: Any, mark: bytes = _SEALED) -> str | None:
        """The text; None for what was not sealed with this key and mark."""
        content = _decoded(sealed, mark)
        if content is None or len(content) < _NONCE_BYTES + _TAG_BYTES:
            return None
        covered, tag = content[:-_TAG_BYTES], content[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(mark, covered)):
            return None
        return self._mixed(covered[_NONCE_BYTES:], covered[:_NONCE_BYTES]).decode()

    def _mixed(self, data: bytes, nonce: bytes) -> bytes:
        stream = hashlib.shake_256(self._stream_key + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def _tag(self, mark: bytes, covered: bytes) -> bytes:
        covered = covered if mark == _SEALED else mark + covered
        return hashlib.blake2b(covered, key=self._tag_key, digest_size=_TAG_BYTES).digest()


def make_sealer(store_path: Path | None, owner: str) -> Sealer:
    """With the key beside the response store, so that a restarted server reads what it wrote; without such a file with
    the owner's hash, or else with a key of this process. What was sealed for one owner is nothing to another.

    Args:
        store_path: The file in which responses are kept; None where there is none.
        owner: Whose texts these are (`quire_server.callers.Caller.owner`); "" on a server without keys.
    """
    key = b""
    if store_path is not None:
        with contextlib.suppress(OSError):
            key = kept_key(Path(f"{store_path.expanduser()}.key"))
    if owner:
        return Sealer(hashlib.blake2b(owner.encode(), key=key, person=b"quire-thoughts").digest())
    return Sealer(key or secrets.token_bytes(_KEY_BYTES))


def kept_key(path: Path) -> bytes:
    """The secret key in a file, made when it is missing. Two servers that begin together agree on one.

    Raises:
        OSError: the file cannot be read or made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink()
    key = path.read_bytes()
    if len(key) < _KEY_BYTES:
        raise OSError(f"{path} holds no key")
    return key[:_KEY_BYTES]


class Summary(NamedTuple):
    """What a compaction item holds."""

    text: str
    replaces: bool
    """Whether it stands for all that was said before it, up to the last message of the user; else its client has left
    out what it replaces."""


def pack_summary(summary: Summary, sealer: Sealer | None = None) -> str:
    """A summary as the content of a compaction item.

    Args:
        sealer: Its owner's; None where nobody is told from anybody: then it is packed only, and outlives every key.
    """
    if sealer is not None:
        return sealer.seal(summary.text, _SEALED_SUMMARIES[summary.replaces])
    data = bytes([summary.replaces]) + summary.text.encode("utf-8", "replace")
    return base64.b64encode(_SUMMARY + zlib.crc32(data).to_bytes(4, "big") + data).decode()


def open_summary(packed: Any, sealer: Sealer | None = None) -> Summary | None:
    """The summary; None for what another server wrote, what was sealed for another owner, or what was damaged."""
    content = _decoded(packed, _SUMMARY)
    if content is None:
        opened = [None if sealer is None else sealer.open(packed, mark) for mark in _SEALED_SUMMARIES]
        return next((Summary(text, bool(place)) for place, text in enumerate(opened) if text is not None), None)
    if len(content) < 5 or zlib.crc32(content[4:]) != int.from_bytes(content[:4], "big"):
        return None
    with contextlib.suppress(UnicodeDecodeError):
        return Summary(content[5:].decode(), bool(content[4]))
    return None


def _decoded(value: Any, mark: bytes) -> bytes | None:
    if not isinstance(value, str) or len(value) > _MAX_CHARS:
        return None
    with contextlib.suppress(ValueError):
        content = base64.b64decode(value, validate=True)
        return content.removeprefix(mark) if content.startswith(mark) else None
    return None
