"""The files of a tokenizer in one zip archive, for gateways that tokenize elsewhere. Knows no protocol."""

from __future__ import annotations

import functools
import hashlib
import io
import threading
import zipfile
from pathlib import Path

from quire_interfaces import RequestError

__all__ = ["TokenizerArchive"]

PATTERNS = (
    "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "*.jinja", "*.model",
    "*.tiktoken", "tekken.json", "tokenizer.tok.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""Names of the files of a checkpoint that tell texts from tokens, and conversations from texts."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The same files give the same bytes, whenever they were written."""


class TokenizerArchive:
    """Of one checkpoint; made when it is read first.

    Args:
        folder: Of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def read(self) -> tuple[bytes, str]:
        """The archive, and its SHA-256 as hexadecimal digits. From any thread.

        Raises:
            RequestError: the checkpoint has no such files.
        """
        with self._lock:
            return self._made

    @functools.cached_property
    def _made(self) -> tuple[bytes, str]:
        paths = sorted({path for pattern in PATTERNS for path in self._folder.glob(pattern) if path.is_file()})
        if not paths:
            raise RequestError("the served checkpoint has no files of a tokenizer", code="unsupported")
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in paths:
                archive.writestr(zipfile.ZipInfo(path.name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
        content = file.getvalue()
        return content, hashlib.sha256(content).hexdigest()
