"""A small language for the batches that attention is measured on: `q2k*4,8xq1k4k`.

A batch is a list of sequences, separated by commas. `qNUM` is how many tokens a sequence has in the step, `kNUM` how
many in all, those of the step included; without it they are the same: a prompt from its beginning. A number may end in
k, which stands for 1024. `*COUNT` behind a sequence, or `COUNTx` before it, repeats it.

    q2k*4        four prompts of 2048 tokens
    8xq1k4k      eight decodes at 4096 tokens
    q512k8k      the last 512 tokens of a prompt of 8192
    q1kk4k       1024 tokens of 4096 (a k behind the number belongs to it, then comes kNUM)
"""

from __future__ import annotations

import re
from typing import NamedTuple

from quire_interfaces import ConfigError

__all__ = ["MAX_SEQUENCES", "MAX_TOKENS", "SequenceLens", "parse_batch"]

MAX_SEQUENCES = 4096
MAX_TOKENS = 1 << 21
"""Of a batch, in all: what a step's tokens see must fit into memory."""

_TERM = re.compile(r"(?:(\d{1,9})x)?q(\d{1,9})(k?)(?:k(\d{1,9})(k?))?(?:\*(\d{1,9}))?")


class SequenceLens(NamedTuple):
    """Tokens of one sequence."""

    query_len: int
    """In the step; its last ones."""
    kv_len: int
    """In all."""


def parse_batch(text: str) -> list[SequenceLens]:
    """The sequences of a batch.

    Raises:
        ConfigError: The text is not of this language, a sequence has fewer tokens in all than in the step, or the batch
            is larger than `MAX_SEQUENCES` or `MAX_TOKENS`.
    """
    found: list[SequenceLens] = []
    for term in text.replace(" ", "").split(","):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ConfigError(
                f"batch {text!r}: {term!r} is no sequence; write qNUM or qNUMkNUM, with *COUNT for more of them, "
                "for example q2k*4,8xq1k4k",
                field="batch",
            )
        before, query, query_k, kv, kv_k, behind = match.groups()
        query_len = int(query) * (1024 if query_k else 1)
        kv_len = query_len if kv is None else int(kv) * (1024 if kv_k else 1)
        count = int(before or 1) * int(behind or 1)
        if query_len < 1 or count < 1:
            raise ConfigError(f"batch {text!r}: {term!r} has no token; numbers are at least 1", field="batch")
        if kv_len < query_len:
            raise ConfigError(
                f"batch {text!r}: {term!r} has {kv_len} tokens in all, fewer than the {query_len} of the step",
                field="batch",
            )
        if len(found) + count > MAX_SEQUENCES:
            raise ConfigError(f"batch {text!r} has more than {MAX_SEQUENCES} sequences; ask for fewer", field="batch")
        found += [SequenceLens(query_len, kv_len)] * count
    if (total := sum(lens.kv_len for lens in found)) > MAX_TOKENS:
        raise ConfigError(f"batch {text!r} has {total} tokens, at most {MAX_TOKENS} are taken", field="batch")
    return found
