"""Positions of a prompt's tokens in networks with multimodal rotary embeddings (M-RoPE): time, height and width.

Tokens of text count on all three axes alike. Tokens of an image or a video have the place of their patch (Wang et al.,
"Qwen2-VL", 2024, section 2.1); where videos have a time in seconds, it is counted in units of the network (Bai et al.,
"Qwen2.5-VL", 2025, section 2.1.2). Sounds count like text. What a family does is data; the numbers are those of
`get_rope_index` in Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import VIDEO_AUDIO_RUNS, MediaSpan, Modality, PromptMedia
from quire_multimodal.errors import MediaError
from quire_multimodal.store import StoredItem

__all__ = ["PositionScheme", "mrope_positions", "place_media"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScheme:
    """How a family of networks places the tokens of images and videos."""

    spatial_merge_size: int = 2
    """Patches that become one token, along height and along width."""
    temporal_merge_size: int = 1
    """Patches of a video that become one token along time."""
    positions_per_second: float | None = None
    """Positions of time in a second of video; None where each patch of time is one position."""
    shares_marks: bool = False
    """Whether the marks of the sound in a video stand at the positions of the video's own marks around it."""
    is_omni: bool = False
    """Whether the network is a thinker of the Qwen-Omni line: text behind a video begins after its last position on any
    axis, not after its height and width alone. Qwen3-Omni's fractions of a position are cut off."""
    num_axes: int = 3
    """Axes of positions."""
    is_xd: bool = False
    """Whether text counts as if there were no images, whose tokens have column, row and number of the image on the last
    three axes (XD-RoPE of Hunyuan-VL, whose images end each row with a mark)."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PositionScheme | None:
        """The scheme of a checkpoint's config.json; None where tokens are simply counted."""
        config = config.get("thinker_config") or config
        scheme = _SCHEMES.get(config.get("model_type", ""))
        if scheme is None:
            return None
        vision = config.get("vision_config") or {}
        if scheme.is_xd:
            text = config.get("text_config") or config
            rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
            sections = rope.get("mrope_section") or rope.get("xdrope_section")  # Tencent's own name
            scheme = replace(scheme, num_axes=len(sections) if sections else scheme.num_axes)
        if scheme.positions_per_second is not None:
            known = vision.get("tokens_per_second", config.get("position_id_per_seconds"))
            scheme = replace(scheme, positions_per_second=scheme.positions_per_second if known is None else known)
        return replace(
            scheme,
            spatial_merge_size=vision.get("spatial_merge_size", scheme.spatial_merge_size),
            temporal_merge_size=vision.get("temporal_merge_size", scheme.temporal_merge_size),
        )


_PLAIN = PositionScheme()
_SCHEMES = {
    **dict.fromkeys(
        """qwen2_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen4_exp glm4v glm4v_moe glm46v glm_ocr paddleocr_vl
        cohere_compass cosmos3_edge cosmos3_omni""".split(),
        _PLAIN,
    ),
    "qwen2_5_vl": PositionScheme(positions_per_second=4.0),
    "qwen2_5_omni_thinker": PositionScheme(positions_per_second=25.0, is_omni=True, shares_marks=True),
    "qwen3_omni_moe_thinker": PositionScheme(positions_per_second=25.0, is_omni=True),
    "hunyuan_vl": PositionScheme(is_xd=True, num_axes=4),
    "ernie4_5_vl_moe": PositionScheme(temporal_merge_size=2),
}
"""`model_type` of config.json (of its thinker, where it has one) -> scheme, with the defaults of its config class."""
_GRIDS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}
_SECONDS = ("second_per_grid_ts", "video_second_per_grid")


def place_media(
    items: Sequence[StoredItem], spans: Sequence[MediaSpan], num_tokens: int, scheme: PositionScheme | None
) -> PromptMedia:
    """The media of a prompt, with positions where the network wants them.

    Args:
        items: In the order of the prompt.
        spans: Of these items, as `find_spans` finds them.
        num_tokens: Of the prompt.
        scheme: Of the network; None where tokens are simply counted.

    Raises:
        MediaError: an item's tokens are not those of its grid of patches.
    """
    if scheme is None:
        return PromptMedia(spans=tuple(spans))
    positions, delta = mrope_positions(items, spans, num_tokens, scheme)
    return PromptMedia(
        spans=tuple(spans),
        positions=positions.astype("<i4").tobytes(),
        num_position_axes=scheme.num_axes,
        position_delta=delta,
    )


def mrope_positions(
    items: Sequence[StoredItem], spans: Sequence[MediaSpan], num_tokens: int, scheme: PositionScheme
) -> tuple[NDArray[np.int32], int]:
    """Positions of the prompt, and what is added to the index of a generated token for its position.

    Args:
        items: In the order of the prompt.
        spans: Of these items.
        num_tokens: Of the prompt.
        scheme: Of the network.

    Returns:
        int32 [3, num_tokens] (time, height, width; or `scheme.num_axes` others), and the delta. Generated tokens go on
        where text behind the prompt would, as in `generate` of Transformers, so that their keys are those of a longer
        prompt. (`rope_deltas` there go on behind the latest time of all, which is more where a video has long pauses.)

    Raises:
        MediaError: an item's tokens are not those of its grid of patches.
    """
    if scheme.is_xd:
        return _xd_positions(items, spans, num_tokens, scheme), 0
    positions = np.zeros((3, num_tokens), np.int64)
    position = token = 0
    for stored, span in zip(items, spans, strict=True):
        if span.item.modality not in _GRIDS:
            continue
        for (start, end), grid in zip(span.embeds, _grids(stored, span, scheme), strict=True):
            first = span.start + start
            shared = int(scheme.shares_marks and VIDEO_AUDIO_RUNS in stored.facts)
            positions[:, token:first] = np.arange(position, position + first - token)
            position += first - token - shared
            positions[:, first - shared : first] -= 1
            token = span.start + end
            positions[:, first:token] = grid + position
            position += int(grid[0 if scheme.is_omni else 1 :, -1].max()) + 1
            positions[:, token : token + shared] = position
            token += shared
    positions[:, token:] = np.arange(position, position + num_tokens - token)
    return positions.astype(np.int32), position - token


def _xd_positions(
    items: Sequence[StoredItem], spans: Sequence[MediaSpan], num_tokens: int, scheme: PositionScheme
) -> NDArray[np.int32]:
    """int32 [num_axes, num_tokens] of `PositionScheme.is_xd`. The marks around an image count like text."""
    positions = np.tile(np.arange(num_tokens, dtype=np.int32), (scheme.num_axes, 1))
    for number, (stored, span) in enumerate(zip(items, spans, strict=True)):
        _, height, width = _patches(stored, span.item.modality)
        rows, columns = height // scheme.spatial_merge_size, width // scheme.spatial_merge_size + 1
        num_marks = span.length - rows * columns if min(rows, columns) > 0 else -1
        if num_marks not in (0, 2) or span.item.num_embeds != span.length:
            raise MediaError(
                f"the tokens of the image are not those of {rows} rows of {columns} patches, marks included"
            )
        first = span.start + num_marks // 2
        grid = positions[-3:, first : first + rows * columns]
        grid[:] = (np.tile(np.arange(columns), rows), np.repeat(np.arange(rows), columns), [number] * (rows * columns))
    return positions


def _patches(stored: StoredItem, modality: Modality) -> Sequence[int]:
    """Patches of an item by time, height and width."""
    (shape,) = stored.facts.get(_GRIDS[modality]) or [None]
    if shape is None:
        raise MediaError(f"the processor says no grid of patches for the {modality}")
    return tuple(shape)


def _grids(stored: StoredItem, span: MediaSpan, scheme: PositionScheme) -> list[NDArray[np.int64]]:
    """Places of an item's tokens from 0, [3, tokens] for each run of them: all together, or frame by frame."""
    modality = span.item.modality
    time, height, width = _patches(stored, modality)
    is_video = modality == Modality.VIDEO
    time //= scheme.temporal_merge_size if is_video else 1
    height, width = height // scheme.spatial_merge_size, width // scheme.spatial_merge_size
    mismatch = MediaError(f"the tokens of the {modality} are not those of {time} x {height} x {width} patches")
    sound = stored.facts.get(VIDEO_AUDIO_RUNS, ())
    num_frame_embeds = span.item.num_embeds - sum(count for _, count in sound)
    if time * height * width != num_frame_embeds:  # a caller's grid may be of any size
        raise mismatch
    num_runs = len(span.embeds)
    times = np.arange(time if num_runs == 1 else 1, dtype=np.float32)
    if is_video and scheme.positions_per_second is not None:
        seconds = np.float32(next((stored.facts[name][0] for name in _SECONDS if name in stored.facts), 1.0))
        rate = np.float32(scheme.positions_per_second)
        times = times * seconds * rate if scheme.is_omni else times * (seconds * rate)  # as theirs rounds
    runs = [np.stack(np.meshgrid(times.astype(np.int64), range(height), range(width), indexing="ij")).reshape(3, -1)]
    runs *= num_runs
    if sound:
        runs = [_with_sound(runs[0], sound)]
    lengths = [end - start for start, end in span.embeds]
    if lengths != [run.shape[1] for run in runs] or num_runs not in (1, time):
        raise mismatch
    return runs


def _with_sound(frames: NDArray[np.int64], runs: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Places of a video's tokens with those of its sound between them, which count like text from the first frame."""
    are_sound = np.repeat([[False, True]] * len(runs), np.ravel(runs))
    places = np.empty((3, len(are_sound)), np.int64)
    if frames.shape[1] != np.count_nonzero(~are_sound):
        return frames
    places[:, ~are_sound] = frames
    places[:, are_sound] = np.arange(np.count_nonzero(are_sound))
    return places
