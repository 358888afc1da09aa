"""What tells one model's blocks from all others: a digest of everything that KV depends on beside the tokens.

Weights enter by their content, not by path or time: a checkpoint that was copied or downloaded anew finds its blocks,
and one that was trained on does not find those of its former self. Reading gigabytes at each start would be slow, so
the digest is remembered in the tier's folder under the files' paths, sizes, times and inodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_interfaces import KVCachePlan

__all__ = ["layout_facts", "model_fingerprint", "weights_digest"]

_FOLDER = "weights"
_HEX_DIGITS = 64


def model_fingerprint(facts: Mapping[str, Any]) -> bytes:
    """32 bytes that depend on every fact (plain data: text, numbers, lists, dictionaries)."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(b"quire kv tier, version 3\0" + text.encode()).digest()


def layout_facts(plan: KVCachePlan) -> list[Any]:
    """Which layers' bytes a block has, in which order and form, per group; how many there are does not matter."""
    return [
        {"kind": type(group.spec).__name__, "spec": _fields(group.spec), "layers": list(group.layer_names)}
        for group in plan.groups
    ]


def _fields(spec: Any) -> dict[str, Any]:
    names = sorted(name for kind in type(spec).__mro__ for name in getattr(kind, "__dataclass_fields__", ()))
    return {name: getattr(spec, name) for name in names}


def weights_digest(files: Sequence[Path], root: str | None) -> str:
    """SHA-256 of the files' content, as hexadecimal digits.

    Args:
        files: Everything that makes the model: weights and configuration.
        root: The tier's folder, which remembers the digest of files that have not changed; None where there is none.

    Raises:
        OSError: a file cannot be read.
    """
    memory = None if root is None else os.path.join(root, _FOLDER, _stat_digest(files))
    with contextlib.suppress(OSError, ValueError):
        text = "" if memory is None else Path(memory).read_text(encoding="ascii")
        if len(text) == _HEX_DIGITS and int(text, 16) >= 0:
            return text
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    if memory is not None:
        _remember(memory, digest.hexdigest())
    return digest.hexdigest()


def _stat_digest(files: Sequence[Path]) -> str:
    facts = []
    for file in files:
        path = file.resolve()
        stat = path.stat()
        facts.append([str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _remember(path: str, digest: str) -> None:
    """Next time is quicker; if it cannot be written, it is not."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        Path(temporary).write_text(digest, encoding="ascii")
        os.rename(temporary, path)
