"""Jina Embeddings v3: each text by the adapter of its own task, with the prompt of that name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_encoder_folders import write_wordpiece
from torch import Tensor

from quire import LLM, PoolingParams, RequestError
from quire_testkit.task_adapters import TASKS, JinaModel
from quire_testkit.tokenizers import sample_text

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
TEXTS = [sample_text(number, number) for number in (12, 3, 30)]
PROMPTS = {"retrieval.query": "ask: ", "retrieval.passage": "tell: ", "separation": "", "text-matching": ""}


class Jina:
    """A random Jina Embeddings v3 with the files of sentence-transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = JinaModel(folder, vocab_size=200)
        write_wordpiece(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))

    def expected(self, text: str, task: str | None) -> Tensor:
        """The embedding by Transformers' network with that adapter in its weights."""
        ids = self.tokenizer(PROMPTS.get(task or "", "") + text)["input_ids"]
        with torch.inference_mode():
            hidden = self.model.network(task)(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden.mean(0), dim=0)


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Jina:
    return Jina(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def llm(jina: Jina) -> Iterator[LLM]:
    with LLM(jina.folder, **SETTINGS) as llm:
        yield llm


def test_texts_of_one_call_have_tasks_of_their_own(jina: Jina, llm: LLM) -> None:
    chosen = [(text, task) for text in TEXTS for task in (None, *TASKS)]
    params = [PoolingParams(embedding_task=task) for _, task in chosen]
    outputs = llm.embed([text for text, _ in chosen], pooling_params=params, use_tqdm=False)
    for output, (text, task) in zip(outputs, chosen, strict=True):
        assert (output.outputs.data - jina.expected(text, task)).abs().max() < 2e-6
    (alone,) = llm.embed(TEXTS[1], pooling_params=params[2], use_tqdm=False)
    assert alone.outputs.pooled == outputs[8].outputs.pooled
    assert any("requests choose a task" in note for note in llm.engine_info.extra["notes"])


def test_a_prompt_may_be_another_than_the_tasks(jina: Jina, llm: LLM) -> None:
    task = PoolingParams(embedding_task="retrieval.query")
    (other,) = llm.embed(TEXTS[0], pooling_params=task, prompt_name="separation", use_tqdm=False)
    assert other.prompt_token_ids == jina.tokenizer(TEXTS[0])["input_ids"]
    (own,) = llm.embed(TEXTS[0], pooling_params=task, use_tqdm=False)
    assert own.prompt_token_ids == jina.tokenizer(f"ask: {TEXTS[0]}")["input_ids"]
    (prompt_alone,) = llm.embed(TEXTS[0], prompt_name="retrieval.query", use_tqdm=False)
    assert prompt_alone.prompt_token_ids == own.prompt_token_ids
    assert (prompt_alone.outputs.data - own.outputs.data).abs().max() > 1e-3


def test_what_has_no_adapter_is_refused(jina: Jina, llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"no adapter of task 'search'; it has those of retrieval\.query"):
        llm.embed("a", pooling_params=PoolingParams(embedding_task="search"), use_tqdm=False)
    with LLM(jina.folder, hf_overrides={"default_task": "separation"}, **SETTINGS) as merged:
        (output,) = merged.embed(TEXTS[0], pooling_params=PoolingParams(embedding_task="separation"), use_tqdm=False)
        assert (output.outputs.data - jina.expected(TEXTS[0], "separation")).abs().max() < 2e-6
        with pytest.raises(RequestError, match="embeds all texts for the task separation"):
            merged.embed("a", pooling_params=PoolingParams(embedding_task="classification"), use_tqdm=False)
