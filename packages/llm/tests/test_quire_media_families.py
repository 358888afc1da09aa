"""Images, videos and sounds of many families: tokens are those of Transformers after its processor's joint call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm_greedy_tokens import greedy_tokens
from llm_prepared_prompts import PreparedPrompts

from quire.assemble import build_parts
from quire.config import QuireConfig
from quire_engine import LLMEngine
from quire_interfaces import Modality
from quire_multimodal.decode import VideoFrames
from quire_testkit.media_files import VideoClip, clip, read_clip, tone, video_file
from quire_testkit.media_models import FAMILIES, MediaModel
from quire_testkit.seeing_models import drawing

NUM_TOKENS = 6
NAMES = {"image": "images", "video": "videos", "audio": "audio"}
ITEMS: dict[str, list[Any]] = {
    "image": [drawing(1), drawing(2, (60, 30))],
    "video": [clip(1), clip(4, size=(40, 64))],
    "audio": [tone(1), tone(2, 1.4)],
}
"""Modality -> two items that differ in size; sounds of less than a second depend on others in Qwen3-Omni's encoder."""


def as_prepared(item: Any) -> Any:
    """The item as a preparing process has it once it is decoded."""
    if not isinstance(item, VideoClip):
        return item
    num_frames = len(item.frames)
    return VideoFrames(item.frames, list(range(num_frames)), num_frames, item.fps)


def prompts_of(model: MediaModel) -> list[tuple[str, dict[str, list[Any]]]]:
    """Texts and their items: each alone, two of a modality, and all modalities by turns, as far as the joint call of
    the processor takes them."""
    tokens = model.family.placeholders
    begin = "" if model.family.items_first else "this "
    prompts = [(f"{begin}{token} so", {kind: [item]}) for kind, token in tokens.items() for item in ITEMS[kind]]
    together = {**ITEMS, "audio": [tone(1), tone(2)]} if model.family.pads_sounds else ITEMS
    if model.family.one_per_text:
        return prompts
    prompts += [(f"{begin}{token} and {token} so", {kind: together[kind]}) for kind, token in tokens.items()]
    if len(tokens) > 1 and not model.family.exclusive:
        prompts.append((" then ".join([*tokens.values()] * 2), {kind: together[kind] for kind in tokens}))
    return prompts


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Transformers' own processors
@pytest.mark.parametrize("architecture", FAMILIES)
def test_tokens_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    model = MediaModel(tmp_path, architecture)
    prepared = PreparedPrompts(tmp_path)
    arguments = dict(model.family.call_arguments)
    prompts, expected = [], []
    for text, media in prompts_of(model):
        named = {NAMES[kind]: items for kind, items in media.items()}
        options = {"do_sample_frames": False} if "video" in media else {}
        expected.append(model.expected(text, NUM_TOKENS, **named, **options, **arguments))
        items = {kind: [as_prepared(item) for item in each] for kind, each in media.items()}
        prompts.append(prepared.prompt(text, items, **arguments))
    assert len({tuple(tokens) for tokens in expected}) > 1
    config = QuireConfig.of(model=str(tmp_path), dtype="float32", max_model_len=1100, kv_cache_memory_bytes=1 << 24)
    engine = LLMEngine(build_parts(config), config.engine)
    try:
        assert greedy_tokens(engine, prompts, NUM_TOKENS) == expected
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Transformers' own processors
@pytest.mark.parametrize("architecture", [name for name in FAMILIES if "Omni" in name])
def test_videos_are_heard(tmp_path: Path, architecture: str) -> None:
    model = MediaModel(tmp_path, architecture)
    prepared = PreparedPrompts(tmp_path)
    heard = {"use_audio_in_video": True, **model.family.call_arguments}
    token, data = model.family.placeholders["video"], video_file(clip(1, 8), tone(1, 4.0))
    video = prepared.processor.decode(Modality.VIDEO, data, heard)
    silent = prepared.processor.decode(Modality.VIDEO, video_file(clip(4, 8)), heard)
    assert video.sound is not None
    assert silent.sound is None
    shown, text = read_clip(data), f"this {token} so"
    expected = model.expected(
        text,
        NUM_TOKENS,
        videos=[shown],
        audio=[video.sound],
        audio_from_video_indices=[0],
        load_audio_from_video=True,
        generate={"use_audio_in_video": True},
        do_sample_frames=False,
        **model.family.call_arguments,
    )
    prompts = [
        prepared.prompt(text, {"video": [video]}, **heard),
        prepared.prompt(f"{token} and {token}", {"video": [silent, video]}, **heard),
        prepared.prompt(text, {"video": [as_prepared(shown)]}, **model.family.call_arguments),
    ]
    config = QuireConfig.of(model=str(tmp_path), dtype="float32", max_model_len=1100, kv_cache_memory_bytes=1 << 24)
    engine = LLMEngine(build_parts(config), config.engine)
    try:
        tokens = greedy_tokens(engine, prompts, NUM_TOKENS)
    finally:
        engine.close()
    assert tokens[0] == expected
    assert tokens[2] != expected
