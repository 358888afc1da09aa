"""Embeddings and scores of small random checkpoints against the library that defines their files.

The library is not a dependency of the workspace: where it is not installed, this module is skipped aloud.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from quire_interfaces import PoolingParams
from quire_pooling import (
    DenseSpec,
    LayerNormSpec,
    Pooler,
    PoolerSpec,
    PoolingHeadSpec,
    load_pooler_weights,
    read_pooler,
)

st = pytest.importorskip(
    "sentence_transformers",
    reason="NOT COMPARED WITH sentence-transformers, which is not installed: pip install sentence-transformers",
)

H = 24
TEXTS = ["one two", "three", "a b c d e f g h i j k l", "one . two , three !", "z y x " * 30]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", *string.ascii_lowercase, *".,!?"]


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=128,
    )  # fmt: skip


def network(folder: Path, cls: Any = BertModel) -> Path:
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=H, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=130, initializer_range=0.4,
    )  # fmt: skip
    cls(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def pool(
    spec: PoolerSpec,
    folder: Path,
    texts: Sequence[str],
    params: PoolingParams,
    weights: dict[str, Tensor] | None = None,
) -> list[Tensor]:
    """What Quire's pooler makes of the hidden states that Transformers computes of each text alone."""
    body = AutoModel.from_pretrained(folder).eval()
    encode = tokenizer()
    ids = [encode(text, truncation=True, max_length=spec.max_seq_length or 128)["input_ids"] for text in texts]
    with torch.inference_mode():
        hidden = [body(input_ids=torch.tensor([each])).last_hidden_state[0] for each in ids]
    pooler = Pooler(spec, {**load_pooler_weights(spec, folder), **(weights or {})})
    flat = torch.tensor([token for each in ids for token in each])
    return pooler.pool(torch.cat(hidden), [len(each) for each in ids], [params] * len(texts), flat)


def assert_near(results: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 2e-6) -> None:
    for result, one in zip(results, expected, strict=True):
        torch.testing.assert_close(result, one.float(), rtol=tolerance, atol=tolerance)


MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@pytest.mark.parametrize("mode", [*MODES, ("cls", "mean"), ("lasttoken", "max", "weightedmean"), tuple(MODES)])
@pytest.mark.parametrize("normalizes", [True, False])
def test_every_pooling_mode(tmp_path: Path, mode: Any, normalizes: bool) -> None:
    modules = st.sentence_transformer.modules
    transformer = modules.Transformer(str(network(tmp_path / "network")))
    parts = [transformer, modules.Pooling(H, pooling_mode=mode)] + [modules.Normalize()] * normalizes
    model = st.SentenceTransformer(modules=parts, device="cpu")
    folder = tmp_path / "saved"
    model.save_pretrained(str(folder))
    spec = read_pooler(folder, {}, hidden_size=H, is_encoder=True)
    assert_near(pool(spec, folder, TEXTS, PoolingParams()), model.encode(TEXTS, convert_to_tensor=True))


def test_dense_layers_norms_prompts_and_lengths(tmp_path: Path) -> None:
    modules = st.sentence_transformer.modules
    transformer = modules.Transformer(str(network(tmp_path / "network")), max_seq_length=20)
    parts = [
        transformer,
        modules.Pooling(H, pooling_mode=("mean", "cls"), include_prompt=False),
        modules.Dense(2 * H, 16),
        modules.LayerNorm(16),
        modules.Dense(16, 16, activation_function=torch.nn.GELU(), use_residual=True),
        modules.Dense(16, 10, bias=False, activation_function=torch.nn.Identity(), use_residual=True),
        modules.Normalize(),
    ]
    model = st.SentenceTransformer(
        modules=parts, device="cpu", prompts={"query": "one two : ", "document": ""}, default_prompt_name="query"
    )
    folder = tmp_path / "saved"
    model.save_pretrained(str(folder))
    spec = read_pooler(folder, {}, hidden_size=H, is_encoder=True)
    assert (spec.max_seq_length, spec.include_prompt, spec.default_prompt_name) == (20, False, "query")
    prompt = spec.prompts["query"]
    assert prompt == "one two : "
    prompt_length = len(tokenizer()(prompt)["input_ids"]) - 1
    results = pool(spec, folder, [prompt + text for text in TEXTS], PoolingParams(prompt_length=prompt_length))
    assert_near(results, model.encode(TEXTS, convert_to_tensor=True))
    results = pool(spec, folder, TEXTS, PoolingParams())
    assert_near(results, model.encode(TEXTS, prompt_name="document", convert_to_tensor=True))


@pytest.mark.parametrize("dimensions", [1, 7, H])
def test_fewer_dimensions_normalized(tmp_path: Path, dimensions: int) -> None:
    modules = st.sentence_transformer.modules
    transformer = modules.Transformer(str(network(tmp_path / "network")))
    model = st.SentenceTransformer(modules=[transformer, modules.Pooling(H), modules.Normalize()], device="cpu")
    folder = tmp_path / "saved"
    model.save_pretrained(str(folder))
    spec = read_pooler(folder, {"is_matryoshka": True}, hidden_size=H, is_encoder=True)
    expected = model.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=True, convert_to_tensor=True)
    assert_near(pool(spec, folder, TEXTS, PoolingParams(dimensions=dimensions)), expected)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("function", ["relu", "log1p_relu"])
def test_splade(tmp_path: Path, strategy: str, function: str) -> None:
    modules = st.sparse_encoder.modules
    transformer = modules.MLMTransformer(str(network(tmp_path / "network", BertForMaskedLM)))
    pooling = modules.SpladePooling(pooling_strategy=strategy, activation_function=function)
    model = st.SparseEncoder(modules=[transformer, pooling], device="cpu")
    folder = tmp_path / "saved"
    model.save_pretrained(str(folder))
    weights = transformer.model.state_dict()
    name = "cls.predictions.transform"
    steps = (
        DenseSpec(weight=f"{name}.dense.weight", bias=f"{name}.dense.bias", in_features=H, out_features=H,
                  activation="gelu_erf"),
        LayerNormSpec(weight=f"{name}.LayerNorm.weight", bias=f"{name}.LayerNorm.bias", size=H, eps=1e-12),
        DenseSpec(weight="cls.predictions.decoder.weight", bias="cls.predictions.bias", in_features=H,
                  out_features=len(WORDS), activation="log1p_relu"),
    )  # fmt: skip
    head = PoolerSpec(hidden_size=H, methods=("MAX",), token_head=PoolingHeadSpec(steps=steps), normalize=False)
    spec = read_pooler(folder, {}, hidden_size=H, is_encoder=True, network=head)
    expected = model.encode(TEXTS, convert_to_tensor=True, convert_to_sparse_tensor=False)
    assert_near(pool(spec, folder, TEXTS, PoolingParams(), weights), expected, 5e-6)


def test_multi_vectors_of_documents(tmp_path: Path) -> None:
    modules = st.sentence_transformer.modules
    late = st.multi_vector_encoder.modules
    parts = [
        modules.Transformer(str(network(tmp_path / "network"))),
        modules.Dense(H, 8, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"),
        modules.Normalize(module_input_name="token_embeddings"),
        late.MultiVectorMask(skiplist_words=list(".,!")),
    ]
    model = st.MultiVectorEncoder(modules=parts, device="cpu")
    folder = tmp_path / "saved"
    model.save_pretrained(str(folder))
    spec = read_pooler(folder, {}, hidden_size=H, is_encoder=True)
    assert spec.late_interaction is not None
    skipped = tuple(tokenizer().convert_tokens_to_ids(list(spec.late_interaction.skiplist_words)))
    params = PoolingParams(task="token_embed", skip_token_ids=skipped)
    expected = model.encode_document(TEXTS)
    assert_near(pool(spec, folder, TEXTS, params), expected)


def test_scores_by_logits_of_two_tokens(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=H, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.4, tie_word_embeddings=False,
        bos_token_id=2, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "network")
    tokenizer().save_pretrained(tmp_path / "network")
    transformer = st.base.modules.Transformer(str(tmp_path / "network"), transformer_task="text-generation")
    score = st.cross_encoder.modules.LogitScore(true_token_id=6, false_token_id=7)
    model = st.CrossEncoder(modules=[transformer, score], device="cpu")
    folder = tmp_path / "saved"
    model.save_pretrained(str(folder))
    spec = read_pooler(folder, {}, hidden_size=H, is_encoder=False, lm_head="lm_head.weight")
    assert (spec.tasks, spec.activation) == ({"classify", "score"}, "sigmoid")
    encode = tokenizer()
    ids = [encode(TEXTS[0], text)["input_ids"] for text in TEXTS]
    body = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = torch.cat([body(input_ids=torch.tensor([each])).last_hidden_state[0] for each in ids])
    pooler = Pooler(spec, load_pooler_weights(spec, folder))
    lens = [len(each) for each in ids]
    flat = torch.tensor([token for each in ids for token in each])
    results = pooler.pool(hidden, lens, [PoolingParams(task="score")] * len(ids), flat)
    expected = model.predict([(TEXTS[0], text) for text in TEXTS], convert_to_tensor=True)
    assert_near(torch.cat(results).unbind(), expected.unbind())
