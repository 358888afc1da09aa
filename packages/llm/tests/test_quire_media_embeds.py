"""Embeddings of callers in place of images: tokens are those of the images that they were made of."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, RequestError, SamplingParams
from quire.media_embeds import embeds_of_part, embeds_of_value
from quire_interfaces import Modality
from quire_multimodal import MediaError
from quire_testkit.seeing_models import SeeingModel, drawing, image_part, text_part

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_memory_bytes": 1 << 24,
    "num_threads": 1,
}


def embeds_of(model: SeeingModel, number: int) -> torch.Tensor:
    """What the towers make of an image, [N, width]."""
    pixels = model.processor.image_processor(drawing(number), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        (embeds,) = model.network.model.get_image_features(pixel_values=pixels).pooler_output
    rows: torch.Tensor = embeds
    return rows


def saved(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def test_tokens_are_those_of_the_images(tmp_path: Path) -> None:
    model = SeeingModel(tmp_path)
    text, seen = "one <image> two <image>", [drawing(1), drawing(2)]
    first, second = embeds_of(model, 1), embeds_of(model, 2)
    with LLM(tmp_path, enable_mm_embeds=True, **SETTINGS) as llm:
        values: list[Any] = [
            [first, second],
            torch.stack((first, second)),
            {"image_embeds": torch.stack((first, second)).numpy()},
        ]
        outputs = llm.generate(
            [{"prompt": text, "multi_modal_data": {"image": each}} for each in values], PARAMS, False
        )
        expected = model.expected(text, seen, 6)
        assert [list(each.outputs[0].token_ids) for each in outputs] == [expected] * 3
        assert llm.stats().num_encoded_items_total.get("image", 0) == 0
        parts = [text_part("a "), {"type": "image_embeds", "image_embeds": saved(first), "uuid": "one"}, image_part(2)]
        by_name = [parts[0], {"type": "image_embeds", "image_embeds": None, "uuid": "one"}, parts[2]]
        for content in (parts, by_name):
            (answer,) = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
            rendered = "<|im_start|>user\na <image><image><|im_end|>\n<|im_start|>assistant\n"
            assert list(answer.outputs[0].token_ids) == model.expected(rendered, seen, 6)
        for value, complaint in ((first[:, 1:], "must be"), (first[:0], "must be"), (first * float("inf"), "finite")):
            with pytest.raises(RequestError, match=complaint) as error:
                llm.generate({"prompt": "a <image>", "multi_modal_data": {"image": value}}, PARAMS, use_tqdm=False)
            assert error.value.param == "multi_modal_data.image[0]"
        for value, complaint in (
            ("?", "base64"),
            ({"image_embeds": "AAAA"}, "can be read"),
            ({}, "must be embeddings"),
        ):
            part = {"type": "image_embeds", "image_embeds": value}
            with pytest.raises(RequestError, match=complaint) as error:
                llm.chat([{"role": "user", "content": [part]}], PARAMS, use_tqdm=False)
            assert error.value.param == "messages[0].content[0]"
    with LLM(tmp_path, **SETTINGS) as llm, pytest.raises(RequestError, match="--enable-mm-embeds"):
        llm.generate({"prompt": "a <image>", "multi_modal_data": {"image": first}}, PARAMS, use_tqdm=False)


def test_items_that_follow_one_another_are_taken_apart_by_their_grids() -> None:
    rows = np.arange(14.0).reshape(7, 2)
    grid = torch.tensor([[1, 2, 4], [1, 2, 10]])
    items = embeds_of_value({"image_embeds": torch.tensor(rows), "image_grid_thw": grid}, Modality.IMAGE)
    assert items is not None
    assert [each.value.tolist() for each in items] == [rows[:2].tolist(), rows[2:].tolist()]
    assert [each.facts for each in items] == [{"image_grid_thw": [[1, 2, 4]]}, {"image_grid_thw": [[1, 2, 10]]}]
    (item,) = embeds_of_value({"image_embeds": rows, "image_grid_thw": np.array([[1, 4, 7]])}, Modality.IMAGE) or ()
    assert item.facts == {"image_grid_thw": [[1, 4, 7]]}
    for wrong in ([[1, 2, 4]] * 3, [[1, 0, 4]], [[1.5, 2, 2]], [[1, 2]]):
        with pytest.raises(MediaError, match="image_grid_thw"):
            embeds_of_value({"image_embeds": [rows, rows], "image_grid_thw": np.array(wrong)}, Modality.IMAGE)
    with pytest.raises(MediaError, match="other numbers of embeddings"):
        embeds_of_value({"image_embeds": rows, "image_grid_thw": np.array([[1, 2, 4], [1, 2, 9]])}, Modality.IMAGE)
    with pytest.raises(MediaError, match="have no 'size'"):
        embeds_of_value({"image_embeds": rows, "size": np.array([1])}, Modality.IMAGE)


def test_what_is_no_embeddings_is_left_to_the_processor() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    for value in (pixels, [pixels], b"bytes", "file:///a.png", drawing(1), None, [], {"url": "x"}, np.zeros(9)):
        assert embeds_of_value(value, Modality.IMAGE) is None
    for value in (np.zeros((9, 2)), [np.zeros((9, 2))], (np.zeros((9, 2)), 16_000), [(np.zeros(9), 16_000)]):
        assert embeds_of_value(value, Modality.AUDIO) is None
    assert embeds_of_value(torch.zeros(2, 9, 2), Modality.AUDIO) is not None
    assert embeds_of_value({"audio_embeds": np.zeros((9, 2))}, Modality.AUDIO) is not None
    part = {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": "AA", "image_grid_thw": saved(torch.ones(3).int())},
    }
    item = embeds_of_part(part, "image_embeds")
    assert item is not None
    assert (item.value, item.facts) == ("AA", {"image_grid_thw": [[1, 1, 1]]})
    assert embeds_of_part({"type": "image_embeds", "uuid": "one"}, "image_embeds") is None
