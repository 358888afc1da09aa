"""Which parts of a message's content are images, videos or sounds, in all spellings that clients use.

Knows the shapes of the chat completions and the Responses API; knows neither what a model takes nor how media are read.
"""

from __future__ import annotations

from typing import Any

from quire_interfaces import Modality

__all__ = ["modality_of"]

_MODALITIES = {
    **dict.fromkeys(
        ("image", "image_url", "input_image", "image_pil", "image_embeds", "computer_screenshot"), Modality.IMAGE
    ),
    **dict.fromkeys(("video", "video_url", "input_video"), Modality.VIDEO),
    **dict.fromkeys(("audio", "audio_url", "input_audio", "audio_embeds"), Modality.AUDIO),
}
"""Type of a part -> what it holds."""


def modality_of(kind: Any) -> Modality | None:
    """The modality of parts of this type; None for text, for files, and for types that are not known.

    Args:
        kind: `type` of the part.
    """
    return _MODALITIES.get(kind) if isinstance(kind, str) else None
