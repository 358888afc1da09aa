"""Scores and classes are those of sentence-transformers' CrossEncoder and of Transformers' pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from llm_encoder_folders import write_wordpiece
from sentence_transformers import CrossEncoder

from quire import LLM, PoolingParams
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.tokenizers import sample_text

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
QUERY = sample_text(6, 3)
DOCUMENTS = ["", "a", *(sample_text(number, number) for number in (5, 12, 30, 80, 7))]
FAMILIES = ("Bert", "Roberta", "XLMRoberta", "ModernBert")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def write_classifier(folder: Path, family: str, **fields: Any) -> None:
    """A random network that classifies, with a tokenizer whose pairs have token types."""
    case = ENCODER_CASES[f"{family}Model"]
    config = getattr(transformers, f"{family}Config")(**{**case.fields, **fields})
    transformers.set_seed(5)
    network = getattr(transformers, f"{family}ForSequenceClassification")(config)
    for parameter in network.parameters():
        parameter.data += 0.1 * parameter.data.new_empty(parameter.shape).normal_()
    network.save_pretrained(folder)
    write_wordpiece(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_scores_are_those_of_the_cross_encoder(family: str, activation: str | None, tmp_path: Path) -> None:
    write_classifier(tmp_path, family, num_labels=1)
    if activation is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": activation, "version": "4.0.0"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    reference = CrossEncoder(str(tmp_path), device="cpu", max_length=60)
    expected = reference.predict([(QUERY, each) for each in DOCUMENTS])
    truncated = PoolingParams(truncate_prompt_tokens=60)
    with LLM(tmp_path, **SETTINGS) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, pooling_params=truncated, use_tqdm=False)
        scores = np.array([each.outputs.score for each in outputs])
    assert np.abs(scores - expected).max() < 2e-6
    assert np.argsort(-scores).tolist() == np.argsort(-expected).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("num_labels", "problem_type"),
    [(3, None), (3, "single_label_classification"), (4, "multi_label_classification"), (2, "regression"), (1, None)],
)
def test_classes_are_those_of_the_pipeline(
    family: str, num_labels: int, problem_type: str | None, tmp_path: Path
) -> None:
    write_classifier(tmp_path, family, num_labels=num_labels, problem_type=problem_type)
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)
    expected = [{each["label"]: each["score"] for each in answer} for answer in pipeline(DOCUMENTS)]
    with LLM(tmp_path, **SETTINGS) as llm:
        outputs = llm.classify(DOCUMENTS, use_tqdm=False)
    for output, answer in zip(outputs, expected, strict=True):
        assert output.outputs.num_classes == num_labels
        for index, probability in enumerate(output.outputs.probs):
            assert abs(probability - answer[f"LABEL_{index}"]) < 2e-6
