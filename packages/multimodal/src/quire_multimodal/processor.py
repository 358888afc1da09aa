"""A checkpoint's Hugging Face processor, run on one item: its arrays, the text that stands for it, its embeddings.

Runs in a preparing process. `transformers` is imported here and nowhere else, and torch only where the processor of a
modality needs it; whoever imports this module decides what may be imported.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import CheckpointError, Modality
from quire_multimodal.bounds import MediaBounds
from quire_multimodal.decode import VideoFrames, decode_audio, decode_image, decode_video
from quire_multimodal.errors import MediaError

__all__ = ["ItemProcessor", "ProcessedItem"]

_DEFAULT_NUM_FRAMES = 32
"""Frames of a video where neither the processor nor the request says how many (vLLM's number)."""
_ARGUMENTS = {Modality.IMAGE: "images_kwargs", Modality.VIDEO: "videos_kwargs", Modality.AUDIO: "audio_kwargs"}
_NOT_FEATURES = ("video_metadata",)


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """What the processor makes of one item."""

    text: str
    """Replaces the placeholder of the item in the prompt."""
    num_embeds: int
    """Tokens of `text` that take embeddings."""
    embed_token_ids: list[int]
    """Those tokens, each kind once."""
    features: dict[str, NDArray[Any]]
    """Arguments of the tower, as the processor's joint call returns them for this item alone."""


class ItemProcessor:
    """The processor of a checkpoint, for one item at a time. Not thread-safe.

    Args:
        processor: A `ProcessorMixin` of Transformers.
        embed_token_ids: Tokens that take embeddings, by modality, where the processor does not say them rightly.
        bounds: Largest media that are decoded.
        io_options: How media are decoded, by modality (`media_io_kwargs`).
    """

    def __init__(
        self,
        processor: Any,
        *,
        embed_token_ids: Mapping[str, Sequence[int]] | None = None,
        bounds: MediaBounds | None = None,
        io_options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.processor = processor
        self.bounds = bounds or MediaBounds()
        self._embed_token_ids = dict(embed_token_ids or {})
        self._io_options = dict(io_options or {})

    @classmethod
    def from_folder(
        cls, folder: Path | str, arguments: Mapping[str, Any] | None = None, **others: Any
    ) -> ItemProcessor:
        """The processor of a checkpoint.

        Args:
            folder: Of the checkpoint.
            arguments: For the processor's constructor; `backend` chooses the image processor's ("pil" if not said).
            others: Of `ItemProcessor`.

        Raises:
            CheckpointError: the folder has no processor, or it cannot be loaded here.
        """
        transformers = importlib.import_module("transformers")
        try:
            arguments = {"backend": "pil", **(arguments or {})}
            processor = transformers.AutoProcessor.from_pretrained(str(folder), **arguments)
        except Exception as error:
            raise CheckpointError(f"{folder}: the processor cannot be loaded: {error}") from error
        if not hasattr(processor, "_process_images"):
            raise CheckpointError(f"{folder}: {type(processor).__name__} is no processor of media")
        ids = {**_config_token_ids(Path(folder)), **others.pop("embed_token_ids", {})}
        return cls(processor, embed_token_ids=ids, **others)

    @property
    def modalities(self) -> list[Modality]:
        """Kinds of media that have a processor and a placeholder."""
        return [each for each in _ARGUMENTS if self._part(each) is not None and self.placeholder(each) is not None]

    def placeholder(self, modality: Modality) -> str | None:
        """Token that a chat template writes for an item; None where there is none."""
        token = getattr(self.processor, f"{modality}_token", None)
        return token if token is None else str(token)

    def _part(self, modality: Modality) -> Any:
        if modality == Modality.AUDIO:
            return getattr(self.processor, "_audio_processor", None)
        return getattr(self.processor, f"{modality}_processor", None)

    def decode(self, modality: Modality, data: bytes, arguments: Mapping[str, Any] | None = None) -> Any:
        """Encoded media as the processor wants them.

        Returns:
            A `PIL.Image.Image`, a `VideoFrames`, or samples float32 [samples] at the processor's rate.

        Raises:
            MediaError: not decodable or out of bounds, or the model has no such modality.
        """
        part, options = self._part(modality), self._io_options.get(modality)
        if part is None:
            raise MediaError(f"this model takes no {modality}", code="unsupported_media")
        if modality == Modality.IMAGE:
            return decode_image(data, self.bounds, options)
        if modality == Modality.AUDIO:
            return decode_audio(data, int(part.sampling_rate), self.bounds)
        merged = self._merged(modality, arguments)
        return decode_video(data, self.bounds, lambda count, fps: self._frame_indices(count, fps, merged))

    def _frame_indices(self, num_frames: int, fps: float, merged: Mapping[str, Any]) -> Sequence[int]:
        """Frames that the processor would take of a video: its own sampling, or evenly as the server says."""
        part, options = self.processor.video_processor, self._io_options.get(Modality.VIDEO) or {}
        names = part.valid_kwargs.__annotations__
        settings = {name: merged.get(name, getattr(part, name, None)) for name in names}
        samples = settings.pop("do_sample_frames")
        if samples and not options:
            metadata = _metadata(num_frames, fps, None)
            for name in ("input_data_format", "do_convert_rgb", "device", "video_metadata"):
                settings.pop(name, None)
            return [int(index) for index in part.sample_frames(metadata=metadata, **settings)]
        count = options.get("num_frames", _DEFAULT_NUM_FRAMES)
        if "fps" in options:
            count = min(count if "num_frames" in options else num_frames, int(num_frames / fps * options["fps"]))
        count = num_frames if count < 0 else max(1, min(count, num_frames))
        return [int(index) for index in np.linspace(0, num_frames - 1, count)]

    def process(self, modality: Modality, value: Any, arguments: Mapping[str, Any] | None = None) -> ProcessedItem:
        """Run the processor on one decoded item.

        Args:
            modality: Of the item.
            value: What `decode` returns.
            arguments: The request's `mm_processor_kwargs`.

        Raises:
            MediaError: the processor refuses the item or the arguments.
        """
        try:
            features, texts = self._call(modality, value, self._merged(modality, arguments))
            text = texts[0] if texts else self.placeholder(modality) or ""
            token_ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            embeds = self.embed_token_ids(modality, token_ids)
            dropped = {*self.processor.unused_input_names, *_NOT_FEATURES}
            arrays = {name: _array(name, each) for name, each in features.items() if name not in dropped}
        except MediaError:
            raise
        except Exception as error:  # processors check little, and fail as they please
            message = f"the processor refuses the {modality}: {error or type(error).__name__}"
            raise MediaError(message, code="media_processing_failed") from error
        num_embeds = sum(token_id in embeds for token_id in token_ids)
        if not num_embeds:
            raise MediaError(f"the {modality} is too small: nothing of it reaches the model")
        return ProcessedItem(text, num_embeds, embeds, arrays)

    def _merged(self, modality: Modality, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
        """Arguments of the processor of a modality, defaults and the request's."""
        init = getattr(getattr(self.processor, "tokenizer", None), "init_kwargs", {})
        try:
            merged = self.processor._merge_kwargs(tokenizer_init_kwargs=init, **(arguments or {}))
        except Exception as error:
            raise MediaError(f"mm_processor_kwargs cannot be used: {error}") from error
        return dict(merged[_ARGUMENTS[modality]])

    def _call(self, modality: Modality, value: Any, merged: dict[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        merged["return_tensors"] = "np"
        layout = self.processor.prepare_inputs_layout
        if modality == Modality.IMAGE:
            images = layout(images=[value])[0]
            return self.processor._process_images(images, **merged)  # type: ignore[no-any-return]
        if modality == Modality.AUDIO:
            return self.processor._process_audio([value], **merged)  # type: ignore[no-any-return]
        video: VideoFrames = value
        merged |= {"do_sample_frames": False, "video_metadata": [_metadata(video.num_frames, video.fps, video)]}
        return self.processor._process_videos([video.frames], **merged)  # type: ignore[no-any-return]

    def embed_token_ids(self, modality: Modality, token_ids: Iterable[int]) -> list[int]:
        """Those token ids that take embeddings in the text of an item, of all that could."""
        present = set(token_ids)
        own = [self._embed_token_ids.get(modality), getattr(self.processor, f"{modality}_token_ids", None)]
        frames = [self._embed_token_ids.get("image"), self.processor.image_token_ids] if modality == "video" else []
        for ids in (*own, *frames):
            if ids is not None and (taken := [token_id for token_id in ids if token_id in present]):
                return taken
        return []


def _metadata(num_frames: int, fps: float, video: VideoFrames | None) -> Any:
    utils = importlib.import_module("transformers.video_utils")
    size = {} if video is None else {"height": video.frames.shape[1], "width": video.frames.shape[2]}
    indices = None if video is None else video.indices
    return utils.VideoMetadata(
        total_num_frames=num_frames, fps=fps, duration=num_frames / fps, frames_indices=indices, **size
    )


def _config_token_ids(folder: Path) -> dict[str, list[int]]:
    """Tokens that take embeddings, by modality, as config.json names them: what the networks themselves look for."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    config = {**config.get("thinker_config", {}), **config}
    ids = {}
    for modality in _ARGUMENTS:
        names = (f"{modality}_token_id", f"{modality}_token_index")
        value = next((config[name] for name in names if isinstance(config.get(name), int)), None)
        if value is not None:
            ids[str(modality)] = [value]
    return ids


def _array(name: str, value: Any) -> NDArray[Any]:
    """A feature as one array, whatever the processor has put it into."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, (list, tuple)) and len(value) and not np.isscalar(value[0]):
        value = np.stack([_array(name, each) for each in value])
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise MediaError(f"the processor returns {name!r} as {array.dtype}", code="media_processing_failed")
    return np.ascontiguousarray(array)
