"""Prompts with media for the tiny networks of `MEDIA_CASES`."""

from __future__ import annotations

import random
from typing import Any

import torch
from models_paged_driver import PagedDriver
from torch import Tensor

from quire_models import Network
from quire_testkit.parity.media_items import PLACEHOLDER, START, joined_arrays, media_item, media_tokens
from quire_testkit.parity.media_prompts import oracle_inputs, oracle_positions


class MediaPrompt:
    """Text with items between, as a network of Quire's and one of Transformers' take it."""

    def __init__(self, network: Network, architecture: str, num_items: int) -> None:
        """Args:
        architecture: A name of `MEDIA_CASES`.
        """
        rng = random.Random(num_items)
        self._items = [media_item(architecture, index) for index in range(num_items)]
        self._is_cross = bool(network.config.media and network.config.media.cross_attention_layers)
        num_leading = 0 if self._is_cross and num_items else 9  # they would see all items in Transformers
        self.token_ids = [rng.randrange(3, 180) for _ in range(num_leading)]
        self.embeds: dict[int, Tensor] = {}
        """Token -> its row."""
        self.cross: list[tuple[int, Tensor]] = []
        """First token that attends to an item, and the item's embeddings."""
        for modality, item in self._items:
            rows = network.encode_media(modality, [item])[0]
            if self._is_cross:
                self.cross.append((len(self.token_ids), rows))
                self.token_ids += [PLACEHOLDER, *(rng.randrange(3, 180) for _ in range(7))]
                continue
            start = len(self.token_ids) + 1
            self.token_ids += [START, *media_tokens(item, len(rows)), *(rng.randrange(3, 180) for _ in range(7))]
            self.embeds.update({start + row: embed for row, embed in enumerate(rows)})
        spec = network.config.media
        self._prefix_len = len(self.token_ids) if spec is not None and spec.is_prefix_lm and num_items else 0
        self._sees_whole_spans = spec is not None and spec.is_bidirectional and not spec.is_prefix_lm
        self._architecture = architecture

    def oracle_inputs(self, model: Any) -> dict[str, Tensor]:
        """Arguments of the whole network's forward."""
        arrays = joined_arrays(self._architecture, [item for _, item in self._items])
        return oracle_inputs(
            model, self.token_ids, arrays, has_whole_spans=self._sees_whole_spans, prefix_len=self._prefix_len
        )

    def positions(self, model: Any) -> Tensor | None:
        """[3, tokens] of M-RoPE as Transformers counts them; None where there is one position each."""
        return oracle_positions(model, self.oracle_inputs(model))

    def logits(self, network: Network, chunk: int, positions: Tensor | None = None) -> Tensor:
        """[tokens, vocab_size], computed `chunk` tokens at a time."""
        driver = PagedDriver(network, block_size=16, shuffle=True)  # type: ignore[arg-type]
        seq = driver.add(self.token_ids)
        seq.embeds, seq.positions, seq.prefix_len = self.embeds, positions, self._prefix_len
        seq.cross = self.cross
        while seq.num_computed < len(seq.token_ids):
            end = min(max(seq.num_computed + chunk, self._prefix_len), len(seq.token_ids))
            while self._sees_whole_spans and end in self.embeds and end - 1 in self.embeds:
                end += 1  # spans are not cut
            driver.step((seq, end - seq.num_computed))
        return torch.stack(seq.logits)
