"""A checkpoint's Hugging Face processor, run on one item: its arrays, the text that stands for it, its embeddings.

Runs in a preparing process. `transformers` is imported here and nowhere else, and torch only where the processor of a
modality needs it; whoever imports this module decides what may be imported.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from quire_interfaces import BESIDE_IMAGES, VIDEO_AUDIO_RUNS, CheckpointError, Modality
from quire_multimodal.config import MediaConfig
from quire_multimodal.decode import VideoFrames, decode_audio, decode_image, decode_sound_track, decode_video, resample
from quire_multimodal.errors import MediaError
from quire_multimodal.fingerprint import read_config
from quire_multimodal.spans import ITEM_NUMBER, PromptFrame

__all__ = ["EmbedsText", "ItemProcessor", "ProcessedItem"]

_DEFAULT_NUM_FRAMES = 32
"""Frames of a video where neither the processor nor the request says how many (vLLM's number)."""
_ARGUMENTS = {Modality.IMAGE: "images_kwargs", Modality.VIDEO: "videos_kwargs", Modality.AUDIO: "audio_kwargs"}
_MEDIA = {Modality.IMAGE: "images", Modality.VIDEO: "videos", Modality.AUDIO: "audio"}
_NOT_FEATURES = ("video_metadata", "labels")
_OF_TOKENS = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")
"""Outputs that are about the tokens of the joint call's text."""
_AUDIO_IN_VIDEO = ("use_audio_in_video", "load_audio_from_video")
"""Arguments that ask processors of Omni models for the sounds of videos: vLLM's name, and Transformers'."""


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
    """Arguments of the tower, as the processor's joint call returns them for this item alone. Where tokens of several
    kinds may take embeddings, "embed_token_ids" [num_embeds] says which ones do, in their order."""


class EmbedsText(NamedTuple):
    """The text of an item around its embeddings, of which each stands as one token."""

    before: str
    token: str
    after: str
    token_id: int


class ItemProcessor:
    """The processor of a checkpoint, for one item at a time. Not thread-safe.

    Args:
        processor: A `ProcessorMixin` of Transformers.
        config: Largest media that are decoded, and how they are.
        embed_token_ids: Tokens that take embeddings, by modality, where the processor does not say them rightly.
        embeds_per_tile: Embeddings of a tile of an image, where one token stands for all of an item's; 0 for others.
    """

    def __init__(
        self,
        processor: Any,
        config: MediaConfig,
        embed_token_ids: Mapping[str, Sequence[int]] | None = None,
        embeds_per_tile: int = 0,
    ) -> None:
        self.processor = processor
        self.config = config
        self._embed_token_ids = dict(embed_token_ids or {})
        self._embeds_per_tile = embeds_per_tile
        self._io_options: Mapping[str, Any] = config.media_io_kwargs or {}
        self._ways: dict[Modality, tuple[str, str]] = {}
        self.embeds_texts: dict[Modality, EmbedsText] = {}
        """Texts of items whose tokens for embeddings follow each other, by modality: they tell the text of an item with
        any number of embeddings."""
        self.unusable = self.check()
        """Modalities that cannot be prepared, with the reason."""

    @classmethod
    def from_folder(
        cls, folder: Path | str, config: MediaConfig, embed_token_ids: Mapping[str, Sequence[int]] | None = None
    ) -> ItemProcessor:
        """The processor of a checkpoint; its image processor is of the kind that `config` names, or of the other one
        where that cannot be used.

        Raises:
            CheckpointError: the folder has no processor, or it cannot be loaded here.
        """
        transformers = importlib.import_module("transformers")
        ids = {**_config_token_ids(Path(folder)), **(embed_token_ids or {})}
        tries: list[ItemProcessor] = []
        for backend in dict.fromkeys((config.image_backend, "torchvision")):
            try:
                processor = transformers.AutoProcessor.from_pretrained(str(folder))
                if hasattr(processor, "image_processor"):  # the others have no Pillow to choose
                    images = transformers.AutoImageProcessor.from_pretrained(str(folder), backend=backend)
                    processor.image_processor = images
            except Exception as error:
                raise CheckpointError(f"{folder}: the processor cannot be loaded: {error}") from error
            if not hasattr(processor, "_process_images"):
                raise CheckpointError(f"{folder}: {type(processor).__name__} is no processor of media")
            tries.append(cls(processor, config, ids, _embeds_per_tile(Path(folder))))
            if not tries[-1].unusable:
                break
        return min(tries, key=lambda each: len(each.unusable))

    @property
    def frame(self) -> PromptFrame | None:
        """What its joint call writes into a prompt, beside the texts of the items; None for nothing."""
        name, bos = type(self.processor).__name__, str(self.processor.tokenizer.bos_token)
        if name == "MllamaProcessor":
            return PromptFrame(begin=bos)
        return PromptFrame(behind_items=bos, end="\n") if name == "PaliGemmaProcessor" else None

    @property
    def modalities(self) -> list[Modality]:
        """Kinds of media that can be prepared."""
        return list(self._ways)

    def placeholder(self, modality: Modality) -> str | None:
        """Token that a chat template writes for an item; None where there is none."""
        names = (f"{modality}_placeholder_token", f"{modality}_token")
        return next((str(token) for name in names if (token := getattr(self.processor, name, None)) is not None), None)

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
        if modality not in self._ways:
            raise MediaError(f"this model takes no {modality}", code="unsupported_media")
        if modality == Modality.IMAGE:
            return decode_image(data, self.config, options)
        if modality == Modality.AUDIO:
            return decode_audio(data, int(part.sampling_rate), self.config)
        arguments, hears = self._split(arguments)
        merged = self._merged(modality, arguments)
        video = decode_video(data, self.config, lambda count, fps: self._frame_indices(count, fps, merged))
        if not hears:
            return video
        rate = int(self._part(Modality.AUDIO).sampling_rate)
        return replace(video, sound=decode_sound_track(data, rate, self.config))

    def _split(self, arguments: Mapping[str, Any] | None) -> tuple[dict[str, Any], bool]:
        """Arguments of the processor itself, and whether the sounds of videos are wanted."""
        arguments = {name: each for name, each in (arguments or {}).items() if name != BESIDE_IMAGES}
        if Modality.AUDIO not in self._ways or not hasattr(self.processor, "load_audio_from_video"):
            return arguments, False
        flags = [arguments.pop(name, False) for name in _AUDIO_IN_VIDEO]
        return arguments, any(flags)

    def at_its_rate(self, samples: NDArray[np.float32], rate: float | None) -> NDArray[np.float32]:
        """Samples at the rate of the processor.

        Args:
            samples: [samples].
            rate: Samples in a second; None if they are the processor's already.
        """
        own = int(self._part(Modality.AUDIO).sampling_rate)
        return resample(samples, own if rate is None else rate, own)

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

    def check(self) -> dict[Modality, str]:
        """Run every modality once on a sample, and settle on the way in which each is called.

        Returns:
            What cannot be prepared, with the reason.
        """
        reasons: dict[Modality, str] = {}
        for modality in _ARGUMENTS:
            if self._part(modality) is None or self.placeholder(modality) is None:
                continue
            for way in self._possible_ways():
                self._ways[modality] = way
                try:
                    self._take_embeds_text(modality, self.process(modality, _sample(modality, self._part(modality))))
                except MediaError as error:
                    reasons.setdefault(modality, str(error))
                else:
                    reasons.pop(modality, None)
                    break
            else:
                del self._ways[modality]
        return reasons

    def _take_embeds_text(self, modality: Modality, item: ProcessedItem) -> None:
        token = self.processor.tokenizer.convert_ids_to_tokens(item.embed_token_ids[0])
        before, run, after = item.text.partition(token * item.num_embeds)
        if run:
            self.embeds_texts[modality] = EmbedsText(before, token, after, item.embed_token_ids[0])

    def _possible_ways(self) -> list[tuple[str, str]]:
        """How to call the processor, the best first: by its steps, unless its class has a joint call of its own."""
        mixins = importlib.import_module("transformers.processing_utils")
        plain = [getattr(mixins, name, None) for name in ("ProcessorMixin", "OmniModalProcessorMixin")]
        is_plain = any(mixin is not None and type(self.processor).__call__ is mixin.__call__ for mixin in plain)
        calls = ("part", "joint") if is_plain else ("joint", "part")
        return [(call, tensors) for call in calls for tensors in ("np", "pt")]

    def process(self, modality: Modality, value: Any, arguments: Mapping[str, Any] | None = None) -> ProcessedItem:
        """Run the processor on one decoded item.

        Args:
            modality: Of the item; `check` has found that it works.
            value: What `decode` returns.
            arguments: The request's `mm_processor_kwargs`, and `prompt_arguments`.

        Raises:
            MediaError: the processor refuses the item or the arguments.
        """
        way, tensors = self._ways[modality]
        is_beside_images = BESIDE_IMAGES in (arguments or {})
        arguments, _ = self._split(arguments)
        self._merged(modality, arguments)  # wrong arguments are told apart from wrong media
        call = self._call_joint if way == "joint" else self._call_part
        try:
            features, text = call(modality, value, arguments, tensors)
            token_ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            embeds = self.embed_token_ids(modality, token_ids)
            dropped = {*self.processor.unused_input_names, *_NOT_FEATURES}
            arrays = {name: _array(name, each) for name, each in features.items() if name not in dropped}
            if is_beside_images:
                arrays[BESIDE_IMAGES] = np.ones(1, np.int32)
            if getattr(value, "sound", None) is not None:
                sounds = self.embed_token_ids(Modality.AUDIO, token_ids)
                embeds = embeds + sounds
                arrays[VIDEO_AUDIO_RUNS] = _runs([each in sounds for each in token_ids if each in embeds])
        except MediaError:
            raise
        except Exception as error:  # processors check little, and fail as they please
            message = f"the processor refuses the {modality}: {error or type(error).__name__}"
            raise MediaError(message, code="media_processing_failed") from error
        num_embeds = sum(token_id in embeds for token_id in token_ids)
        if self._embeds_per_tile:
            num_embeds = int(arrays["aspect_ratio_mask"].sum()) * self._embeds_per_tile
        if not num_embeds:
            raise MediaError(f"nothing of the {modality} reaches the model: no token takes an embedding")
        if len(self._embed_token_ids.get(modality, ())) > 1:
            arrays["embed_token_ids"] = np.array([token_id for token_id in token_ids if token_id in embeds])
        return ProcessedItem(self._with_number_mark(text), num_embeds, embeds, arrays)

    def _merged(self, modality: Modality, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
        """Arguments of the processor of a modality, defaults and the request's."""
        return dict(self._all_merged(arguments or {})[_ARGUMENTS[modality]])

    def _all_merged(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        init = getattr(getattr(self.processor, "tokenizer", None), "init_kwargs", {})
        try:
            return dict(self.processor._merge_kwargs(tokenizer_init_kwargs=init, **arguments))
        except Exception as error:
            raise MediaError(f"mm_processor_kwargs cannot be used: {error}") from error

    def _call_part(
        self, modality: Modality, value: Any, arguments: dict[str, Any], tensors: str
    ) -> tuple[Mapping[str, Any], str]:
        """By the processor's own steps for one modality: no text is tokenized in vain."""
        processor, merged = self.processor, self._merged(modality, arguments) | {"return_tensors": tensors}
        if modality == Modality.IMAGE and getattr(processor, "num_query_tokens", None):
            # A connector of queries (BLIP-2), whose processor writes their tokens before the text.
            return processor.image_processor([value], **merged), self._placeholder_run(processor.num_query_tokens)
        if modality == Modality.IMAGE:
            merged |= self._new_names
            features, texts = processor._process_images(processor.prepare_inputs_layout(images=[value])[0], **merged)
        elif modality == Modality.AUDIO:
            features, texts = processor._process_audio([value], **merged)
        else:
            features, texts = processor._process_videos([value.frames], **merged | _video_arguments(value))
        return features, texts[0]

    def _call_joint(
        self, modality: Modality, value: Any, arguments: dict[str, Any], tensors: str
    ) -> tuple[Mapping[str, Any], str]:
        """By the joint call on a text that is the placeholder alone, for processors whose steps want more."""
        frames = modality == Modality.VIDEO
        media: dict[str, Any] = {_MEDIA[modality]: [value.frames if frames else value]}
        if frames and value.sound is not None:
            media |= {"audio": [value.sound], "audio_from_video_indices": [0], "load_audio_from_video": True}
        offsets = {"return_text_replacement_offsets": True, **(_video_arguments(value) if frames else {})}
        text = [self.placeholder(modality)]
        names = self._new_names if modality == Modality.IMAGE else {}
        features = self.processor(text=text, **media, **{**arguments, **offsets, **names}, return_tensors=tensors)
        replaced = features.pop("text_replacement_offsets")
        texts = {*self.processor.tokenizer.model_input_names, *_OF_TOKENS}
        return {name: each for name, each in features.items() if name not in texts}, replaced[0][0]["replacement"]

    @property
    def _new_names(self) -> dict[str, bool]:
        """Argument with which a processor gives its features today's names (Fuyu)."""
        known = inspect.signature(self.processor._process_images).parameters
        return {"return_legacy_image_output": False} if "return_legacy_image_output" in known else {}

    def _placeholder_run(self, num_tokens: int) -> str:
        return str(self.placeholder(Modality.IMAGE)) * num_tokens

    def _with_number_mark(self, text: str) -> str:
        """The text of an item, with `ITEM_NUMBER` where a processor writes the item's number (MiniCPM-V)."""
        start, end = (getattr(self.processor, f"image_id_{name}_token", None) for name in ("start", "end"))
        return text if start is None else text.replace(f"{start}0{end}", f"{start}{ITEM_NUMBER}{end}", 1)

    def embed_token_ids(self, modality: Modality, token_ids: Iterable[int]) -> list[int]:
        """Those token ids that take embeddings in the text of an item, of all that could."""
        present = set(token_ids)
        kinds = (modality, Modality.IMAGE) if modality == Modality.VIDEO else (modality,)
        for kind in kinds:  # frames of a video may stand there as images
            own = getattr(self.processor, f"{kind}_token_id", None)
            several = getattr(self.processor, f"{kind}_token_ids", None)
            for ids in (self._embed_token_ids.get(kind), [own], several):
                if taken := [token_id for token_id in ids or () if token_id in present]:
                    return taken
        return []


def _runs(are_sound: Sequence[bool]) -> NDArray[np.int32]:
    """[runs, 2]: how many embeddings of frames, and then of sound, follow each other."""
    runs = [[0, 0]]
    for is_sound in are_sound:
        if not is_sound and runs[-1][1]:
            runs.append([0, 0])
        runs[-1][is_sound] += 1
    return np.array(runs, np.int32)


def _metadata(num_frames: int, fps: float, video: VideoFrames | None) -> Any:
    utils = importlib.import_module("transformers.video_utils")
    size = {} if video is None else {"height": video.frames.shape[1], "width": video.frames.shape[2]}
    indices = None if video is None else video.indices
    return utils.VideoMetadata(
        total_num_frames=num_frames, fps=fps, duration=num_frames / fps, frames_indices=indices, **size
    )


def _video_arguments(video: VideoFrames) -> dict[str, Any]:
    """For a video whose frames are chosen already."""
    metadata = [_metadata(video.num_frames, video.fps, video)]
    return {"do_sample_frames": False, "video_metadata": metadata, "return_metadata": True}


def _sample(modality: Modality, part: Any) -> Any:
    """A small decoded item."""
    pixels = np.linspace(0, 255, 224 * 224 * 3).astype(np.uint8).reshape(1, 224, 224, 3)
    if modality == Modality.IMAGE:
        return PIL.Image.fromarray(pixels[0])
    if modality == Modality.AUDIO:
        return np.sin(np.arange(int(part.sampling_rate), dtype=np.float32) / 10)
    return VideoFrames(np.repeat(pixels, 4, axis=0), [0, 1, 2, 3], 4, 2.0)


def _config_token_ids(folder: Path) -> dict[str, list[int]]:
    """Tokens that take embeddings, by modality, as config.json names them: what the networks themselves look for."""
    config, ids = read_config(folder), {}
    for modality in _ARGUMENTS:
        names = (f"{modality}_token_id", f"{modality}_token_index")
        value = next((config[name] for name in names if isinstance(config.get(name), int)), None)
        if value is not None:
            ids[str(modality)] = [value]
    if "image" in ids:  # marks around an image, whose embeddings the tower gives too (Ovis 2)
        ids["image"] += config.get("visual_indicator_token_ids") or []
    return ids


def _embeds_per_tile(folder: Path) -> int:
    """Embeddings of a tile of an image in a network with cross attention: patches, and a token of the tower's own; 0
    in others."""
    config = read_config(folder)
    if config.get("model_type") != "mllama":
        return 0
    vision: Mapping[str, int] = config.get("vision_config") or {}
    return (vision.get("image_size", 448) // vision.get("patch_size", 14)) ** 2 + 1


def _array(name: str, value: Any) -> NDArray[Any]:
    """A feature as one array, whatever the processor has put it into."""
    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16, and float32 holds its values
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    if isinstance(value, (list, tuple)) and len(value) and not np.isscalar(value[0]):
        value = np.stack([_array(name, each) for each in value])
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise MediaError(f"the processor returns {name!r} as {array.dtype}", code="media_processing_failed")
    return np.ascontiguousarray(array)
