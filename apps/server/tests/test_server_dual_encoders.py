"""Texts and images in one space over HTTP: vectors are those of Transformers' CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.dual_encoders import DualEncoder
from quire_testkit.seeing_models import drawing, image_part, text_part

TEXT = "a picture of three shapes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DualEncoder:
    return DualEncoder(tmp_path_factory.mktemp("dual"), "CLIP")


@pytest.fixture(scope="module")
def server(make_live: Any, model: DualEncoder) -> Any:
    own = {"dtype": "float32"}
    config = QuireConfig.of(model=str(model.folder), **own)
    return make_live(folder=Path(model.folder), factory=REAL_FACTORY, engine=config.to_dict(), config=own)


def close(found: list[float], expected: Tensor, *, normalized: bool) -> bool:
    expected = expected / expected.norm() if normalized else expected
    return bool((torch.tensor(found) - expected).abs().max() <= 2e-6 * expected.abs().max())


def conversation(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_embeddings_of_texts_and_images(model: DualEncoder, server: Any) -> None:
    """Side by side in one request, raw where asked; in Cohere's shapes, too; and scores of images for a text."""
    image = conversation(image_part(1))
    body = {"messages": [image, conversation(text_part(TEXT))], "normalize": False}
    answer = server.post("/v1/embeddings", body).json()
    for item, expected in zip(
        answer["data"], (model.image_features(drawing(1)), model.text_features(TEXT)), strict=True
    ):
        assert close(item["embedding"], expected, normalized=False)
    url = image_part(2)["image_url"]["url"]
    for body, expected in (
        ({"images": [url]}, model.image_features(drawing(2))),
        ({"texts": [TEXT]}, model.text_features(TEXT)),
        ({"inputs": [{"content": [image_part(2)]}]}, model.image_features(drawing(2))),
    ):
        answer = server.post("/v2/embed", {**body, "embedding_types": ["float"]}).json()
        assert close(answer["embeddings"]["float"][0], expected, normalized=True)
    documents = [{"content": [image_part(number)]} for number in (1, 2)]
    scores = [each["score"] for each in server.post("/score", {"queries": TEXT, "documents": documents}).json()["data"]]
    text = model.text_features(TEXT)
    expected_scores = [torch.cosine_similarity(text, model.image_features(drawing(number)), dim=0) for number in (1, 2)]
    assert scores == pytest.approx([float(each) for each in expected_scores], abs=2e-6)


def test_what_is_neither_a_text_nor_an_image_is_named(server: Any) -> None:
    """With its place; the others are answered where that is asked."""
    both = conversation(image_part(1), text_part("a"))
    body = {"messages": [conversation(text_part("a")), both]}
    response = server.post("/v1/embeddings", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1]"
    assert "a text or an image at a time" in response.json()["error"]["message"]
    first, second = server.post("/v1/embeddings", {**body, "errors": "per_item"}).json()["data"]
    assert first["embedding"]
    assert second["error"]["param"] == "messages[1]"
