"""One item after another gives what the Hugging Face processor's joint call gives: the same ids, the same arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multimodal_processors import FAMILIES
from multimodal_samples import random_image, tone, video

from quire_interfaces import CheckpointError, MediaItem, Modality
from quire_multimodal import MediaConfig, MediaError, StoredItem, expand_placeholders, find_spans
from quire_multimodal.decode import VideoFrames, decode_video
from quire_multimodal.processor import ItemProcessor, ProcessedItem

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
TEXTS = {
    *("input_ids", "attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"),
    *("labels", "cross_attention_mask"),
}
WITHOUT_PLACEHOLDER = {"blip-2", "fuyu"}
"""Families whose joint call puts an image before a text that does not say where it stands."""
ARGUMENTS = {Modality.IMAGE: "images", Modality.VIDEO: "videos", Modality.AUDIO: "audio"}


def values(modality: Modality) -> list[Any]:
    """Two items that differ in size."""
    if modality == Modality.IMAGE:
        return [random_image(80, 60), random_image(50, 90, seed=1)]
    if modality == Modality.AUDIO:
        return [tone(1.0), tone(2.3)]
    frames = np.stack([np.asarray(random_image(64, 48, seed)) for seed in range(8)])
    return [VideoFrames(frames, list(range(8)), 8, 4.0), VideoFrames(frames[::-1].copy(), list(range(8)), 8, 4.0)]


def joint_call(ours: ItemProcessor, modality: Modality, text: str, items: list[Any]) -> dict[str, Any]:
    """Of the Hugging Face processor itself, as arrays."""
    more: dict[str, Any] = {}
    if modality == Modality.VIDEO:
        metadata = [{"total_num_frames": 8, "fps": 4.0, "frames_indices": list(range(8)), "duration": 2.0}]
        more = {"do_sample_frames": False, "video_metadata": metadata * len(items), "return_metadata": True}
        items = [each.frames for each in items]
    _, tensors = ours._ways[modality]
    output = ours.processor(text=[text], **{ARGUMENTS[modality]: items}, **more, return_tensors=tensors)
    arrays = {name: each for name, each in output.items() if name != "video_metadata"}
    return {name: np.asarray(each.float() if _is_bfloat16(each) else each) for name, each in arrays.items()}


def _is_bfloat16(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) == "torch.bfloat16"


def stored(modality: Modality, item: ProcessedItem) -> StoredItem:
    media = MediaItem(modality=modality, key="", num_embeds=item.num_embeds, path="", features=())
    return StoredItem(media, item.text, tuple(item.embed_token_ids), {}, 0)


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of NumPy, for Transformers
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WITHOUT_PLACEHOLDER))
def test_items_equal_the_joint_call(family: str, processor_folder: Callable[[str], Path]) -> None:
    spec = FAMILIES[family]
    if spec.needs_torch and not HAS_TORCHVISION:
        with pytest.raises(CheckpointError):
            ItemProcessor.from_folder(processor_folder(family), MediaConfig())
        return
    ours = ItemProcessor.from_folder(processor_folder(family), MediaConfig())
    assert not ours.unusable
    assert {str(each) for each in ours.modalities} == {
        name.removesuffix("_token") for name in spec.tokens if name in ("image_token", "video_token", "audio_token")
    } | ({"image"} if "context_image_token" in spec.tokens else set())
    for modality in ours.modalities:
        media = values(modality)
        items = [ours.process(modality, each) for each in media]
        placeholder = str(ours.placeholder(modality)).join(spec.around)
        for item, value in zip(items, media, strict=True):
            _check_ids(ours, modality, f"{placeholder} is here", [value], [item], spec.written)
            _check_alone(ours, modality, placeholder, value, item)
        if not spec.one_per_text:
            _check_ids(ours, modality, f"look at {placeholder} and {placeholder}, please", media, items, spec.written)
            _check_together(ours, modality, placeholder, media, items, spec.padded, spec.axis)


def _check_ids(
    ours: ItemProcessor,
    modality: Modality,
    text: str,
    media: list[Any],
    items: list[ProcessedItem],
    written: tuple[str, str],
) -> None:
    placeholders = {str(modality): str(ours.placeholder(modality))}
    expanded, order = expand_placeholders(
        text, [stored(modality, each) for each in items], placeholders, frame=ours.frame
    )
    ids = ours.processor.tokenizer(written[0] + expanded + written[1])["input_ids"]
    joint = joint_call(ours, modality, text, media)
    assert ids == joint["input_ids"][0].tolist()
    num_tokens = 1 if "aspect_ratio_mask" in items[0].features else None
    spans = find_spans(order, ids, num_tokens)
    num_embeds = [sum(to - start for start, to in span.embeds) for span in spans]
    assert num_embeds == [num_tokens or each.num_embeds for each in items]


def _check_alone(ours: ItemProcessor, modality: Modality, placeholder: str, value: Any, item: ProcessedItem) -> None:
    call = joint_call(ours, modality, placeholder, [value])
    for name in call.keys() - TEXTS:
        np.testing.assert_array_equal(item.features[name], call[name], err_msg=name)


def _check_together(
    ours: ItemProcessor,
    modality: Modality,
    placeholder: str,
    media: list[Any],
    items: list[ProcessedItem],
    padded: tuple[str, ...],
    axis: int,
) -> None:
    joint = joint_call(ours, modality, f"{placeholder} {placeholder}", media)
    for name in joint.keys() - TEXTS - set(padded):
        parts = [item.features[name] for item in items if name in item.features]
        along = axis if parts[0].ndim > axis else 0
        np.testing.assert_array_equal(np.concatenate(parts, axis=along), joint[name], err_msg=name)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl", "glm4v"])
def test_frames_of_a_video_are_those_that_the_processor_takes(
    family: str, processor_folder: Callable[[str], Path]
) -> None:
    ours = ItemProcessor.from_folder(processor_folder(family), MediaConfig())
    data = video(num_frames=40, fps=8)
    arguments = {"do_sample_frames": True, **({"fps": 4} if family == "qwen3_vl" else {"num_frames": 10})}
    taken = ours.decode(Modality.VIDEO, data, arguments)
    everything = decode_video(data, MediaConfig(), lambda count, fps: range(count)).frames
    metadata = {"total_num_frames": 40, "fps": 8.0, "duration": 5.0, "height": 48, "width": 64}
    _, tensors = ours._ways[Modality.VIDEO]
    joint = ours.processor(
        text=[ours.placeholder(Modality.VIDEO)],
        videos=[everything],
        video_metadata=[metadata],
        return_tensors=tensors,
        **arguments,
    )
    item = ours.process(Modality.VIDEO, taken, arguments)
    for name in joint.keys() - TEXTS:
        np.testing.assert_array_equal(item.features[name], np.asarray(joint[name]), err_msg=name)
    assert ours.processor.tokenizer(item.text)["input_ids"] == joint["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("options", "num_frames"),
    [({"num_frames": 5}, 5), ({"fps": 2}, 10), ({"fps": 2, "num_frames": 4}, 4), ({"num_frames": -1}, 40)],
)
def test_frames_of_a_video_as_the_server_says(
    options: dict[str, int], num_frames: int, processor_folder: Callable[[str], Path]
) -> None:
    ours = ItemProcessor.from_folder(processor_folder("qwen2_5_vl"), MediaConfig(media_io_kwargs={"video": options}))
    taken = ours.decode(Modality.VIDEO, video(num_frames=40, fps=8))
    assert len(taken.indices) == num_frames
    assert taken.indices[0] == 0
    assert taken.indices[-1] == 39


def test_what_reaches_no_embedding_and_unknown_arguments(processor_folder: Callable[[str], Path]) -> None:
    ours = ItemProcessor.from_folder(processor_folder("llava"), MediaConfig())
    with pytest.raises(MediaError, match="mm_processor_kwargs") as failure:
        ours.process(Modality.IMAGE, random_image(), {"do_resize": "perhaps"})
    assert failure.value.code == "invalid_media"
    with pytest.raises(MediaError, match="the processor refuses the image") as failure:
        ours.process(Modality.IMAGE, "no image")
    assert failure.value.code == "media_processing_failed"
    with pytest.raises(MediaError, match="takes no video"):
        ours.decode(Modality.VIDEO, b"")


def test_queries_of_a_connector_stand_where_the_placeholder_is(processor_folder: Callable[[str], Path]) -> None:
    """BLIP-2's processor writes them before the text, and has no text for an item."""
    ours = ItemProcessor.from_folder(processor_folder("blip-2"), MediaConfig())
    item = ours.process(Modality.IMAGE, random_image())
    assert item.text == "<image>" * 4
    assert item.num_embeds == 4
    expected = ours.processor.image_processor([random_image()], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(item.features["pixel_values"], expected)


@pytest.mark.skipif(not HAS_TORCHVISION, reason="its image processor needs torchvision")
def test_features_have_the_names_that_towers_know(processor_folder: Callable[[str], Path]) -> None:
    """Fuyu's processor has older names unless it is told."""
    item = ItemProcessor.from_folder(processor_folder("fuyu"), MediaConfig()).process(Modality.IMAGE, random_image())
    assert item.features.keys() == {"pixel_values"}
    assert item.features["pixel_values"].shape == (item.num_embeds, 2700)
    assert item.text.startswith("|SPEAKER||SPEAKER|")


def test_marks_around_an_image_take_embeddings_too(processor_folder: Callable[[str], Path]) -> None:
    """Ovis 2's tower gives them, and is told which tokens they are."""
    ours = ItemProcessor.from_folder(processor_folder("ovis2"), MediaConfig())
    marks = ours.processor.tokenizer.convert_tokens_to_ids(["<IMG_START>", "<IMG_GRID>", "<IMG_END>"])
    ours._embed_token_ids["image"] += marks
    item = ours.process(Modality.IMAGE, random_image(56, 56))
    atom = ours.processor.tokenizer.convert_tokens_to_ids("<IMG_ATOM>")
    assert item.features["embed_token_ids"].tolist() == [marks[0], *[atom] * 4, *marks[1:]]
    assert item.num_embeds == 7
