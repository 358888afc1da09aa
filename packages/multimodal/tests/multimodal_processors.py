"""Processors of real families without weights, small: their own classes, a trained tokenizer, a config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_testkit.tokenizers import write_tokenizer

SQUARE = {"height": 28, "width": 28}
PIXELS = {"shortest_edge": 3136, "longest_edge": 28 * 28 * 16}
TILES = {"size": SQUARE, "crop_to_patches": True, "max_patches": 4}
GRID = {"size": {"shortest_edge": 28}, "crop_size": SQUARE, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}


@dataclass(frozen=True)
class Family:
    """How the processor of a family is built, and what is particular to it."""

    name: str
    """Class of the processor."""
    parts: dict[str, tuple[str, dict[str, Any]]]
    """Attribute -> class and arguments of the image processor, feature extractor, ..."""
    tokens: dict[str, str]
    """Special tokens; those named `..._token` are attributes of the tokenizer."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the processor's constructor."""
    embeds: dict[str, str] = field(default_factory=dict)
    """Name in config.json -> token that takes embeddings."""
    padded: tuple[str, ...] = ()
    """Features that the joint call pads to the largest item, so that those of one item alone are smaller."""
    axis: int = 0
    """Axis of the joint call's features along which its items follow each other."""
    written: tuple[str, str] = ("", "")
    """What the joint call writes before and behind a text, which a chat template says."""
    around: tuple[str, str] = ("", "")
    """What the joint call wants before and behind a placeholder."""
    one_per_text: bool = False
    """Whether the joint call takes one item for each text."""
    needs_torch: bool = False
    """Whether parts of it exist for torch only."""


def image(name: str, **arguments: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    return {"image_processor": (name, arguments)}


def audio(**arguments: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    return {"feature_extractor": ("WhisperFeatureExtractor", {"feature_size": 8, **arguments})}


def video(name: str, **arguments: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    return {"video_processor": (name, arguments)}


QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN_PARTS = image("Qwen2VLImageProcessorPil", size=PIXELS) | video("Qwen2VLVideoProcessor", size=PIXELS)
PIXTRAL_TOKENS = {"image_token": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"}
PIXTRAL_IMAGES = image("PixtralImageProcessorPil", size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
GEMMA_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
IMAGE = {"image_token": "<image>"}

MINICPM = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}

FAMILIES = {
    "llava": Family(
        "LlavaProcessor",
        image("CLIPImageProcessorPil", size={"shortest_edge": 28}, crop_size=SQUARE),
        IMAGE, LLAVA, {"image_token_index": "<image>"},
    ),
    "llava_next": Family("LlavaNextProcessor", image("LlavaNextImageProcessorPil", **GRID), IMAGE, LLAVA),
    "llava_onevision": Family(
        "LlavaOnevisionProcessor",
        image("LlavaOnevisionImageProcessorPil", size=SQUARE, image_grid_pinpoints=GRID["image_grid_pinpoints"])
        | video("LlavaOnevisionVideoProcessor", size=SQUARE),
        IMAGE | {"video_token": "<video>"},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        needs_torch=True,
    ),
    "qwen2_vl": Family("Qwen2VLProcessor", QWEN_PARTS, QWEN_TOKENS, needs_torch=True),
    "qwen2_5_vl": Family("Qwen2_5_VLProcessor", QWEN_PARTS, QWEN_TOKENS, needs_torch=True),
    "qwen3_vl": Family(
        "Qwen3VLProcessor",
        image("Qwen2VLImageProcessorPil", size=PIXELS, patch_size=16) | video("Qwen3VLVideoProcessor"),
        QWEN_TOKENS | {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
        needs_torch=True,
    ),
    "qwen2_5_omni": Family(
        "Qwen2_5OmniProcessor",
        QWEN_PARTS | audio(),
        {"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
         "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
         "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        needs_torch=True,
    ),
    "glm4v": Family(
        "Glm4vProcessor",
        image("Glm4vImageProcessorPil", size=PIXELS) | video("Glm4vVideoProcessor", size=PIXELS),
        {"image_token": "<|image|>", "video_token": "<|video|>", "b": "<|begin_of_video|>", "e": "<|end_of_video|>",
         "bi": "<|begin_of_image|>", "ei": "<|end_of_image|>"},
        needs_torch=True,
    ),
    "idefics3": Family(
        "Idefics3Processor",
        image("Idefics3ImageProcessorPil", size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
        IMAGE | {"fake": "<fake_token_around_image>"},
        {"image_seq_len": 4},
        axis=1,
    ),
    "gemma3": Family(
        "Gemma3Processor", image("Gemma3ImageProcessorPil", size=SQUARE), GEMMA_TOKENS, {"image_seq_length": 4},
        {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>"},
    ),
    "mllama": Family(
        "MllamaProcessor", image("MllamaImageProcessorPil", size=SQUARE), {"image_token": "<|image|>"}, {},
        {"image_token_index": "<|image|>"}, axis=1,
    ),
    "paligemma": Family(
        "PaliGemmaProcessor", image("SiglipImageProcessorPil", size=SQUARE, image_seq_length=4), IMAGE, {},
        {"image_token_index": "<image>"},
    ),
    "gemma3n": Family(
        "Gemma3nProcessor",
        image("SiglipImageProcessorPil", size=SQUARE) | {"feature_extractor": ("Gemma3nAudioFeatureExtractor", {})},
        GEMMA_TOKENS | {"audio_token": "<audio_soft_token>", "boa_token": "<start_of_audio>",
                        "eoa_token": "<end_of_audio>"},
        {"image_seq_length": 4, "audio_seq_length": 6},
        padded=("input_features", "input_features_mask"),
    ),
    "pixtral": Family(
        "PixtralProcessor", PIXTRAL_IMAGES, PIXTRAL_TOKENS, {"patch_size": 16}, {"image_token_index": "[IMG]"},
        padded=("pixel_values",),
    ),
    "mistral3": Family(
        "PixtralProcessor", PIXTRAL_IMAGES, PIXTRAL_TOKENS, {"patch_size": 16, "spatial_merge_size": 2},
        {"image_token_index": "[IMG]"},
    ),
    "internvl": Family(
        "InternVLProcessor",
        image("GotOcr2ImageProcessorPil", **TILES) | video("InternVLVideoProcessor", size=SQUARE),
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
        {"image_seq_length": 4},
        needs_torch=True,
    ),
    "aya_vision": Family(
        "AyaVisionProcessor",
        image("GotOcr2ImageProcessorPil", **TILES),
        IMAGE | {"a": "<|START_OF_IMG|>", "b": "<|END_OF_IMG|>", "c": "<|IMG_PATCH|>", "d": "<|IMG_LINE_BREAK|>"},
        {"patch_size": 14, "img_size": 28},
        {"image_token_index": "<|IMG_PATCH|>"},
    ),
    "llama4": Family(
        "Llama4Processor",
        image("Llama4ImageProcessor", size={"height": 56, "width": 56}, max_patches=4),
        {"image_token": "<|image|>", "a": "<|image_start|>", "b": "<|image_end|>", "c": "<|patch|>",
         "d": "<|tile_x_separator|>", "e": "<|tile_y_separator|>"},
        {},
        {"image_token_index": "<|patch|>"},
        needs_torch=True,
    ),
    "ovis2": Family(
        "Ovis2Processor",
        image("Ovis2ImageProcessorPil", size={"height": 56, "width": 56}),
        IMAGE | {"a": "<IMG_ATOM>", "b": "<IMG_START>", "c": "<IMG_GRID>", "d": "<IMG_COL>", "e": "<IMG_ROW>",
                 "f": "<IMG_END>"},
        {"image_seq_length": 4},
        {"image_token_id": "<IMG_ATOM>"},
    ),
    "lfm2_vl": Family(
        "Lfm2VlProcessor", image("Lfm2VlImageProcessor"),
        IMAGE | {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
                 "image_thumbnail": "<|img_thumbnail|>"},
        needs_torch=True,
    ),
    "janus": Family(
        "JanusProcessor", image("JanusImageProcessorPil", size={"height": 32, "width": 32}),
        {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
        {"num_image_tokens": 4}, {"image_token_id": "<image_placeholder>"},
    ),
    "paddleocr_vl": Family(
        "PaddleOCRVLProcessor",
        image("PaddleOCRVLImageProcessorPil"),
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "qwen2_audio": Family(
        "Qwen2AudioProcessor", audio(),
        {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    ),
    "audioflamingo3": Family(
        "AudioFlamingo3Processor", audio(), {"audio_token": "<sound>"}, one_per_text=True, needs_torch=True,
    ),
    "phi4_multimodal": Family(
        "Phi4MultimodalProcessor",
        image("Phi4MultimodalImageProcessor")
        | {"audio_processor": ("Phi4MultimodalFeatureExtractor", {})},
        {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
        padded=("audio_input_features", "audio_attention_mask"),
        needs_torch=True,
    ),
}  # fmt: skip

FAMILIES |= {
    "blip-2": Family(
        "Blip2Processor",
        image("BlipImageProcessorPil", size=SQUARE),
        IMAGE,
        {"num_query_tokens": 4},
        {"image_token_index": "<image>"},
    ),
    "chameleon": Family(
        "ChameleonProcessor",
        image("ChameleonImageProcessorPil", size={"shortest_edge": 28}, crop_size=SQUARE),
        IMAGE | {"boi_token": "<racm3:break>", "eoi_token": "<eoss>", "sep_token": "<reserved08706>"},
        {"image_seq_length": 4},
        written=("", "<reserved08706>"),
    ),
    "deepseek_ocr2": Family(
        "DeepseekOcr2Processor",
        image("DeepseekOcr2ImageProcessorPil", size={"height": 128, "width": 128}, tile_size=64),
        IMAGE,
        {},
        {"image_token_id": "<image>"},
    ),
    "deepseek_vl": Family(
        "DeepseekVLProcessor",
        image("DeepseekVLImageProcessorPil", size=SQUARE),
        {"image_token": "<image_placeholder>"},
        {"num_image_tokens": 4},
    ),
    "deepseek_vl_hybrid": Family(
        "DeepseekVLHybridProcessor",
        image("DeepseekVLHybridImageProcessorPil", size=SQUARE, high_res_size={"height": 56, "width": 56}),
        {"image_token": "<image_placeholder>"},
        {"num_image_tokens": 4},
    ),
    "emu3": Family(
        "Emu3Processor",
        image("Emu3ImageProcessor", min_pixels=1024, max_pixels=4096, spatial_factor=8),
        IMAGE
        | {
            "boi_token": "<|image start|>",
            "eoi_token": "<|image end|>",
            "image_wrapper_token": "<|image token|>",
            "eof_token": "<|extra_201|>",
        },
        written=("<|im_start|>", ""),
        padded=("pixel_values",),
    ),
    "exaone4_5": Family("Exaone4_5_Processor", QWEN_PARTS, QWEN_TOKENS, needs_torch=True),
    "fuyu": Family(
        "FuyuProcessor",
        image("FuyuImageProcessorPil", size={"height": 60, "width": 90}),
        {"image_token": "|SPEAKER|", "b": "|NEWLINE|", "c": "<0x04>", "d": "<s>"},
        {},
        {"image_token_id": "|SPEAKER|"},
        needs_torch=True,
    ),
    "gemma4": Family(
        "Gemma4Processor",
        image("Gemma4ImageProcessorPil")
        | video("Gemma4VideoProcessor")
        | {"feature_extractor": ("Gemma4AudioFeatureExtractor", {})},
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        padded=("input_features", "input_features_mask"),
        needs_torch=True,
    ),
    "granite4_vision": Family(
        "Granite4VisionProcessor",
        image("LlavaNextImageProcessorPil", **GRID),
        IMAGE,
        {"patch_size": 14, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
    ),
    "granite_docling": Family(
        "GraniteDoclingProcessor",
        image("GraniteDoclingImageProcessorPil"),
        IMAGE | {"fake": "<fake_token_around_image>", "g": "<global-img>"},
        {"image_seq_len": 4},
        padded=("pixel_values", "pixel_attention_mask"),
    ),
    "hyperclovax_vision_v2": Family("HyperCLOVAXVisionV2Processor", QWEN_PARTS, QWEN_TOKENS, needs_torch=True),
    "minicpmv4_6": Family(
        "MiniCPMV4_6Processor",
        image("MiniCPMV4_6ImageProcessorPil") | video("MiniCPMV4_6VideoProcessor"),
        MINICPM,
        needs_torch=True,
        axis=3,
    ),
    "minicpm_ocr": Family(
        "MiniCPMOcrProcessor",
        image("MiniCPMOcrImageProcessor") | video("MiniCPMOcrVideoProcessor"),
        MINICPM,
        needs_torch=True,
        axis=3,
    ),
    "muse_glimmer": Family(
        "MuseGlimmerProcessor",
        image("MuseGlimmerImageProcessor") | video("MuseGlimmerVideoProcessor"),
        {
            "image_token": "<|patch|>",
            "b": "<|image_start|>",
            "c": "<|image_end|>",
            "video_token": "<|video|>",
            "e": "<|vid_frame_separator|>",
            "f": "<|vid_start|>",
            "g": "<|vid_end|>",
        },
        needs_torch=True,
    ),
    "step3p7": Family(
        "Step3p7Processor",
        image("Step3p7ImageProcessor"),
        {
            "image_token": "<im_patch>",
            "b": "<patch_start>",
            "c": "<patch_end>",
            "d": "<patch_newline>",
            "e": "<im_start>",
            "f": "<im_end>",
        },
        needs_torch=True,
    ),
    "cohere_compass": Family(
        "CohereCompassProcessor",
        image("CohereCompassImageProcessorPil", size=PIXELS) | video("CohereCompassVideoProcessor"),
        {
            "image_token": "<|IMAGE_PAD|>",
            "video_token": "<|VIDEO_PAD|>",
            "vision_start_token": "<|VISION_START|>",
            "vision_end_token": "<|VISION_END|>",
        },
        needs_torch=True,
    ),
    "cosmos3_edge": Family(
        "Cosmos3EdgeProcessor",
        image("Cosmos3EdgeImageProcessorPil") | video("Cosmos3EdgeVideoProcessor"),
        QWEN_TOKENS | {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
        needs_torch=True,
    ),
    "inkling_mm_model": Family(
        "InklingProcessor",
        image("InklingImageProcessor", size={"height": 14, "width": 14})
        | {"feature_extractor": ("InklingFeatureExtractor", {"feature_size": 8})},
        {
            "image_token": "<|unused_200054|>",
            "audio_token": "<|unused_200053|>",
            "image_bos_token": "<|content_image|>",
            "audio_bos_token": "<|content_audio_input|>",
        },
        padded=("audio_input_ids", "audio_input_ids_mask"),
        needs_torch=True,
    ),
    "aria": Family(
        "AriaProcessor",
        image("AriaImageProcessorPil", max_image_size=490, min_image_size=28),
        {"image_token": "<|img|>"},
        {"size_conversion": {490: 4, 980: 8}},
    ),
    "cohere2_vision": Family(
        "Cohere2VisionProcessor",
        image("Cohere2VisionImageProcessor", size=SQUARE, max_patches=4),
        {
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        needs_torch=True,
    ),
    "got_ocr2": Family(
        "GotOcr2Processor",
        image("GotOcr2ImageProcessorPil", **TILES),
        {"image_token": "<imgpad>", "b": "<img>", "c": "</img>"},
    ),
    "kimi_k25": Family(
        "Kimi_K25Processor",
        image("Kimi_K25ImageProcessor") | video("Kimi_K25VideoProcessor"),
        {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
        needs_torch=True,
    ),
    "lighton_ocr": Family(
        "LightOnOcrProcessor",
        image("PixtralImageProcessorPil", size={"longest_edge": 64}, patch_size={"height": 16, "width": 16}),
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
        {"patch_size": 16, "spatial_merge_size": 2},
        padded=("pixel_values",),
    ),
    "qianfan_ocr": Family(
        "QianfanOCRProcessor",
        image("GotOcr2ImageProcessorPil", **TILES),
        IMAGE | {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        {"image_seq_length": 4},
    ),
    "video_llama_3": Family(
        "VideoLlama3Processor",
        image("VideoLlama3ImageProcessorPil") | video("VideoLlama3VideoProcessor"),
        {"image_token": "<image>", "video_token": "<video>"},
        needs_torch=True,
    ),
    "llava_next_video": Family(
        "LlavaNextVideoProcessor",
        image("LlavaNextImageProcessorPil", **GRID)
        | video("LlavaNextVideoVideoProcessor", size={"shortest_edge": 28}, crop_size=SQUARE),
        IMAGE | {"video_token": "<video>"},
        LLAVA,
        needs_torch=True,
    ),
    "video_llava": Family(
        "VideoLlavaProcessor",
        image("VideoLlavaImageProcessor", size={"shortest_edge": 28}, crop_size=SQUARE)
        | video("VideoLlavaVideoProcessor", size={"shortest_edge": 28}, crop_size=SQUARE),
        IMAGE | {"video_token": "<video>"},
        LLAVA,
        needs_torch=True,
    ),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeProcessor",
        image("Ernie4_5_VLMoeImageProcessorPil", size=PIXELS)
        | video("Ernie4_5_VLMoeVideoProcessor", size=PIXELS, draw_on_frames=False),
        {
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        needs_torch=True,
    ),
    "perception_lm": Family(
        "PerceptionLMProcessor",
        image("PerceptionLMImageProcessor", tile_size=28, max_num_tiles=4)
        | video("PerceptionLMVideoProcessor", size=SQUARE),
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        {"patch_size": 7},
        one_per_text=True,
        needs_torch=True,
    ),
    "hunyuan_vl": Family(
        "HunYuanVLProcessor",
        image("HunYuanVLImageProcessorPil", size={"shortest_edge": 64 * 64, "longest_edge": 128 * 128}),
        {
            "image_token": "<|hy_image|>",
            "image_start_token": "<|hy_image_start|>",
            "image_end_token": "<|hy_image_end|>",
            "pad_token": "<|hy_pad|>",
        },
        around=("<|hy_image_start|>", "<|hy_image_end|>"),
    ),
    "glm46v": Family(
        "Glm46VProcessor",
        image("Glm46VImageProcessorPil", size=PIXELS) | video("Glm46VVideoProcessor", size=PIXELS),
        FAMILIES["glm4v"].tokens,
        needs_torch=True,
    ),
    "glm5_next": Family(
        "Glm5NextProcessor",
        image("Glm5NextImageProcessorPil", max_image_tokens=64) | video("Glm5NextVideoProcessor"),
        FAMILIES["glm4v"].tokens,
        needs_torch=True,
    ),
}


def build_processor(family: str, folder: Path) -> Any:
    """The processor of a family; its tokenizer is written into the folder."""
    import transformers

    spec = FAMILIES[family]
    write_tokenizer(folder, vocab_size=600)
    named = {name: token for name, token in spec.tokens.items() if name.endswith("_token")}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=named, bos_token="<|im_start|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(spec.tokens.values())})
    parts = {name: getattr(transformers, kind)(**arguments) for name, (kind, arguments) in spec.parts.items()}
    return getattr(transformers, spec.name)(**parts, tokenizer=tokenizer, **spec.arguments)


def save_processor(family: str, folder: Path) -> None:
    """Write the tokenizer, the processor and a config.json of a family into a folder."""
    processor = build_processor(family, folder)
    processor.save_pretrained(folder)
    tokens = FAMILIES[family].embeds.items()
    ids = {name: processor.tokenizer.convert_tokens_to_ids(token) for name, token in tokens}
    (folder / "config.json").write_text(json.dumps({"model_type": family, **ids}))
