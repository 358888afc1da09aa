"""Tiny random checkpoints that watch and listen, each with the processor of its family. Imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire_testkit.media_files import VideoClip
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

__all__ = ["FAMILIES", "MediaFamily", "MediaModel"]

_NUM_TEXT_TOKENS = 600

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}{{ tokens[part.type] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFamily:
    """How the processor of an architecture is built, and what its tiny network needs beyond its parity case."""

    processor: str
    """Class of Transformers."""
    parts: Mapping[str, tuple[str, Mapping[str, Any]]]
    """Attribute of the processor -> class and arguments of the image processor, feature extractor, ..."""
    tokens: Mapping[str, str]
    """Attribute of the tokenizer, or any other name -> special token."""
    placeholders: Mapping[str, str]
    """Modality -> what a chat template writes for an item."""
    ids: Mapping[str, str | list[str]]
    """Field of config.json -> the token whose id it holds, or several."""
    part_ids: Mapping[str, str] = field(default_factory=dict)
    """The same for a field of a part of config.json, "vision_config.image_token_id"."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the processor's constructor."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration over those of the parity case; mappings go over mappings."""
    call_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the processor's call, which keep items small."""
    one_per_text: bool = False
    """Whether the joint call takes one item for each text."""
    pads_sounds: bool = False
    """Whether what a sound is heard as depends on the length of others in the joint call."""
    items_first: bool = False
    """Whether prompts begin with an item: Transformers lets tokens before the first one see all of them."""
    exclusive: bool = False
    """Whether the joint call takes images or videos, not both."""


class MediaModel:
    """A random network with its processor, in a folder.

    Args:
        folder: Where the checkpoint goes.
        architecture: One of `FAMILIES`.
    """

    def __init__(self, folder: Path, architecture: str) -> None:
        import transformers

        family = FAMILIES[architecture]
        self.folder, self.family = folder, family
        write_tokenizer(folder, vocab_size=_NUM_TEXT_TOKENS)
        named = {name: token for name, token in family.tokens.items() if name.endswith("_token")}
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, extra_special_tokens=named, bos_token="<|im_start|>", pad_token="<|endoftext|>"
        )
        tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens.values())})
        template = f"{{% set tokens = {dict(family.placeholders)!r} %}}{CHAT_TEMPLATE}"
        parts = {name: getattr(transformers, kind)(**arguments) for name, (kind, arguments) in family.parts.items()}
        self.processor: Any = getattr(transformers, family.processor)(
            **parts, tokenizer=tokenizer, chat_template=template, **family.arguments
        )
        case = MEDIA_CASES[architecture]
        ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in family.ids.items()}
        text = {"vocab_size": len(tokenizer), "eos_token_id": None, "max_position_embeddings": 2048}
        fields = _merged(case.fields, {"text_config": text} if "text_config" in case.fields else text)
        fields = _merged(_merged(fields, ids), family.fields)
        for name, token in family.part_ids.items():
            part, _, name = name.partition(".")
            fields = _merged(fields, {part: {name: tokenizer.convert_tokens_to_ids(token)}})
        self.network = write_checkpoint(folder, architecture, dataclasses.replace(case, fields=fields))
        self.network.generation_config.eos_token_id = None  # texts do not end by themselves
        self.processor.save_pretrained(folder)

    def expected(
        self,
        text: str,
        num_tokens: int,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[VideoClip] = (),
        audio: Sequence[NDArray[np.float32]] = (),
        generate: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> list[int]:
        """Greedy tokens of Transformers after the joint call of the processor.

        Args:
            text: With a placeholder for each item.
            num_tokens: How many tokens to generate.
            images: Of Pillow.
            videos: All their frames.
            audio: Samples at the processor's rate, [samples].
            generate: Arguments of the network's `generate`.
            arguments: Of the processor.
        """
        media: dict[str, Any] = {"images": list(images)} if images else {}
        if videos:
            media["videos"] = [clip.frames for clip in videos]
            media["video_metadata"] = [clip.metadata for clip in videos]
        if audio:
            media["audio"] = list(audio)
        inputs = self.processor(
            text=[text], **media, return_tensors="pt", text_kwargs={"add_special_tokens": False}, **arguments
        )
        with torch.inference_mode():
            ids = self.network.generate(
                **inputs,
                **(generate or {}),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        tokens: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


def _merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with others over them, mapping over mapping."""
    result = dict(fields)
    for name, value in more.items():
        old = result.get(name)
        result[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


_SQUARE = {"height": 32, "width": 32}
_QWEN_PIXELS = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
_QWEN_CLIP_PIXELS = {"shortest_edge": 16 * 16, "longest_edge": 8 * 64 * 64}
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_QWEN_IDS = {f"{name}_id": token for name, token in _QWEN_TOKENS.items()}
_QWEN_PLACEHOLDERS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_QWEN_VIDEO = {"size": _QWEN_CLIP_PIXELS, "patch_size": 4, "min_frames": 2, "max_frames": 8}
_ERNIE_TOKENS = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
_GEMMA_PATCHES = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
_OVIS_MARKS = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]


def _qwen(processor: str, videos: str, **of_videos: Any) -> MediaFamily:
    images = {"size": _QWEN_PIXELS, "patch_size": 4}
    return MediaFamily(
        processor=processor,
        parts={
            "image_processor": ("Qwen2VLImageProcessorPil", images),
            "video_processor": (videos, {**_QWEN_VIDEO, **of_videos}),
        },
        tokens=_QWEN_TOKENS,
        placeholders=_QWEN_PLACEHOLDERS,
        ids=_QWEN_IDS,
    )


def _whisper(**arguments: Any) -> tuple[str, dict[str, Any]]:
    return "WhisperFeatureExtractor", {"feature_size": 16, **arguments}


_OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def _omni(processor: str, ids: str, **fields: Any) -> MediaFamily:
    """The thinker of an Omni model.

    Args:
        processor: Class of Transformers.
        ids: End of the names of fields that hold token ids.
        fields: Of the configuration.
    """
    return MediaFamily(
        processor=processor,
        parts={
            "image_processor": ("Qwen2VLImageProcessorPil", {"size": _QWEN_PIXELS, "patch_size": 4}),
            "video_processor": ("Qwen2VLVideoProcessor", _QWEN_VIDEO),
            "feature_extractor": _whisper(chunk_length=2),
        },
        tokens=_OMNI_TOKENS,
        placeholders={
            "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
            "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
            "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
        },
        ids={
            f"image_token_{ids}": "<|IMAGE|>",
            f"video_token_{ids}": "<|VIDEO|>",
            f"audio_token_{ids}": "<|AUDIO|>",
            "audio_start_token_id": "<|audio_bos|>",
            "vision_start_token_id": "<|vision_bos|>",
        },
        fields=fields,
        call_arguments={"videos_kwargs": {"size": _QWEN_CLIP_PIXELS}},
    )


def _speech(
    processor: str,
    token: str,
    audio: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    **tokens: str,
) -> MediaFamily:
    """A network that hears one sound for each text, by Whisper's features.

    Args:
        processor: Class of Transformers.
        token: Stands for a sound.
        audio: Arguments of the feature extractor's call.
        fields: Of the configuration.
        tokens: Others of the tokenizer.
    """
    return MediaFamily(
        processor=processor,
        parts={"feature_extractor": _whisper(chunk_length=2)},
        tokens={"audio_token": token, **tokens},
        placeholders={"audio": token},
        ids={"audio_token_id": token},
        one_per_text=True,
        fields=fields or {},
        call_arguments={"audio_kwargs": audio} if audio else {},
    )


_TIMM_FAMILIES = {
    "Gemma3nForConditionalGeneration": MediaFamily(
        processor="Gemma3nProcessor",
        parts={
            "image_processor": ("SiglipImageProcessorPil", {"size": {"height": 64, "width": 64}}),
            "feature_extractor": ("Gemma3nAudioFeatureExtractor", {}),
        },
        tokens={  # two of text, two of the tower that sees, two of the one that hears
            "boi_token": "<start_of_image>",
            "boa_token": "<start_of_audio>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "eoa_token": "<end_of_audio>",
            "audio_token": "<audio_soft_token>",
        },
        placeholders={"image": "<image_soft_token>", "audio": "<audio_soft_token>"},
        ids={"image_token_id": "<image_soft_token>", "audio_token_id": "<audio_soft_token>"},
        arguments={"image_seq_length": 4, "audio_seq_length": 40},
        fields={
            "audio_soft_tokens_per_image": 40,
            "text_config": {"vocab_size_per_layer_input": _NUM_TEXT_TOKENS + 2},
            "vision_config": {"vocab_offset": _NUM_TEXT_TOKENS + 2, "vocab_size": 2},
            "audio_config": {"vocab_offset": _NUM_TEXT_TOKENS + 4, "vocab_size": 2, "input_feat_size": 128},
        },
        pads_sounds=True,
    ),
}

FAMILIES: dict[str, MediaFamily] = {
    "MllamaForConditionalGeneration": MediaFamily(
        processor="MllamaProcessor",
        parts={"image_processor": ("MllamaImageProcessorPil", {"size": _SQUARE})},
        tokens={"image_token": "<|image|>"},
        placeholders={"image": "<|image|>"},
        ids={"image_token_index": "<|image|>"},
        items_first=True,
    ),
    **{name: family for name, family in _TIMM_FAMILIES.items() if name in MEDIA_CASES},
    "PaliGemmaForConditionalGeneration": MediaFamily(
        processor="PaliGemmaProcessor",
        parts={"image_processor": ("SiglipImageProcessorPil", {"size": _SQUARE, "image_seq_length": 16})},
        tokens={"image_token": "<image>"},
        placeholders={"image": "<image>"},
        ids={"image_token_index": "<image>"},
    ),
    "Qwen2VLForConditionalGeneration": _qwen("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "Qwen2_5_VLForConditionalGeneration": _qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "Qwen3VLForConditionalGeneration": _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "Ernie4_5_VLMoeForConditionalGeneration": MediaFamily(
        processor="Ernie4_5_VLMoeProcessor",
        parts={
            "image_processor": ("Ernie4_5_VLMoeImageProcessorPil", {"size": _QWEN_PIXELS, "patch_size": 4}),
            "video_processor": (
                "Ernie4_5_VLMoeVideoProcessor",
                {"size": _QWEN_CLIP_PIXELS, "patch_size": 4, "draw_on_frames": False, "min_frames": 2},
            ),
        },
        tokens=_ERNIE_TOKENS,
        placeholders={
            "image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
            "video": "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
        },
        ids={f"{name}_id": token for name, token in _ERNIE_TOKENS.items()},
    ),
    "HunYuanVLForConditionalGeneration": MediaFamily(
        processor="HunYuanVLProcessor",
        parts={
            "image_processor": (
                "HunYuanVLImageProcessorPil",
                {"size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}, "patch_size": 8},
            )
        },
        tokens={
            "image_token": "<|hy_image|>",
            "image_start_token": "<|hy_image_start|>",
            "image_end_token": "<|hy_image_end|>",
            "pad_token": "<|hy_pad|>",
        },
        placeholders={"image": "<|hy_image_start|><|hy_image|><|hy_image_end|>"},
        ids={"image_token_id": "<|hy_image|>"},
    ),
    "LlavaNextVideoForConditionalGeneration": MediaFamily(
        processor="LlavaNextVideoProcessor",
        parts={
            "image_processor": (
                "LlavaNextImageProcessorPil",
                {
                    "size": {"shortest_edge": 32},
                    "crop_size": _SQUARE,
                    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
                },
            ),
            "video_processor": ("LlavaNextVideoVideoProcessor", {"size": {"shortest_edge": 32}, "crop_size": _SQUARE}),
        },
        tokens={"image_token": "<image>", "video_token": "<video>"},
        placeholders={"image": "<image>", "video": "<video>"},
        ids={"image_token_index": "<image>", "video_token_index": "<video>"},
        arguments={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "LlavaOnevisionForConditionalGeneration": MediaFamily(
        processor="LlavaOnevisionProcessor",
        parts={
            "image_processor": (
                "LlavaOnevisionImageProcessorPil",
                {"size": _SQUARE, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
            ),
            "video_processor": ("LlavaOnevisionVideoProcessor", {"size": _SQUARE}),
        },
        tokens={"image_token": "<image>", "video_token": "<video>"},
        placeholders={"image": "<image>", "video": "<video>"},
        ids={"image_token_index": "<image>", "video_token_index": "<video>"},
        arguments={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "VideoLlama3ForConditionalGeneration": MediaFamily(
        processor="VideoLlama3Processor",
        parts={
            "image_processor": ("VideoLlama3ImageProcessorPil", {"size": _QWEN_PIXELS, "patch_size": 8}),
            "video_processor": ("VideoLlama3VideoProcessor", {"size": _QWEN_CLIP_PIXELS, "patch_size": 8}),
        },
        tokens={"image_token": "<image>", "video_token": "<video>"},
        placeholders={"image": "<image>", "video": "<video>"},
        ids={"image_token_id": "<image>", "video_token_id": "<video>"},
    ),
    "InternVLForConditionalGeneration": MediaFamily(
        processor="InternVLProcessor",
        parts={
            "image_processor": (
                "GotOcr2ImageProcessorPil",
                {"size": _SQUARE, "crop_to_patches": True, "max_patches": 4},
            ),
            "video_processor": ("InternVLVideoProcessor", {"size": _SQUARE}),
        },
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        placeholders={"image": "<IMG_CONTEXT>", "video": "<video>"},
        ids={"image_token_id": "<IMG_CONTEXT>"},
        arguments={"image_seq_length": 4},
    ),
    "SmolVLMForConditionalGeneration": MediaFamily(
        processor="SmolVLMProcessor",
        parts={
            "image_processor": (
                "SmolVLMImageProcessorPil",
                {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
            ),
            "video_processor": (
                "SmolVLMVideoProcessor",
                {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}, "num_frames": 4, "fps": 1},
            ),
        },
        tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        placeholders={"image": "<image>", "video": "<video>"},
        ids={"image_token_id": "<image>"},
        arguments={"image_seq_len": 4},
        exclusive=True,
    ),
    "Gemma4ForConditionalGeneration": MediaFamily(
        processor="Gemma4Processor",
        parts={
            "image_processor": ("Gemma4ImageProcessorPil", _GEMMA_PATCHES),
            "video_processor": ("Gemma4VideoProcessor", _GEMMA_PATCHES),
            "feature_extractor": ("Gemma4AudioFeatureExtractor", {}),
        },
        tokens={
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "audio_token": "<|audio|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        placeholders={"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"},
        ids={"image_token_id": "<|image|>", "video_token_id": "<|video|>", "audio_token_id": "<|audio|>"},
        fields={
            "text_config": {"vocab_size_per_layer_input": 608, "sliding_window": 100},
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [128, 4],
                "output_proj_dims": 32,
            },
        },
    ),
    "MiniCPMV4_6ForConditionalGeneration": MediaFamily(
        processor="MiniCPMV4_6Processor",
        parts={
            "image_processor": (
                "MiniCPMV4_6ImageProcessorPil",
                {"patch_size": 8, "scale_resolution": 64, "max_slice_nums": 4},
            ),
            "video_processor": ("MiniCPMV4_6VideoProcessor", {"patch_size": 8, "scale_resolution": 64}),
        },
        tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
        placeholders={"image": "<|image_pad|>"},
        ids={"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    ),
    "Ovis2ForConditionalGeneration": MediaFamily(
        processor="Ovis2Processor",
        parts={"image_processor": ("Ovis2ImageProcessorPil", {"size": _SQUARE, "max_patches": 4})},
        tokens={"image_token": "<image>", "atom": "<IMG_ATOM>", **{mark: mark for mark in _OVIS_MARKS}},
        placeholders={"image": "<image>"},
        ids={"image_token_id": "<IMG_ATOM>", "visual_indicator_token_ids": _OVIS_MARKS},
        arguments={"image_seq_length": 4},
        fields={"vocab_size": 608},
    ),
    "PerceptionLMForConditionalGeneration": MediaFamily(
        processor="PerceptionLMProcessor",
        parts={
            "image_processor": ("PerceptionLMImageProcessor", {"tile_size": 32, "max_num_tiles": 4}),
            "video_processor": ("PerceptionLMVideoProcessor", {"size": _SQUARE}),
        },
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        placeholders={"image": "<|image|>", "video": "<|video|>"},
        ids={"image_token_id": "<|image|>", "video_token_id": "<|video|>"},
        arguments={"patch_size": 8},
        one_per_text=True,
    ),
    "Phi4MultimodalForCausalLM": MediaFamily(
        processor="Phi4MultimodalProcessor",
        parts={
            "image_processor": ("Phi4MultimodalImageProcessor", {}),
            "audio_processor": ("Phi4MultimodalFeatureExtractor", {}),
        },
        tokens={"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
        placeholders={"image": "<|endoftext10|>", "audio": "<|endoftext11|>"},
        ids={},
        part_ids={"vision_config.image_token_id": "<|endoftext10|>", "audio_config.audio_token_id": "<|endoftext11|>"},
        fields={
            "original_max_position_embeddings": 2048,  # behind it, `generate` forgets images
            "vision_config": {"image_size": 448, "patch_size": 14, "crop_size": 448},
            "audio_config": {"input_size": 80},
        },
        pads_sounds=True,
    ),
    "Qwen2AudioForConditionalGeneration": MediaFamily(
        processor="Qwen2AudioProcessor",
        parts={"feature_extractor": _whisper(chunk_length=2)},
        tokens={"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        placeholders={"audio": "<|AUDIO|>"},
        ids={"audio_token_index": "<|AUDIO|>"},
        fields={"audio_config": {"max_source_positions": 100}},
    ),
    "AudioFlamingo3ForConditionalGeneration": _speech(
        "AudioFlamingo3Processor", "<sound>", fields={"audio_config": {"max_source_positions": 100}}
    ),
    "GlmAsrForConditionalGeneration": _speech("GlmAsrProcessor", "<|pad|>"),
    "Qwen3ASRForConditionalGeneration": _speech(
        "Qwen3ASRProcessor",
        "<|audio_pad|>",
        {"pad_to_multiple_of": 16_000},
        audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": _omni(
        "Qwen2_5OmniProcessor", "index", audio_config={"max_source_positions": 100, "n_window": 25}
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": _omni(
        "Qwen3OmniMoeProcessor",
        "id",
        audio_config={"max_source_positions": 100, "n_window": 50, "n_window_infer": 100},
        position_id_per_seconds=13,
    ),
}
"""Architecture -> its family."""
