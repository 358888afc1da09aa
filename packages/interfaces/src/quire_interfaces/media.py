"""Media of a prompt as every package sees them: one item alone, and where it stands among the tokens. Pure data.

An item is prepared once (decoded, resized, cut into patches, or turned into a spectrogram) and lies in a file of shared
memory from then on; what crosses between processes says where.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

__all__ = [
    "BESIDE_IMAGES",
    "END_OF_SEQUENCE",
    "VIDEO_AUDIO_RUNS",
    "FeatureArray",
    "MediaItem",
    "MediaSpan",
    "Modality",
    "PreparedMedia",
    "PromptMedia",
]

BESIDE_IMAGES = "beside_images"
"""Name of an array of a sound in a prompt with images, for networks with a connector of its own for it; [1]."""

END_OF_SEQUENCE = 1 << 30
"""Behind the last token, however many there will be."""

VIDEO_AUDIO_RUNS = "video_audio_runs"
"""Name of the array of a video with its sound, int32 [runs, 2]: how many embeddings of frames, then of sound, follow
each other. The arrays of both towers stand beside it."""


class Modality(enum.StrEnum):
    """Kinds of media, with the names of the Transformers library."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"
    EMBEDS = "embeds"
    """Rows for the language model that the caller has computed; no tower reads them (`prompt_embeds`)."""


class FeatureArray(NamedTuple):
    """An array that a tower reads, inside the file of its item."""

    name: str
    """Argument of the tower: "pixel_values", "image_grid_thw", ..."""
    dtype: str
    """As numpy names it: "float32", "int64", ..."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One image, video or sound, prepared for the towers of a model, alone: nothing of it depends on the prompt."""

    modality: Modality
    key: str
    """Names the content: equal keys are equal embeddings. A hash of the decoded bytes, or the caller's own name, with
    the processor and its arguments."""
    num_embeds: int
    """Rows that it takes in the input of the language model, or that cross attention reads."""
    path: str
    """File with the arrays; empty once nobody needs them any more."""
    features: tuple[FeatureArray, ...]
    is_encoded: bool = False
    """The one array is the embeddings themselves, [num_embeds, width]: no tower has to read anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """An item in a prompt. The same item may stand in several places."""

    item: MediaItem
    start: int
    """First token that takes one of its embeddings."""
    length: int
    """Tokens up to the last that takes one, marks between them included."""
    embeds: tuple[tuple[int, int], ...]
    """[from, to) behind `start`, ascending: the tokens that take embeddings, `item.num_embeds` in all; empty where
    tokens attend to them instead."""
    cross_end: int = 0
    """The token behind the last that attends to all its embeddings by cross attention, the one at `start` being the
    first; 0 where tokens take embeddings."""

    @property
    def end(self) -> int:
        """The token behind it."""
        return self.start + self.length

    @property
    def read_end(self) -> int:
        """The token behind the last that reads its embeddings."""
        return max(self.end, self.cross_end)

    def is_read(self, start: int, end: int) -> bool:
        """Whether any of the sequence's tokens `start` to `end` reads its embeddings."""
        first, last = self.embeds_between(start, end)
        return first < last or (self.start < end and start < self.cross_end)

    def embeds_between(self, start: int, end: int) -> tuple[int, int]:
        """[from, to) of the item's embeddings that tokens `start` to `end` of the prompt take."""
        before = sum(_overlap(each, 0, start - self.start) for each in self.embeds)
        return before, before + sum(_overlap(each, start - self.start, end - self.start) for each in self.embeds)

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Those tokens of the prompt, from `start` to before `end`, that take embeddings."""
        tokens: list[int] = []
        for first, last in self.embeds:
            tokens.extend(range(max(self.start + first, start), min(self.start + last, end)))
        return tokens


def _overlap(embeds: tuple[int, int], start: int, end: int) -> int:
    """Tokens that two ranges share."""
    return max(0, min(embeds[1], end) - max(embeds[0], start))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMedia:
    """All media of a prompt, and the positions of its tokens where they are not simply counted."""

    spans: tuple[MediaSpan, ...]
    """In the order of the prompt; they do not overlap."""
    positions: bytes = b""
    """int32 [num_position_axes, prompt tokens], little-endian: time, height and width of each token (M-RoPE, Wang et
    al., "Qwen2-VL", 2024, section 2.1), or what else a network counts; empty where positions are counted."""
    num_position_axes: int = 3
    """Axes of `positions`; 4 for Hunyuan-VL (place in the prompt, width, height, number of the image)."""
    position_delta: int = 0
    """Number that is added to the index of a generated token, for its position on all axes."""
    prefix_len: int = 0
    """Tokens from the first on that all see one another; those behind them are causal (prefix LM, Raffel et al., "T5",
    2020, section 3.2.1). 0 where all are causal."""
    prefix_key: str = ""
    """Names these tokens and the items among them: keys and values of each one depend on all."""

    @property
    def extra_keys(self) -> tuple[tuple[int, int, str], ...]:
        """For `Request.cache_extra_keys`: what token ids do not say."""
        keys = tuple((span.start, span.end, span.item.key) for span in self.spans)
        return (*keys, (0, self.prefix_len, self.prefix_key)) if self.prefix_len else keys

    def num_output_tokens(self, num_prompt_tokens: int) -> int | None:
        """Tokens behind the prompt for which there is sound that is added to them; None where none is."""
        most = max((span.end - num_prompt_tokens for span in self.spans if span.embeds), default=0)
        return most if most > 0 else None

    def as_cross_attended(self) -> PromptMedia:
        """These media in a prompt whose tokens attend to them by cross attention (Llama 3.2 Vision): each to the last
        item before it, and to those that stand right before that one; what follows the prompt, to the last ones."""
        spans: list[MediaSpan] = []
        cross_end = END_OF_SEQUENCE
        for span in reversed(self.spans):
            if spans and span.end < spans[-1].start:
                cross_end = spans[-1].start
            spans.append(replace(span, embeds=(), cross_end=cross_end))
        return replace(self, spans=tuple(reversed(spans)))

    def as_prefix(self, token_ids: Sequence[int]) -> PromptMedia:
        """These media in a prompt whose tokens all see one another.

        Args:
            token_ids: Of the whole prompt.
        """
        named = repr((list(token_ids), [(span.start, span.embeds, span.item.key) for span in self.spans]))
        key = hashlib.sha256(named.encode()).hexdigest()
        return replace(self, prefix_len=len(token_ids), prefix_key=f"prefix:{key}")


class PreparedMedia(Protocol):
    """The items of one prompt, prepared, before anybody knows where its tokens are: what a renderer joins text with."""

    placeholders: Mapping[str, str]
    """Token that stands for an item in the text of a prompt, by modality: what the model takes."""
    has_special_tokens: bool
    """`expand` writes the special tokens around the text, too: a tokenizer adds none."""

    def expand(self, text: str) -> str:
        """The text with each placeholder replaced by the text of its item.

        Raises:
            RequestError: there are more or fewer placeholders than items.
        """

    def place(self, token_ids: Sequence[int]) -> PromptMedia:
        """The spans of the expanded text's tokens, and their positions. Called after `expand`.

        Raises:
            RequestError: the tokens are not those of the items.
        """
