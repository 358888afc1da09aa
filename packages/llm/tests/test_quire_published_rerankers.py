"""Generative rerankers as published: scores of yes against no by the recipe of Qwen3-Reranker, in each form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_published_folders import edit_json, write_metaspace_bpe, write_network, write_qwen_tokenizer
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore

from quire import LLM, ConfigError, PoolingParams
from quire_testkit.tokenizers import sample_text

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 1 << 24}
FALSE, TRUE = "n", "y"
"""Texts of one token, in place of no and yes."""
QUERY = sample_text(6, 3)
DOCUMENTS = ["", "a", *(sample_text(number, number) for number in (5, 12, 30, 80))]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEMPLATE = (
    "{%- set ns = namespace(instruction='" + INSTRUCTION + "', query='', document='') -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set ns.instruction = m.content -%}"
    "{%- elif m.role == 'query' -%}{%- set ns.query = m.content -%}"
    "{%- elif m.role == 'document' -%}{%- set ns.document = m.content -%}{%- endif -%}{%- endfor -%}"
    + "{{ " + json.dumps(PREFIX) + " }}"
    "{{ '<Instruct>: ' + ns.instruction + '\\n<Query>: ' + ns.query + '\\n<Document>: ' + ns.document }}"
    + "{{ " + json.dumps(SUFFIX) + " }}"
)  # fmt: skip
LENGTHS = [1000, 200]
"""The most tokens of a prompt: the first cuts none, the second one some."""


def write_reranker(folder: Path, template: str | None) -> Any:
    """A random Qwen3-Reranker, and Transformers' network."""
    network = write_network(
        folder, "Qwen3ForCausalLM", weight_scale=0.1, tie_word_embeddings=True, max_position_embeddings=2048
    )
    write_qwen_tokenizer(folder, ends=False)
    edit_json(folder / "tokenizer_config.json", {"chat_template": template})
    return network


@torch.inference_mode()
def published_scores(folder: Path, network: Any, max_length: int) -> list[float]:
    """Scores of `DOCUMENTS` as the model card computes them: the probability of yes against no behind a prompt whose
    frame is never cut."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    false, true = (tokenizer.convert_tokens_to_ids(token) for token in (FALSE, TRUE))
    scores = []
    for document in DOCUMENTS:
        pair = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
        room = max_length - len(prefix) - len(suffix)
        ids = prefix + tokenizer.encode(pair, truncation=True, max_length=room, add_special_tokens=False) + suffix
        logits = network(torch.tensor([ids])).logits[0, -1]
        scores.append(float(torch.log_softmax(logits[[false, true]], dim=0)[1].exp()))
    return scores


def scores(llm: LLM, max_length: int, **fields: Any) -> list[float]:
    params = PoolingParams(truncate_prompt_tokens=max_length)
    outputs = llm.score(QUERY, DOCUMENTS, pooling_params=params, use_tqdm=False, **fields)
    return [each.outputs.score for each in outputs]


def assert_near(results: Sequence[float], expected: Sequence[float]) -> None:
    assert max(abs(one - other) for one, other in zip(results, expected, strict=True)) < 2e-6


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"])
def test_the_generative_checkpoint_with_the_fields_of_vllm(architecture: str, tmp_path: Path) -> None:
    network = write_reranker(tmp_path, None)
    overrides = {
        "architectures": [architecture],
        "classifier_from_token": [FALSE, TRUE],
        "is_original_qwen3_reranker": True,
    }
    with LLM(tmp_path, runner="pooling", hf_overrides=overrides, **SETTINGS) as llm:
        for length in LENGTHS:
            expected = published_scores(tmp_path, network, length)
            assert_near(scores(llm, length, chat_template=TEMPLATE), expected)


def test_the_checkpoint_converted_into_a_classifier(tmp_path: Path) -> None:
    network = write_reranker(tmp_path, TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    false, true = (tokenizer.convert_tokens_to_ids(token) for token in (FALSE, TRUE))
    weight = network.lm_head.weight.detach()
    tensors = {
        **load_file(tmp_path / "model.safetensors"),
        "score.weight": (weight[true] - weight[false])[None].clone(),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    classifier = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}
    fields = {"architectures": ["Qwen3ForSequenceClassification"], "sentence_transformers": classifier}
    edit_json(tmp_path / "config.json", {**fields, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}})
    with LLM(tmp_path, **SETTINGS) as llm:
        for length in LENGTHS:
            assert_near(scores(llm, length), published_scores(tmp_path, network, length))


def test_one_token_behind_the_start_that_a_template_leaves_out(tmp_path: Path) -> None:
    """As BGE-reranker-v2-gemma is served: the logit of one token, behind <bos> and vLLM's template for it."""
    network = write_network(tmp_path, "GemmaForCausalLM", weight_scale=0.1, max_position_embeddings=2048)
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_metaspace_bpe(tmp_path, special, "<bos> $A", **names)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    words = [token[1:] for token in tokenizer.get_vocab() if token.startswith("\u2581") and token[1:].isalpha()]
    answer = min(words)
    (token_id,) = tokenizer.encode(answer, add_special_tokens=False)
    template = "A: {{ messages[0].content }}\nB: {{ messages[1].content }}\nIs it so?"
    texts = [f"A: {QUERY}\nB: {document}\nIs it so?" for document in DOCUMENTS[1:]]
    expected = []
    for text in texts:
        with torch.inference_mode():
            expected.append(network(torch.tensor([tokenizer.encode(text)])).logits[0, -1, token_id])
    overrides = {"architectures": ["GemmaForSequenceClassification"], "classifier_from_token": [answer]}
    with LLM(tmp_path, hf_overrides={**overrides, "method": "no_post_processing"}, **SETTINGS) as llm:
        for written in (template, f"<bos>{template}"):
            outputs = llm.score(QUERY, DOCUMENTS[1:], chat_template=written, use_tqdm=False)
            assert [each.prompt_token_ids for each in outputs] == [tokenizer.encode(text) for text in texts]
            assert_near([each.outputs.score for each in outputs], [float(each.sigmoid()) for each in expected])
        raw = PoolingParams(use_activation=False)
        outputs = llm.score(QUERY, DOCUMENTS[1:], pooling_params=raw, chat_template=template, use_tqdm=False)
        assert_near([each.outputs.score for each in outputs], [float(each) for each in expected])
        short = PoolingParams(truncate_prompt_tokens=20)
        outputs = llm.score(QUERY, DOCUMENTS[1:], pooling_params=short, chat_template=template, use_tqdm=False)
        assert {(each.num_prompt_tokens, each.prompt_token_ids[0]) for each in outputs[2:]} == {(20, 2)}


@pytest.mark.parametrize(
    ("tokens", "method", "tasks"),
    [
        ([FALSE, TRUE], "no_post_processing", ("classify",)),
        ([FALSE, TRUE, "a"], None, ("classify",)),
        ([TRUE], None, ("classify", "score")),
    ],
)
def test_tokens_are_classes_of_their_own(tokens: list[str], method: str | None, tasks: Any, tmp_path: Path) -> None:
    network = write_reranker(tmp_path, TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    overrides = {"classifier_from_token": tokens, **({} if method is None else {"method": method})}
    with LLM(tmp_path, hf_overrides=overrides, **SETTINGS) as llm:
        assert llm.engine_info.pooling_tasks == tasks
        (output,) = llm.classify("a text", use_tqdm=False)
    with torch.no_grad():
        logits = network(torch.tensor([tokenizer.encode("a text")])).logits[0, -1]
    logits = logits[tokenizer.convert_tokens_to_ids(tokens)]
    assert_near(output.outputs.probs, (logits.sigmoid() if len(tokens) == 1 else logits.softmax(0)).tolist())


def test_methods_that_do_not_fit_the_tokens_are_refused(tmp_path: Path) -> None:
    write_reranker(tmp_path, TEMPLATE)
    for fields, message in (
        ({"classifier_from_token": [TRUE], "method": "from_2_way_softmax"}, "takes two tokens"),
        ({"classifier_from_token": [FALSE, TRUE], "method": "mean"}, "method must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(tmp_path, hf_overrides=fields, **SETTINGS)


@pytest.mark.parametrize("prompt", [None, "Find the word"])
def test_the_folder_of_a_cross_encoder(prompt: str | None, tmp_path: Path) -> None:
    """Its default prompt is a message of role "system" before the pair."""
    network = write_reranker(tmp_path / "network", TEMPLATE)
    transformer = Transformer(str(tmp_path / "network"), transformer_task="text-generation")
    tokenizer = transformer.tokenizer
    false, true = (tokenizer.convert_tokens_to_ids(token) for token in (FALSE, TRUE))
    prompts = {} if prompt is None else {"prompts": {"find": prompt}, "default_prompt_name": "find"}
    score = LogitScore(true_token_id=true, false_token_id=false)
    CrossEncoder(modules=[transformer, score], device="cpu", **prompts).save_pretrained(str(tmp_path / "saved"))
    with LLM(tmp_path / "saved", **SETTINGS) as llm:
        for length in LENGTHS:
            reference = CrossEncoder(str(tmp_path / "saved"), device="cpu", max_length=length)
            expected = reference.predict([(QUERY, document) for document in DOCUMENTS])
            assert_near(scores(llm, length), expected.tolist())
            if prompt is None:
                assert_near(expected.tolist(), published_scores(tmp_path / "network", network, length))
