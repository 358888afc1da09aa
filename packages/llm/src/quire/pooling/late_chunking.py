"""Late chunking (Günther et al. 2024, arXiv 2409.04701): parts of a text are read together, and each gets an embedding.

Importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire_interfaces import PooledOutput, PoolingParams, RequestError, Tokenizer

__all__ = ["join_chunks", "split_vectors"]


def join_chunks(
    tokenizer: Tokenizer, chunks: Sequence[str | list[int]], params: PoolingParams, instruction: str = ""
) -> tuple[list[int], PoolingParams]:
    """Parts as one text. Special tokens stand around all of them, and belong to none.

    Args:
        tokenizer: The model's.
        chunks: Texts, each tokenized by itself, or token ids.
        params: What is asked of the embeddings.
        instruction: Text before the first part, which belongs to none either.

    Returns:
        Token ids, and the parameters with the places of the parts.

    Raises:
        RequestError: a part without tokens; `param` is its place, "input[3]".
    """
    before, behind = _special_tokens(tokenizer)
    token_ids = [*before, *(tokenizer.encode(instruction, add_special_tokens=False) if instruction else ())]
    edges = [len(token_ids)]
    for place, chunk in enumerate(chunks):
        own = tokenizer.encode(chunk, add_special_tokens=False) if isinstance(chunk, str) else chunk
        if not own:
            raise RequestError(
                f"input[{place}] has no tokens, and late_chunking embeds the tokens of each part; leave it out",
                param=f"input[{place}]",
            )
        token_ids += own
        edges.append(len(token_ids))
    return [*token_ids, *behind], dataclasses.replace(params, late_chunk_edges=tuple(edges))


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Special tokens before and behind a text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    places = range(len(whole) - len(plain) + 1)
    start = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


def split_vectors(pooled: PooledOutput) -> list[PooledOutput]:
    """The vectors [dimensions] of parts, of [parts, dimensions]."""
    num_parts, width = pooled.shape
    return [PooledOutput(pooled.data[4 * width * part : 4 * width * (part + 1)], (width,)) for part in range(num_parts)]
