"""Vectors, scores and token vectors are those of sentence-transformers, on the real MiniLM and on random folders."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_encoder_folders import SentenceModel
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense

from quire import LLM, PoolingParams
from quire_testkit.real_checkpoints import MINILM, real_checkpoint
from quire_testkit.tokenizers import sample_text

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
TEXTS = ["", "a", "Two  spaces, and ÉTÉ.", *(sample_text(number, number) for number in (4, 31, 90, 2))]
MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "sqrt": "pooling_mode_mean_sqrt_len_tokens",
    "weighted": "pooling_mode_weightedmean_tokens",
    "last": "pooling_mode_lasttoken",
}


def embeddings(outputs: Sequence[Any]) -> torch.Tensor:
    return torch.tensor([each.outputs.embedding for each in outputs])


def reference(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def write_modules(folder: Path, modes: Sequence[str], *, dense: bool, normalize: bool) -> None:
    """Modules behind the network, with the files that sentence-transformers writes of them itself."""
    pooling = {
        "word_embedding_dimension": 64,
        "pooling_mode_mean_tokens": False,
        **{MODES[mode]: True for mode in modes},
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    if dense:
        torch.manual_seed(3)
        (folder / "2_Dense").mkdir(exist_ok=True)
        width = 64 * len(modes)
        Dense(in_features=width, out_features=24).save(str(folder / "2_Dense"))
        modules.append(("Dense", "2_Dense"))
    if normalize:
        modules.append(("Normalize", "3_Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def test_the_real_minilm() -> None:
    folder = real_checkpoint(MINILM)
    model = reference(folder)
    texts = [*TEXTS, sample_text(700, 5), "北京 🙂 naïve co-operate don't"]
    with LLM(str(folder), **SETTINGS) as llm:
        truncated = PoolingParams(truncate_prompt_tokens=-1)
        vectors = embeddings(llm.embed(texts, pooling_params=truncated, use_tqdm=False))
        expected = torch.from_numpy(model.encode(texts))
        assert (vectors - expected).abs().max() < 2e-6
        scores = torch.tensor(
            [each.outputs.score for each in llm.score(texts[3], texts, use_tqdm=False, **{"pooling_params": truncated})]
        )
        assert (scores - model.similarity(expected[3:4], expected)[0]).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("modes", "dense", "normalize"),
    [*itertools.product([("cls",), ("mean",), ("last",)], [False, True], [False, True]), (("max",), False, True),
     (("sqrt",), False, False), (("weighted",), True, False), (("cls", "mean", "max"), True, True)],
)  # fmt: skip
def test_every_kind_of_modules(modes: tuple[str, ...], dense: bool, normalize: bool, tmp_path: Path) -> None:
    SentenceModel(tmp_path)
    write_modules(tmp_path, modes, dense=dense, normalize=normalize)
    expected = torch.from_numpy(reference(tmp_path).encode(TEXTS))
    with LLM(tmp_path, **SETTINGS) as llm:
        vectors = embeddings(llm.embed(TEXTS, use_tqdm=False))
    assert vectors.shape == expected.shape
    assert (vectors - expected).abs().max() < 2e-6 * max(1, expected.abs().max())


def test_what_no_file_says_is_told_once(tmp_path: Path) -> None:
    SentenceModel(tmp_path)
    (tmp_path / "modules.json").unlink()
    with LLM(tmp_path, **SETTINGS) as llm:
        assert sum("the mean of all tokens is taken" in note for note in llm.engine_info.extra["notes"]) == 1


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel"])
def test_every_family(architecture: str, tmp_path: Path) -> None:
    SentenceModel(tmp_path, architecture)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "search query: ", "passage": ""}, "default_prompt_name": "query"})
    )
    model = reference(tmp_path)
    with LLM(tmp_path, **SETTINGS) as llm:
        truncated = PoolingParams(truncate_prompt_tokens=-1)
        vectors = embeddings(llm.embed(TEXTS, pooling_params=truncated, use_tqdm=False))
        assert (vectors - torch.from_numpy(model.encode(TEXTS))).abs().max() < 2e-6
