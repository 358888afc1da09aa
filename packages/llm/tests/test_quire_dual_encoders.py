"""Texts and images in one space: vectors are those of Transformers' CLIP and SigLIP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, CheckpointError, PoolingParams, RequestError
from quire_testkit.dual_encoders import DUAL_ENCODERS, DualEncoder
from quire_testkit.seeing_models import drawing

TEXTS = ["a picture of three shapes", "red", "a green circle beside a blue square on a white sheet"]
IMAGES = [drawing(1), drawing(2, (60, 30)), drawing(3, (40, 64))]
RAW = PoolingParams(use_activation=False)


@pytest.fixture(scope="module", params=DUAL_ENCODERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DualEncoder:
    return DualEncoder(tmp_path_factory.mktemp("dual"), request.param)


@pytest.fixture(scope="module")
def llm(model: DualEncoder) -> Any:
    with LLM(model.folder, dtype="float32", num_threads=1) as llm:
        yield llm


def image_prompt(image: Any) -> dict[str, Any]:
    return {"multi_modal_data": {"image": image}}


def vectors(llm: LLM, prompts: Any, params: PoolingParams = RAW) -> list[Tensor]:
    return [each.outputs.data for each in llm.embed(prompts, pooling_params=params, use_tqdm=False)]


def close(found: Tensor, expected: Tensor) -> bool:
    """Within 2e-6 of the largest number."""
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 2e-6 * expected.abs().max())


def test_vectors_are_those_of_transformers(model: DualEncoder, llm: LLM) -> None:
    """Of texts and of images, side by side in one call, and by themselves."""
    assert llm.engine_info.pooling_tasks == ("embed",)
    prompts = [TEXTS[0], image_prompt(IMAGES[0]), TEXTS[1], *map(image_prompt, IMAGES[1:]), TEXTS[2]]
    expected = [model.text_features(TEXTS[0]), model.image_features(IMAGES[0]), model.text_features(TEXTS[1])]
    expected += [*map(model.image_features, IMAGES[1:]), model.text_features(TEXTS[2])]
    together = vectors(llm, prompts)
    assert all(map(close, together, expected))
    alone = [vectors(llm, [prompt])[0] for prompt in prompts]
    assert all(map(torch.equal, together, alone))


def test_vectors_have_length_one_unless_asked(model: DualEncoder, llm: LLM) -> None:
    for prompt, expected in (
        (TEXTS[0], model.text_features(TEXTS[0])),
        (image_prompt(IMAGES[0]), model.image_features(IMAGES[0])),
    ):
        (found,) = vectors(llm, [prompt], PoolingParams())
        assert close(found, expected / expected.norm())


def test_scores_of_images_for_a_text(model: DualEncoder, llm: LLM) -> None:
    text = model.text_features(TEXTS[0])
    expected = [torch.cosine_similarity(text, model.image_features(image), dim=0) for image in IMAGES]
    prompts: Any = [*map(image_prompt, IMAGES)]
    scores = llm.score(TEXTS[0], prompts, use_tqdm=False)
    assert [each.outputs.score for each in scores] == pytest.approx([float(each) for each in expected], abs=2e-6)


def test_long_texts_are_cut_where_asked(model: DualEncoder, llm: LLM) -> None:
    """With the end of the text kept, as tokenizers cut them."""
    text = " ".join(TEXTS * 4)
    with pytest.raises(RequestError, match="context is 48 tokens"):
        llm.embed(text, use_tqdm=False)
    (found,) = vectors(llm, text, PoolingParams(use_activation=False, truncate_prompt_tokens=-1))
    assert close(found, model.text_features(text))


def test_a_prompt_is_a_text_or_an_image(llm: LLM) -> None:
    for prompt in ({"prompt": "a", **image_prompt(IMAGES[0])}, image_prompt(IMAGES[:2])):
        with pytest.raises(RequestError, match="a text or an image at a time"):
            llm.embed(prompt, use_tqdm=False)
    with pytest.raises(RequestError, match="no task 'token_embed'"):
        llm.encode("a", pooling_task="token_embed", use_tqdm=False)


def test_siglip_needs_what_texts_are_filled_up_with(tmp_path: Path) -> None:
    model = DualEncoder(tmp_path, "Siglip")
    file = model.folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": None}))
    with pytest.raises(CheckpointError, match="pad_token is missing"):
        LLM(model.folder)
