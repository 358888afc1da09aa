"""Prompts with media for the whole engine and for Transformers. Imports torch."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_interfaces import MediaSpan, PromptMedia
from quire_testkit.parity.media_items import PLACEHOLDER, START, joined_arrays, media_item, media_tokens, stored_item
from quire_testkit.parity.oracle import Continuation

__all__ = ["MediaPrompt", "media_continuation", "media_prompt", "oracle_inputs", "oracle_positions"]


class MediaPrompt(NamedTuple):
    """Text and items by turns."""

    token_ids: list[int]
    media: PromptMedia | None
    arrays: dict[str, Tensor]
    """Arguments of the network of Transformers: the arrays of all items."""
    has_whole_spans: bool

    @property
    def longest_span(self) -> int:
        """Tokens that have to be computed in one step; 0 where spans may be cut."""
        if self.media is None:
            return 0
        spans = self.media.spans if self.has_whole_spans else ()
        return max((span.length for span in spans), default=self.media.prefix_len)


def media_prompt(network: Any, oracle: Any, items: list[int], folder: Path) -> MediaPrompt:
    """A prompt with these items, between texts of seven tokens.

    Args:
        network: Quire's; says how many embeddings items have.
        oracle: The network of Transformers; counts positions for M-RoPE.
        items: Numbers of `media_item`; one where a sound is added to all tokens.
        folder: Where the items' files go.
    """
    spec, rng = network.config.media, random.Random(str(items))
    if spec.is_added:
        return _added_prompt(network, items[0], folder)
    is_cross = bool(spec.cross_attention_layers)  # tokens before the first item would see all items in Transformers
    token_ids, spans = rng.choices(range(3, 180), k=(0 if is_cross else 9) if items else 70), []
    arrays: list[dict[str, Tensor]] = []
    for number in items:
        modality, item = media_item(spec.architecture, number)
        num_embeds = len(network.encode_media(modality, [item])[0])
        stored = stored_item(folder / f"{spec.architecture}-{number}", modality, item, num_embeds)
        own = [PLACEHOLDER] if is_cross else [START, *media_tokens(item, num_embeds)]
        embeds = () if is_cross else ((1, num_embeds + 1),)
        spans.append(MediaSpan(item=stored, start=len(token_ids), length=len(own), embeds=embeds))
        token_ids += [*own, *rng.choices(range(3, 180), k=0 if is_cross and number == 1 else 20 if is_cross else 7)]
        arrays.append(item)
    joined = joined_arrays(spec.architecture, arrays)
    media = PromptMedia(spans=tuple(spans))
    if is_cross:
        media = media.as_cross_attended()
    if spec.is_prefix_lm:
        media = media.as_prefix(token_ids)
    prompt = MediaPrompt(token_ids, media, joined, spec.is_bidirectional and not spec.is_prefix_lm)
    if not items:
        return prompt._replace(media=None)
    positions = oracle_positions(oracle, _inputs(prompt, token_ids, oracle))
    if positions is None:
        return prompt
    media = PromptMedia(
        spans=tuple(spans),
        positions=positions.to(torch.int32).numpy().tobytes(),
        num_position_axes=len(positions),
        position_delta=int(positions[0, -1]) + 1 - len(token_ids),
    )
    return prompt._replace(media=media)


def _added_prompt(network: Any, number: int, folder: Path) -> MediaPrompt:
    """A text under which the beginning of a sound lies; the rest lies under what is generated."""
    spec = network.config.media
    modality, item = media_item(spec.architecture, number)
    length = len(network.encode_media(modality, [item])[0])
    stored = stored_item(folder / f"{spec.architecture}-{number}", modality, item, length)
    span = MediaSpan(item=stored, start=0, length=length, embeds=((0, length),))
    token_ids = random.Random(number).choices(range(3, 180), k=20)
    return MediaPrompt(token_ids, PromptMedia(spans=(span,)), item, False)


def _inputs(prompt: MediaPrompt, token_ids: list[int], oracle: Any) -> dict[str, Tensor]:
    prefix_len = 0 if prompt.media is None else prompt.media.prefix_len
    return oracle_inputs(
        oracle, token_ids, prompt.arrays, has_whole_spans=prompt.has_whole_spans, prefix_len=prefix_len
    )


def oracle_inputs(
    oracle: Any, token_ids: list[int], arrays: dict[str, Tensor], *, has_whole_spans: bool, prefix_len: int = 0
) -> dict[str, Tensor]:
    """Arguments of a network of Transformers for one sequence with items.

    Args:
        oracle: The network.
        token_ids: The sequence.
        arrays: Of all its items (`joined_arrays`).
        has_whole_spans: Tokens of an image see those behind them in the image.
        prefix_len: Tokens that all see one another.
    """
    ids = torch.tensor([token_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **arrays}
    if (num_frames := _added_frames(oracle)) and arrays:
        return {**inputs, "input_features": arrays["input_features"][..., : num_frames * len(token_ids)]}
    if _requires_pixels(oracle):
        inputs.setdefault("pixel_values", torch.zeros(1, 3, 32, 32))  # of an image that no token stands for
    known = inspect.signature(oracle.forward).parameters
    if has_whole_spans and "token_type_ids" in known:
        inputs["token_type_ids"] = (ids == PLACEHOLDER).long()
    if "cross_attention_mask" in known and arrays:
        inputs["cross_attention_mask"] = _cross_attention_mask(token_ids, arrays["aspect_ratio_mask"])
    if prefix_len:
        inputs["token_type_ids"] = (torch.arange(len(token_ids)) >= prefix_len).long()[None]
    if hasattr(_body(oracle), "get_rope_index") or (has_whole_spans and "mm_token_type_ids" in known):
        inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).long()
    if "moe_mm_token_type_ids" in known:
        inputs["moe_mm_token_type_ids"] = ((ids == PLACEHOLDER) | (ids == START)).long()
    return inputs


def _cross_attention_mask(token_ids: list[int], tiles: Tensor) -> Tensor:
    """[1, tokens, items, tiles] int64: what the processor says of a sequence whose items have these tiles,
    [1, items, tiles]."""
    from transformers.models.mllama import processing_mllama as processing

    spans = processing.get_cross_attention_token_mask(token_ids, PLACEHOLDER)
    num_tiles = tiles[0].sum(-1).tolist()
    return torch.from_numpy(
        processing.convert_sparse_cross_attention_mask_to_dense([spans], [num_tiles], tiles.shape[-1], len(token_ids))
    )


def _added_frames(oracle: Any) -> int:
    """Frames of a sound that are added to one token; 0 where media take the place of tokens."""
    return int(getattr(oracle.config, "audio_length_per_tok", 0))


def _requires_pixels(oracle: Any) -> bool:
    pixels = inspect.signature(oracle.forward).parameters.get("pixel_values")
    return pixels is not None and pixels.default is inspect.Parameter.empty


def oracle_positions(oracle: Any, inputs: dict[str, Tensor]) -> Tensor | None:
    """[axes, tokens] int64 of M-RoPE as Transformers counts them; None where positions are counted one by one."""
    count = getattr(_body(oracle), "get_rope_index", None)
    if count is None:
        return None
    known = inspect.signature(count).parameters
    positions: Tensor = count(**{name: value for name, value in inputs.items() if name in known})[0]
    return positions[:, 0].long()


def _body(oracle: Any) -> Any:
    return getattr(oracle, "model", oracle)


@torch.inference_mode()
def media_continuation(oracle: Any, prompt: MediaPrompt, num_tokens: int) -> Continuation:
    """Greedy tokens after the prompt, each from the whole sequence: `num_tokens`, or those up to one that stands for
    media, which Transformers would look for an item of."""
    token_ids, logits = list(prompt.token_ids), []
    for _ in range(num_tokens):
        logits.append(oracle(**_inputs(prompt, token_ids, oracle), use_cache=False).logits[0, -1].float())
        token_ids.append(int(logits[-1].argmax()))
        if token_ids[-1] >= PLACEHOLDER and not _added_frames(oracle):
            break
    return Continuation(token_ids[len(prompt.token_ids) :], torch.stack(logits))
