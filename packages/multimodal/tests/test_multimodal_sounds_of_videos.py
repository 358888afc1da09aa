"""Videos with their sounds: tokens of both by turns, at the positions of Transformers' `get_rope_index`."""

from __future__ import annotations

import importlib
import random
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_multimodal_positions import AUDIO, AUDIO_END, AUDIO_START, END, MERGE, START, VIDEO, item, owner_of

from quire_interfaces import VIDEO_AUDIO_RUNS, MediaItem, Modality
from quire_multimodal import MediaError, PositionScheme, StoredItem, find_spans
from quire_multimodal.positions import mrope_positions
from quire_multimodal.processor import _runs

FAMILIES = {
    "qwen2_5_omni": "Qwen2_5OmniPreTrainedModelForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoePreTrainedModelForConditionalGeneration",
}


def order_of(family: str, grid: list[int], seconds: float, num_audio: int) -> list[int]:
    """Tokens of a video and its sound, as the processor of the family writes them."""
    module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    kind = next(
        value for name, value in vars(module).items() if name.endswith("OmniProcessor") or name.endswith("MoeProcessor")
    )
    writer = SimpleNamespace(video_processor=SimpleNamespace(merge_size=MERGE), video_token="v", audio_token="a",
                             audio_bos_token="", audio_eos_token="")  # fmt: skip
    writer.get_chunked_index = MethodType(kind.get_chunked_index, writer)
    videos = {"video_grid_thw": np.array([grid]), "video_second_per_grid": [seconds]}
    settings = {"position_id_per_seconds": 25, "seconds_per_chunk": 2.0}
    text = kind.replace_video_with_audio_token(writer, videos, 0, {"num_audio_tokens": [num_audio]}, 0, **settings)
    return [VIDEO if letter == "v" else AUDIO for letter in text]


class Clips:
    """Random text with videos that are heard, and sounds alone."""

    def __init__(self, family: str, chooser: random.Random) -> None:
        self.ids: list[int] = []
        self.items: list[StoredItem] = []
        self.grids: list[list[int]] = []
        self.seconds: list[float] = []
        self.num_frames: list[int] = []
        """Mel frames of each sound."""
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        self._own_length = getattr(module, "_get_feat_extract_output_lengths", None)
        for _ in range(chooser.randrange(1, 4)):
            self.ids += range(10, 10 + chooser.randrange(1, 7))
            frames = chooser.randrange(60, 900)
            self.num_frames.append(frames)
            num_audio = self._num_audio(frames)
            if self.grids and chooser.random() < 0.3:
                media = MediaItem(modality=Modality.AUDIO, key="", num_embeds=num_audio, path="", features=())
                self.items.append(StoredItem(media, "", (AUDIO,), {}, 0))
                self.ids += [AUDIO_START, *[AUDIO] * num_audio, AUDIO_END]
                continue
            grid = [chooser.randrange(1, 8), MERGE * chooser.randrange(1, 4), MERGE * chooser.randrange(1, 4)]
            # Others are rounded in one way for the order of Qwen3-Omni's tokens and in another for their positions.
            seconds = chooser.choice((1.0, 2.0))
            self.grids.append(grid)
            self.seconds.append(seconds)
            tokens = order_of(family, grid, seconds, num_audio)
            facts = dict(item(Modality.VIDEO, (grid[0], grid[1], grid[2]), VIDEO, seconds).facts)
            facts[VIDEO_AUDIO_RUNS] = _runs([token == AUDIO for token in tokens]).tolist()
            media = MediaItem(modality=Modality.VIDEO, key="", num_embeds=len(tokens), path="", features=())
            self.items.append(StoredItem(media, "", (VIDEO, AUDIO), facts, 0))
            self.ids += [START, AUDIO_START, *tokens, AUDIO_END, END]
        self.ids += range(10, 10 + chooser.randrange(1, 5))

    def _num_audio(self, num_frames: int) -> int:
        if self._own_length is None:
            return ((num_frames - 1) // 2 + 1 - 2) // 2 + 1
        torch = importlib.import_module("torch")
        return int(self._own_length(torch.tensor(num_frames), 50))

    def reference(self, owner: Any) -> np.ndarray:
        torch = importlib.import_module("torch")
        positions, _ = owner.get_rope_index(
            input_ids=torch.tensor([self.ids]),
            video_grid_thw=torch.tensor(self.grids),
            attention_mask=torch.ones(1, len(self.ids)),
            use_audio_in_video=True,
            audio_seqlens=torch.tensor(self.num_frames),
            second_per_grids=torch.tensor(self.seconds),
        )
        result: np.ndarray = positions[:, 0].long().numpy()
        return result


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_equal_get_rope_index(family: str) -> None:
    thinker = {"model_type": f"{family}_thinker", "vision_config": {"spatial_merge_size": MERGE}}
    scheme = PositionScheme.from_config({"model_type": family, "thinker_config": thinker})
    assert scheme is not None
    owner = owner_of(family, FAMILIES[family])
    owner.config.audio_config = SimpleNamespace(n_window=50)
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), FAMILIES[family])
    if hasattr(kind, "get_chunked_index"):
        owner.get_chunked_index = MethodType(kind.get_chunked_index, owner)
    for seed in range(30):
        clips = Clips(family, random.Random(seed))
        spans = find_spans(clips.items, clips.ids)
        positions, delta = mrope_positions(clips.items, spans, len(clips.ids), scheme)
        expected = clips.reference(owner)
        np.testing.assert_array_equal(positions, expected, err_msg=str(seed))
        assert delta == expected[0, -1] + 1 - len(clips.ids)


def test_runs_are_those_of_the_tokens_and_no_others_fit() -> None:
    assert _runs([False, False, True, False]).tolist() == [[2, 1], [1, 0]]
    assert _runs([True, False, True]).tolist() == [[0, 1], [1, 1]]
    wrong = item(Modality.VIDEO, (2, 2, 2), VIDEO)
    tokens = [VIDEO, AUDIO, VIDEO, AUDIO]
    for runs in ([[1, 1], [2, 1]], [[1, 1]]):
        facts = {**wrong.facts, VIDEO_AUDIO_RUNS: runs}
        media = MediaItem(modality=Modality.VIDEO, key="", num_embeds=4, path="", features=())
        stored = StoredItem(media, "", (VIDEO, AUDIO), facts, 0)
        scheme = PositionScheme(is_omni=True)
        with pytest.raises(MediaError, match="not those of 2 x 1 x 1 patches"):
            mrope_positions([stored], find_spans([stored], tokens), len(tokens), scheme)
