"""Tiny configurations of architectures that take media, each with a language model and its towers."""

from __future__ import annotations

from quire_testkit.parity.audio_cases import AUDIO_CASES
from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.deepstack_cases import DEEPSTACK_CASES
from quire_testkit.parity.image_token_cases import IMAGE_TOKEN_CASES
from quire_testkit.parity.mrope_cases import MROPE_CASES
from quire_testkit.parity.native_resolution_cases import NATIVE_RESOLUTION_CASES
from quire_testkit.parity.timm_cases import TIMM_CASES
from quire_testkit.parity.vision_cases import VISION_CASES
from quire_testkit.parity.whole_span_cases import WHOLE_SPAN_CASES

__all__ = ["MEDIA_CASES", "MEDIA_SAMPLE"]

MEDIA_CASES: dict[str, ParityCase] = {
    **VISION_CASES,
    **NATIVE_RESOLUTION_CASES,
    **IMAGE_TOKEN_CASES,
    **WHOLE_SPAN_CASES,
    **DEEPSTACK_CASES,
    **MROPE_CASES,
    **AUDIO_CASES,
    **TIMM_CASES,
}
"""Architecture -> its case."""

MEDIA_SAMPLE = (
    "Gemma3ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "VoxtralRealtimeForConditionalGeneration",
)
"""One for each mechanism: whole spans, M-RoPE in Transformers' layers, plain rows, sounds, M-RoPE with deep-stacked
features, sounds that are added to tokens."""
