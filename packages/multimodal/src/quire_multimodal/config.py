"""The settings of media. Knows no model: which modalities there are is the processor's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_interfaces import Settings, at_least, between, setting

__all__ = ["MediaConfig"]

_MODALITIES = ("image", "video", "audio")


def _limits(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return 'map modalities to numbers, as in {"image": 4}'
    unknown = [name for name in value if name not in _MODALITIES]
    if unknown:
        return f"name only the modalities {', '.join(_MODALITIES)}"
    counts = [count for count in value.values() if not isinstance(count, int) or isinstance(count, bool) or count < 0]
    return "give whole numbers from 0" if counts else None


def _mapping(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "be a mapping of names to values"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "be true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig(Settings):
    """Settings of media in prompts.

    Raises:
        ConfigError: a value is not possible; the message names the field, the value and what it must be.
    """

    limit_mm_per_prompt: Mapping[str, int] | None = setting(
        None,
        help='Most items of each modality that a prompt may hold, as in {"image": 4}; one that is not named has no '
        "limit but the length of the context.",
        check=_limits,
    )
    mm_processor_kwargs: Mapping[str, Any] | None = setting(
        None,
        help="Arguments of the Hugging Face processor, for every request; a request's own go over them. `backend` "
        '("pil", or "torchvision" where it is installed) chooses the class of the image processor.',
        check=_mapping,
    )
    media_io_kwargs: Mapping[str, Any] | None = setting(
        None,
        help='How media are decoded, by modality, as in {"video": {"num_frames": 32}}: num_frames or fps of videos, '
        "rgba_background_color of images.",
        check=_mapping,
    )
    allowed_local_media_path: str = setting(
        "", help="Folder below which requests may name files (file:// URLs); empty allows none."
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (), help="Hosts that media may be fetched from; empty allows every host with a public address."
    )
    enable_mm_embeds: bool = setting(
        False,
        help="Take embeddings that callers have computed instead of images, videos and sounds. Wrong ones give wrong "
        "answers, to who sends them.",
        check=_boolean,
    )
    enable_prompt_embeds: bool = setting(
        False,
        help="Take prompts as embeddings that callers have computed (prompt_embeds). Wrong ones give wrong answers, to "
        "who sends them.",
        check=_boolean,
    )
    allow_private_media_addresses: bool = setting(
        False,
        help="Fetch media from private, loopback and link-local addresses too. Requests can then reach whatever this "
        "machine reaches.",
        check=_boolean,
    )
    mm_processor_cache_gb: float = setting(
        4.0,
        help="Shared memory for prepared media that may be used again; 0 keeps each only as long as its request.",
        unit="GiB",
        check=at_least(0),
    )
    media_processes: int = setting(
        1, help="Processes that decode media and run the processor.", unit="processes", check=between(1, 256)
    )
    media_niceness: int = setting(
        10, help="How far the preparing processes stand back behind others; 19 is farthest.", check=between(0, 19)
    )
    media_timeout_s: float = setting(
        120.0, help="Longest time that preparing one item may take.", unit="seconds", check=at_least(0.001)
    )
    media_fetch_timeout_s: float = setting(
        10.0, help="Longest time that fetching one item may take, redirects included.", unit="seconds",
        check=at_least(0.001),
    )  # fmt: skip
    media_max_redirects: int = setting(
        5, help="Redirects that are followed for one item.", unit="redirects", check=at_least(0)
    )
    media_max_bytes: int = setting(
        256 << 20, help="Largest item, as it is sent or fetched.", unit="bytes", check=at_least(1)
    )
    media_max_pixels: int = setting(
        100_000_000, help="Largest image, and largest frame of a video.", unit="pixels", check=at_least(1)
    )
    media_max_frames: int = setting(
        512, help="Most frames of a video that the model is shown.", unit="frames", check=at_least(1)
    )
    media_max_seconds: float = setting(3600.0, help="Longest sound or video.", unit="seconds", check=at_least(0.001))

    @property
    def image_backend(self) -> str:
        """Which of its image processors Transformers is asked for: "pil" or "torchvision"."""
        return str((self.mm_processor_kwargs or {}).get("backend", "pil"))
