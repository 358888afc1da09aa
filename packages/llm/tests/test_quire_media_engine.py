"""Prompts with media through the whole engine: tokens are those of Transformers, in whatever pieces and company."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_greedy_tokens import greedy_tokens
from torch import Tensor

from quire import SamplingParams
from quire.assemble import build_parts
from quire.config import QuireConfig
from quire_engine import LLMEngine
from quire_interfaces import FeatureArray, MediaItem, MediaSpan, Modality, PromptMedia, RenderedPrompt, RequestError
from quire_models.media_spec import UNSERVED
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint

PLACEHOLDER = 190
ARCHITECTURES = {
    "LlavaForConditionalGeneration": 16,
    "Gemma3ForConditionalGeneration": None,
    "PaliGemmaForConditionalGeneration": None,
    "Qwen2VLForConditionalGeneration": None,
    "Qwen3VLForConditionalGeneration": None,
}
"""Architecture -> embeddings of an image; None where its grid or its class says."""
STEP_TOKENS = {"PaliGemmaForConditionalGeneration": 110}
"""Tokens of a step, where not even prompts of 33 are computed in pieces: those of the longest prompt and few others."""
GRIDS = ((1, 4, 6), (1, 8, 4), (1, 2, 2))


def arrays_of(architecture: str, index: int) -> dict[str, Tensor]:
    """An image as a processor gives it."""
    generator = torch.Generator().manual_seed(index)
    if architecture.startswith("Qwen"):
        grid = GRIDS[index % 3]
        patches = grid[0] * grid[1] * grid[2]
        pixels = torch.randn(patches, 96, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
    return {"pixel_values": torch.randn(1, 3, 32, 32, generator=generator)}


def write_item(folder: Path, key: str, arrays: dict[str, Tensor], num_embeds: int) -> MediaItem:
    features, data = [], b""
    for name, array in arrays.items():
        data += b"\0" * (-len(data) % 64)
        kind = str(array.dtype).removeprefix("torch.")
        features.append(FeatureArray(name, kind, tuple(array.shape), len(data)))
        data += array.numpy().tobytes()
    (folder / key).write_bytes(data)
    return MediaItem(
        modality=Modality.IMAGE,
        key=key,
        num_embeds=num_embeds,
        path=str(folder / key),
        features=tuple(features),
    )


class Album:
    """Images of one architecture, and prompts that show them."""

    def __init__(self, folder: Path, architecture: str, oracle: Any) -> None:
        self.draw = random.Random(1)
        self.oracle = oracle
        self._is_bidirectional = architecture.startswith("Gemma3")
        self._is_prefix_lm = architecture.startswith("PaliGemma")
        self.arrays = [arrays_of(architecture, index) for index in range(3)]
        self.items = []
        with torch.no_grad():
            for index, arrays in enumerate(self.arrays):
                features = oracle.model.get_image_features(**arrays)
                rows = getattr(features, "pooler_output", features)
                num_embeds = sum(map(len, rows)) if isinstance(rows, (list, tuple)) else rows.flatten(0, -2).shape[0]
                self.items.append(write_item(folder, f"image{index}", arrays, num_embeds))

    def prompt(self, numbers: list[int]) -> RenderedPrompt:
        """Text with these images between, and the positions that Transformers gives it."""
        tokens, spans = [self.draw.randrange(3, 180) for _ in range(5)], []
        for number in numbers:
            item = self.items[number]
            spans.append(
                MediaSpan(item=item, start=len(tokens), length=item.num_embeds, embeds=((0, item.num_embeds),))
            )
            tokens += [PLACEHOLDER] * item.num_embeds + [self.draw.randrange(3, 180) for _ in range(4)]
        positions, delta = b"", 0
        if numbers and hasattr(self.oracle.model, "get_rope_index"):
            inputs = self.inputs(tokens, numbers)
            grids = inputs["image_grid_thw"]
            places, deltas = self.oracle.model.get_rope_index(
                inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=grids
            )
            positions = places[:, 0].numpy().astype("<i4").tobytes()
            delta = int(deltas.flatten()[0])
        media = PromptMedia(spans=tuple(spans), positions=positions, position_delta=delta) if spans else None
        if media is not None and self._is_prefix_lm:
            media = media.as_prefix(tokens)
        return RenderedPrompt(token_ids=tokens, media=media)

    def inputs(self, tokens: list[int], numbers: list[int]) -> dict[str, Tensor]:
        """Arguments of the whole network."""
        ids = torch.tensor([tokens])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in self.arrays[0] if numbers else ():
            inputs[name] = torch.cat([self.arrays[number][name] for number in numbers])
        if self._is_bidirectional:
            inputs["token_type_ids"] = (ids == PLACEHOLDER).long()
        if self._is_prefix_lm and numbers:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        if hasattr(self.oracle.model, "get_rope_index"):
            inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).long()
        return inputs

    def expected(self, prompt: RenderedPrompt, numbers: list[int], num_tokens: int) -> list[int]:
        """Greedy tokens, by Transformers' own loop."""
        with torch.no_grad():
            ids = self.oracle.generate(
                **self.inputs(prompt.token_ids, numbers),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        return ids[0, len(prompt.token_ids) :].tolist()


def make_engine(folder: Path, **settings: Any) -> LLMEngine:
    config = QuireConfig.of(model=str(folder), dtype="float32", max_model_len=256, **settings)
    return LLMEngine(build_parts(config), config.engine)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    folder = tmp_path / "model"
    oracle = write_checkpoint(folder, architecture, MEDIA_CASES[architecture])
    album = Album(tmp_path, architecture, oracle)
    numbers = [[], [0], [1, 2], [0, 0, 1, 2, 1], [2, 0]]
    prompts = [album.prompt(each) for each in numbers]
    expected = [album.expected(prompt, each, 9) for prompt, each in zip(prompts, numbers, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) > 1
    num_blocks = 140 if architecture.startswith("Gemma3") else 66  # its layers are of two kinds
    step_tokens = STEP_TOKENS.get(architecture, 33)
    for settings in (
        {},
        {"max_num_batched_tokens": step_tokens, "block_size": 4, "async_scheduling": True},
        {
            "max_num_batched_tokens": step_tokens,
            "encoder_cache_size": max(33, step_tokens // 2),
            "num_gpu_blocks_override": num_blocks,
            "block_size": 4,
        },
        {"enable_prefix_caching": False, "max_num_seqs": 2},
    ):
        engine = make_engine(folder, **settings)
        try:
            assert greedy_tokens(engine, prompts, 9) == expected, settings
            again = greedy_tokens(engine, prompts[::-1], 9)[::-1]
            assert again == expected, settings
        finally:
            engine.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_with_drafts_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    """Outputs are long enough to repeat themselves, so that drafts are right behind images too."""
    oracle = write_checkpoint(tmp_path / "model", architecture, MEDIA_CASES[architecture])
    oracle.generation_config.eos_token_id = None  # a token like the others
    album = Album(tmp_path, architecture, oracle)
    numbers = [[0], [1, 2], [2]]
    prompts = [album.prompt(each) for each in numbers]
    expected = [album.expected(prompt, each, 60) for prompt, each in zip(prompts, numbers, strict=True)]
    engine = make_engine(
        tmp_path / "model", speculative_method="ngram", prompt_lookup_min=1, num_speculative_tokens=3,
        speculative_adaptive=False, max_num_batched_tokens=STEP_TOKENS.get(architecture, 33), block_size=4,
    )  # fmt: skip
    try:
        assert greedy_tokens(engine, prompts, 60) == expected
        stats = engine.core.stats()
        assert stats.num_accepted_tokens_total > 0
    finally:
        engine.close()


def test_an_image_is_encoded_once(tmp_path: Path) -> None:
    architecture = "LlavaForConditionalGeneration"
    oracle = write_checkpoint(tmp_path / "model", architecture, MEDIA_CASES[architecture])
    album = Album(tmp_path, architecture, oracle)
    engine = make_engine(tmp_path / "model")
    greedy_tokens(engine, [album.prompt([0, 1]), album.prompt([1, 0])], 3)
    greedy_tokens(engine, [album.prompt([0])], 3)
    stats = engine.core.stats()
    assert stats.encoder_cache_usage > 0
    assert engine.reset_encoder_cache()
    assert engine.core.stats().encoder_cache_usage == 0
    assert not engine.core.has_work(), "the runner was not told"
    greedy_tokens(engine, [album.prompt([0])], 3)
    assert engine.core.stats().num_encoded_items_total == {"image": 3}
    engine.close()
    assert stats.num_encoded_items_total == {"image": 2}
    assert stats.encode_seconds_total["image"] > 0
    assert stats.encoder_cache_queries_total - stats.encoder_cache_hits_total == 2


def test_a_language_model_alone_refuses_media_and_takes_less_memory(tmp_path: Path) -> None:
    architecture = "LlavaForConditionalGeneration"
    oracle = write_checkpoint(tmp_path / "model", architecture, MEDIA_CASES[architecture])
    album = Album(tmp_path, architecture, oracle)
    whole = make_engine(tmp_path / "model")
    engine = make_engine(tmp_path / "model", language_model_only=True)
    assert whole.info.modalities == ("image",)
    assert whole.info.choices["media"] == "image; towers: Quire's, float32"
    assert engine.info.modalities == ()
    assert "media" not in engine.info.choices
    assert "weights: towers" in whole.info.memory_bytes
    assert "weights: towers" not in engine.info.memory_bytes
    text = album.prompt([])
    no_media = dataclasses.replace(text, media=PromptMedia(spans=()))
    assert greedy_tokens(engine, [text], 5) == greedy_tokens(whole, [text], 5) == greedy_tokens(whole, [no_media], 5)
    with pytest.raises(RequestError, match="takes text alone") as error:
        engine.add_request(album.prompt([0]), SamplingParams(detokenize=False))
    assert error.value.code == "unsupported_media"
    whole.close()
    engine.close()


def test_towers_in_int8_take_less_memory_and_say_so(tmp_path: Path) -> None:
    architecture = "LlavaForConditionalGeneration"
    oracle = write_checkpoint(tmp_path / "model", architecture, MEDIA_CASES[architecture])
    album = Album(tmp_path, architecture, oracle)
    whole, engine = (make_engine(tmp_path / "model", mm_encoder_quantization=form) for form in (None, "int8"))
    assert engine.info.choices["media"] == "image; towers: Quire's, int8, float32"
    assert engine.info.choices["weights"] == whole.info.choices["weights"]
    towers = (each.info.memory_bytes.pop("weights: towers") for each in (whole, engine))
    assert next(towers) > next(towers) > 0
    assert engine.info.memory_bytes == whole.info.memory_bytes
    text = album.prompt([])
    assert greedy_tokens(engine, [text], 5) == greedy_tokens(whole, [text], 5)
    assert len(greedy_tokens(engine, [album.prompt([0])], 5)[0]) == 5
    whole.close()
    engine.close()


def test_media_that_are_not_served_are_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = "LlavaForConditionalGeneration"
    monkeypatch.setitem(UNSERVED, "llava", "why not")
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    engine = make_engine(tmp_path)
    assert engine.info.modalities == ()
    assert engine.info.choices["media"] == "none: why not"
    engine.close()


def test_rows_of_the_caller_take_the_place_of_embeddings(tmp_path: Path) -> None:
    """`Modality.EMBEDS`: the rows that the network has for some tokens give what the tokens give."""
    architecture = "LlavaForConditionalGeneration"
    oracle = write_checkpoint(tmp_path / "model", architecture, MEDIA_CASES[architecture])
    album = Album(tmp_path, architecture, oracle)
    rows = oracle.get_input_embeddings().weight.detach()
    text = album.prompt([])
    item = write_item(tmp_path, "rows", {"embeds": rows[text.token_ids[1:4]].contiguous()}, 3)
    item = dataclasses.replace(item, modality=Modality.EMBEDS, is_encoded=True)
    span = MediaSpan(item=item, start=1, length=3, embeds=((0, 3),))
    hidden = RenderedPrompt(
        token_ids=[text.token_ids[0], 0, 0, 0, *text.token_ids[4:]], media=PromptMedia(spans=(span,))
    )
    engine = make_engine(tmp_path / "model", enable_prompt_embeds=True)
    assert greedy_tokens(engine, [hidden], 8) == greedy_tokens(engine, [text], 8)
    assert np.all([count == 0 for count in engine.core.stats().num_encoded_items_total.values()])
    engine.close()
