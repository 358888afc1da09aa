"""Positions equal Transformers' `get_rope_index`, for random prompts of every family."""

from __future__ import annotations

import importlib
import random
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire_interfaces import MediaItem, Modality
from quire_multimodal import MediaError, PositionScheme, StoredItem, find_spans, place_media
from quire_multimodal.positions import mrope_positions

IMAGE, VIDEO, AUDIO, START, END, AUDIO_START, AUDIO_END = 900, 901, 902, 910, 911, 912, 913
MERGE = 2


def item(modality: Modality, grid: tuple[int, int, int], token_id: int, seconds: float = 1.0) -> StoredItem:
    num_embeds = int(np.prod(grid)) // MERGE**2
    facts: dict[str, Any] = {f"{modality}_grid_thw": [list(grid)]}
    if modality == Modality.VIDEO:
        facts["second_per_grid_ts"] = [seconds]
    media = MediaItem(modality=modality, key="", num_embeds=num_embeds, path="", features=())
    return StoredItem(media, "", (token_id,), facts, 0)


class Prompt:
    """Random text with images and videos in it, as a family writes them."""

    def __init__(
        self,
        chooser: random.Random,
        splits_frames: bool,
        temporal_merge: int = 1,
        all_seconds: tuple[float, ...] = (0.5, 1.0, 2.0, 1 / 3, 0.08),
        num_items: int | None = None,
    ) -> None:
        self.all_seconds = all_seconds
        self.ids: list[int] = []
        self.types: list[int] = []
        self.items: list[StoredItem] = []
        self.image_grids: list[list[int]] = []
        self.video_grids: list[list[int]] = []
        self.seconds: list[float] = []
        for _ in range(chooser.randrange(1, 6) if num_items is None else num_items):
            self.add_text(chooser.randrange(0, 7))
            height, width = (MERGE * chooser.randrange(1, 7) for _ in range(2))
            if chooser.random() < 0.5:
                self.image_grids.append([1, height, width])
                self.items.append(item(Modality.IMAGE, (1, height, width), IMAGE))
                self._run(IMAGE, height * width // MERGE**2)
            else:
                self._video(chooser, height, width, splits_frames, temporal_merge)
        self.add_text(chooser.randrange(1, 5))

    def add_rows(self, height: int, width: int, num_marks: int) -> None:
        """An image of Hunyuan-VL, whose rows end with a mark each.

        Args:
            height: Rows of tokens.
            width: Patches of a row, after merging.
            num_marks: Marks around the image.
        """
        self.image_grids.append([1, height * MERGE, width * MERGE])
        num_tokens = height * (width + 1) + num_marks
        media = MediaItem(modality=Modality.IMAGE, key="", num_embeds=num_tokens, path="", features=())
        self.items.append(StoredItem(media, "", (IMAGE,), {"image_grid_thw": [self.image_grids[-1]]}, 0))
        self._run(IMAGE, num_tokens)

    def add_text(self, num_tokens: int) -> None:
        self.ids += range(10, 10 + num_tokens)
        self.types += [0] * num_tokens

    def _run(self, token_id: int, num_tokens: int) -> None:
        self.ids += [START, *[token_id] * num_tokens, END]
        self.types += [0, *[token_id - IMAGE + 1] * num_tokens, 0]

    def _video(self, chooser: random.Random, height: int, width: int, splits: bool, temporal_merge: int) -> None:
        time = temporal_merge * chooser.randrange(1, 9)
        seconds = chooser.choice(self.all_seconds)
        self.seconds.append(seconds)
        self.video_grids.append([time, height, width])
        self.items.append(item(Modality.VIDEO, (time // temporal_merge, height, width), VIDEO, seconds))
        self.items[-1].facts["video_grid_thw"] = [[time, height, width]]  # type: ignore[index]
        runs = time if splits else 1
        for _ in range(runs):
            self.add_text(2)
            self._run(VIDEO, time // temporal_merge // runs * height * width // MERGE**2)

    def reference(self, owner: Any, by_types: bool = True) -> np.ndarray:
        torch = importlib.import_module("torch")
        arguments = {
            "input_ids": torch.tensor([self.ids]),
            "image_grid_thw": torch.tensor(self.image_grids) if self.image_grids else None,
            "video_grid_thw": torch.tensor(self.video_grids) if self.video_grids else None,
        }
        seconds = torch.tensor(self.seconds) if self.seconds else None
        if by_types:
            arguments |= {"mm_token_type_ids": torch.tensor([self.types]), "second_per_grid_ts": seconds}
        else:
            arguments |= {"second_per_grids": seconds, "attention_mask": torch.ones(1, len(self.ids))}
        positions: np.ndarray = owner.get_rope_index(**arguments)[0][:, 0].long().numpy()
        return positions


def owner_of(family: str, class_name: str) -> Any:
    """What `get_rope_index` of a family needs of its model: methods and sizes, no weights."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(module, class_name)
    vision = SimpleNamespace(spatial_merge_size=MERGE, temporal_merge_size=2, tokens_per_second=4)
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO,
           "vision_start_token_id": START, "audio_start_token_id": AUDIO_START}  # fmt: skip
    config = SimpleNamespace(vision_config=vision, position_id_per_seconds=25, seconds_per_chunk=2, **ids)
    owner = SimpleNamespace(config=config, spatial_merge_size=MERGE)
    for name in ("get_rope_index", "get_vision_position_ids", "get_llm_pos_ids_for_vision"):
        if hasattr(kind, name):
            setattr(owner, name, MethodType(getattr(kind, name), owner))
    return owner


@pytest.mark.parametrize(
    ("family", "class_name", "splits_frames"),
    [
        ("qwen2_vl", "Qwen2VLModel", False),
        ("qwen2_5_vl", "Qwen2_5_VLModel", False),
        ("qwen3_vl", "Qwen3VLModel", True),
        ("qwen3_5", "Qwen3_5Model", True),
        ("qwen4_exp", "Qwen4ExpModel", True),
        ("glm4v", "Glm4vModel", True),
        ("glm46v", "Glm46VModel", True),
        ("paddleocr_vl", "PaddleOCRVLModel", False),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeModel", False),
    ],
)
def test_positions_equal_get_rope_index(family: str, class_name: str, splits_frames: bool) -> None:
    temporal_merge = 2 if family == "ernie4_5_vl_moe" else 1
    config = {"model_type": family, "vision_config": {"spatial_merge_size": MERGE, "tokens_per_second": 4}}
    scheme, owner = PositionScheme.from_config(config), owner_of(family, class_name)
    assert scheme is not None
    for seed in range(40):
        prompt = Prompt(random.Random(seed), splits_frames, temporal_merge)
        _check(prompt, scheme, prompt.reference(owner))


@pytest.mark.parametrize(
    ("family", "class_name", "all_seconds"),
    [
        ("qwen2_5_omni", "Qwen2_5OmniPreTrainedModelForConditionalGeneration", (0.5, 1.0, 2.0, 1 / 3, 0.08)),
        ("qwen3_omni_moe", "Qwen3OmniMoePreTrainedModelForConditionalGeneration", (1.0, 2.0, 0.2)),
    ],
)
def test_positions_of_thinkers(family: str, class_name: str, all_seconds: tuple[float, ...]) -> None:
    thinker = {"model_type": f"{family}_thinker", "vision_config": {"spatial_merge_size": MERGE}}
    scheme = PositionScheme.from_config({"model_type": family, "thinker_config": thinker})
    assert scheme is not None
    assert scheme.positions_per_second == 25
    owner = owner_of(family, class_name)
    for seed in range(40):
        prompt = Prompt(random.Random(seed), splits_frames=False, all_seconds=all_seconds)
        _check(prompt, scheme, prompt.reference(owner, by_types=False))


@pytest.mark.parametrize("sections", [[4, 4, 4, 4], [4, 6, 6]])
@pytest.mark.parametrize("num_marks", [0, 2])
def test_positions_of_hunyuan_count_images(sections: list[int], num_marks: int) -> None:
    text = {"rope_parameters": {"mrope_section": sections}}
    vision = {"spatial_merge_size": MERGE}
    scheme = PositionScheme.from_config({"model_type": "hunyuan_vl", "text_config": text, "vision_config": vision})
    assert scheme is not None
    owner = owner_of("hunyuan_vl", "HunYuanVLModel")
    owner.config.text_config = SimpleNamespace(**text)
    for seed in range(20):
        chooser = random.Random(seed)
        prompt = Prompt(chooser, splits_frames=False, num_items=0)
        for _ in range(chooser.randrange(1, 5)):
            height, width = (chooser.randrange(1, 7) for _ in range(2))
            prompt.add_rows(height, width, num_marks)
        prompt.add_text(3)
        _check(prompt, scheme, prompt.reference(owner))


def test_rows_of_hunyuan_that_are_not_those_of_the_grid_are_refused() -> None:
    scheme = PositionScheme.from_config({"model_type": "hunyuan_vl", "rope_scaling": {"xdrope_section": [4, 6, 6]}})
    assert scheme is not None
    assert scheme.num_axes == 3
    for wrong in ([1, 6, 4], [1, -4, -8], [1, 1 << 40, 1 << 40]):
        prompt = Prompt(random.Random(0), splits_frames=False, num_items=0)
        prompt.add_rows(2, 2, 2)
        prompt.items[0].facts["image_grid_thw"] = [wrong]  # type: ignore[index]
        with pytest.raises(MediaError, match="rows of"):
            mrope_positions(prompt.items, find_spans(prompt.items, prompt.ids), len(prompt.ids), scheme)


def _check(prompt: Prompt, scheme: PositionScheme, expected: np.ndarray) -> None:
    spans = find_spans(prompt.items, prompt.ids)
    positions, delta = mrope_positions(prompt.items, spans, len(prompt.ids), scheme)
    np.testing.assert_array_equal(positions, expected)
    assert delta == expected[0, -1] + 1 - len(prompt.ids)  # the prompt ends with text
    media = place_media(prompt.items, spans, len(prompt.ids), scheme)
    assert np.frombuffer(media.positions, "<i4").reshape(len(expected), -1).tolist() == expected.tolist()
    assert media.position_delta == delta
    assert media.spans == spans


def test_sounds_count_like_text_and_plain_networks_have_no_positions() -> None:
    sound = StoredItem(
        MediaItem(modality=Modality.AUDIO, key="", num_embeds=3, path="", features=()), "", (AUDIO,), {}, 0
    )
    ids = [1, AUDIO_START, AUDIO, AUDIO, AUDIO, AUDIO_END, 2]
    spans = find_spans([sound], ids)
    positions, delta = mrope_positions([sound], spans, len(ids), PositionScheme())
    assert positions.tolist() == [list(range(7))] * 3
    assert delta == 0
    assert PositionScheme.from_config({"model_type": "llava"}) is None
    assert place_media([sound], spans, len(ids), None).positions == b""


def test_a_grid_of_a_caller_is_as_large_as_its_embeddings() -> None:
    huge = item(Modality.IMAGE, (1, 4, 4), IMAGE)
    huge.facts["image_grid_thw"][0][:] = [1 << 40, 1 << 40, 1 << 40]
    with pytest.raises(MediaError, match="not those of 1099511627776 x"):
        mrope_positions([huge], find_spans([huge], [IMAGE] * 4), 4, PositionScheme())


def test_tokens_that_are_not_those_of_the_grid_are_refused() -> None:
    wrong = item(Modality.IMAGE, (1, 4, 4), IMAGE)
    wrong.facts["image_grid_thw"][0][1] = 6
    ids = [IMAGE] * 4
    with pytest.raises(MediaError, match="not those of 1 x 3 x 2 patches"):
        mrope_positions([wrong], find_spans([wrong], ids), 4, PositionScheme())
