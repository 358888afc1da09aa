"""Folders as embedding models are published: vectors of sentence-transformers, by prompts, lengths and dimensions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from llm_published_folders import PUBLISHED, bge_m3, e5_mistral, gritlm, set_template
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


def test_gritlm_reads_in_both_directions_and_leaves_the_instruction_out(tmp_path: Path) -> None:
    """sentence-transformers loads such a folder by its own code, so the network is Transformers' without its mask."""
    network = gritlm(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompts = json.loads((tmp_path / "config_sentence_transformers.json").read_text())["prompts"]
    with LLM(tmp_path, **SETTINGS) as llm:
        for name, prompt in {None: "", **prompts}.items():
            skip = len(tokenizer(prompt).input_ids) if prompt else 0
            for text in TEXTS:
                ids = tokenizer(prompt + text, return_tensors="pt").input_ids
                mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
                with torch.inference_mode():
                    hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state[0]
                expected = torch.nn.functional.normalize(hidden[skip:].mean(0), dim=0)
                assert (embeddings(llm, [text], prompt_name=name)[0] - expected).abs().max() < TOLERANCE


def test_sparse_weights_and_vectors_of_tokens_of_bge_m3(tmp_path: Path) -> None:
    """By the formulas of M3-Embedding (arXiv 2402.03216, section 3.2)."""
    bge_m3(tmp_path)
    network = transformers.AutoModel.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    sparse, colbert = (torch.load(tmp_path / f"{name}_linear.pt") for name in ("sparse", "colbert"))
    with LLM(tmp_path, **SETTINGS) as llm:
        weights = llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)
        vectors = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    for text, weight, vector in zip(TEXTS, weights, vectors, strict=True):
        with torch.inference_mode():
            hidden = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected = torch.relu(hidden @ sparse["weight"].T + sparse["bias"])[1:-1]
        assert (weight.outputs.data - expected).abs().max() < TOLERANCE
        expected = torch.nn.functional.normalize(hidden @ colbert["weight"].T + colbert["bias"], dim=1)[1:]
        assert (vector.outputs.data - expected).abs().max() < TOLERANCE
