"""Folders as embedding models are published: vectors of sentence-transformers, by prompts, lengths and dimensions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llm_published_folders import PUBLISHED, e5_mistral, set_template
from sentence_transformers import SentenceTransformer

from quire import LLM, PoolingParams
from quire_testkit.tokenizers import sample_text

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
TEXTS = ["a", "Two  spaces, and ÉTÉ.", *(sample_text(number, number) for number in (4, 31, 90, 2))]
TOLERANCE = 2e-6


class Folder(NamedTuple):
    """A checkpoint, served and loaded by sentence-transformers."""

    llm: LLM
    reference: SentenceTransformer
    prompts: Sequence[str]
    """Names of the prompts that the checkpoint has."""


@pytest.fixture(scope="module", params=PUBLISHED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    path: Path = tmp_path_factory.mktemp("published")
    PUBLISHED[request.param](path)
    reference = SentenceTransformer(str(path), device="cpu", model_kwargs={"dtype": torch.float32})
    with LLM(path, hf_overrides={"is_matryoshka": True}, **SETTINGS) as llm:
        yield Folder(llm, reference, prompt_names(path))


def prompt_names(path: Path) -> list[str]:
    file = path / "config_sentence_transformers.json"
    return list(json.loads(file.read_text()).get("prompts", {}))


def embeddings(llm: LLM, texts: Sequence[str], **fields: Any) -> torch.Tensor:
    """[N, dimensions]: vectors of texts, cut to the checkpoint's length."""
    prompt_name = fields.pop("prompt_name", None)
    params = PoolingParams(truncate_prompt_tokens=-1, **fields)
    outputs = llm.embed(texts, pooling_params=params, prompt_name=prompt_name, use_tqdm=False)
    return torch.stack([each.outputs.data for each in outputs])


def test_vectors_by_every_prompt(folder: Folder) -> None:
    for name in (None, *folder.prompts):
        expected = torch.from_numpy(folder.reference.encode(TEXTS, prompt_name=name))
        assert (embeddings(folder.llm, TEXTS, prompt_name=name) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("dimensions", [1, 24, 64])
def test_vectors_of_fewer_dimensions(folder: Folder, dimensions: int) -> None:
    expected = torch.from_numpy(folder.reference.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=True))
    assert (embeddings(folder.llm, TEXTS, dimensions=dimensions) - expected).abs().max() < TOLERANCE


def test_the_end_token_that_settings_of_llamas_tokenizer_ask_for(tmp_path: Path) -> None:
    """add_eos_token counts where tokenizer.json has no end token, as for the Transformers of E5-Mistral's time."""
    e5_mistral(tmp_path)
    vectors = []
    for single in ("<s> $A </s>", "<s> $A"):
        set_template(tmp_path, single, ("<s>", 1), ("</s>", 2))
        with LLM(tmp_path, **SETTINGS) as llm:
            vectors.append(embeddings(llm, TEXTS))
    assert torch.equal(*vectors)
