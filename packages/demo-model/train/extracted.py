"""Training batches from hidden states that an engine has written (`--extract-hidden-states`).

Knows the files: `token_ids` [T], `hidden_states` [T, layers, hidden size]. Every token but a request's last is learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from batches import MicroBatch, Row, pack
from safetensors.torch import load_file
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class ExtractedBatch(MicroBatch):
    """A micro-batch whose features are known.

    Attributes:
        features: [R, T, layers * D].
    """

    features: Tensor


def extracted(folder: Path, seed: int, num_tokens: int, micro_batches: int, pad_id: int) -> Iterator[list[MicroBatch]]:
    """Steps of micro-batches of at most ``num_tokens`` places, without end, in an order that the seed decides.

    Raises:
        ValueError: The folder has too few files for a step.
    """
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    files = [tensors for tensors in files if 8 < len(tensors["token_ids"]) <= num_tokens - 32]
    files.sort(key=lambda tensors: len(tensors["token_ids"]))
    packed: list[MicroBatch] = []
    while files:
        # Rows are as long as the longest one, rounded up.
        count = max(1, num_tokens // (len(files[-1]["token_ids"]) + 32))
        packed.append(_batch(files[-count:], num_tokens, pad_id))
        del files[-count:]
    if len(packed) < micro_batches:
        raise ValueError(f"{folder} has states for {len(packed)} micro-batches, and a step takes {micro_batches}")
    rng = Random(seed)
    while True:
        rng.shuffle(packed)
        for first in range(0, len(packed) - micro_batches + 1, micro_batches):
            yield packed[first : first + micro_batches]


def _batch(files: list[dict[str, Tensor]], num_tokens: int, pad_id: int) -> ExtractedBatch:
    rows = [Row(tensors["token_ids"].tolist(), [True] * len(tensors["token_ids"])) for tensors in files]
    m = pack(rows, num_tokens, pad_id)
    width = files[0]["hidden_states"][0].numel()
    features = torch.zeros(m.rows, m.row_len, width, dtype=files[0]["hidden_states"].dtype)
    for row, tensors in enumerate(files):
        states = tensors["hidden_states"].flatten(1)
        features[row, : len(states)] = states
    return ExtractedBatch(
        ids=m.ids,
        rows=m.rows,
        row_len=m.row_len,
        chosen=m.chosen,
        labels=np.asarray(m.labels),
        is_new=m.is_new,
        features=features,
    )
