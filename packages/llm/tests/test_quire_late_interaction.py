"""Late interaction: a checkpoint as pylate saves it, whose queries and documents are marked, compared by MaxSim."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast

from quire import LLM, PoolingParams
from quire_interfaces import CheckpointError

H, D, QUERY_LENGTH, DOCUMENT_LENGTH = 32, 8, 10, 14
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", *string.ascii_lowercase, ".", ","]
QUERIES = ["one two", "three , a b c d e f g h i j k l m n"]
DOCUMENTS = ["two . one , three", "a b c d e f g h i j k l m n o p q r", "z"]


@pytest.fixture(scope="module", params=[True, False], ids=["attended", "not attended"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an expansion of queries that other tokens attend to, or that they do not, as pylate has it by default."""
    folder = tmp_path_factory.mktemp("colbert")
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inner.add_tokens([AddedToken("[Q] "), AddedToken("[D] ")])
    PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="[MASK]", pad_token="[PAD]").save_pretrained(folder)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=inner.get_vocab_size(), hidden_size=H, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.4,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": torch.randn(D, H)}, folder / "1_Dense" / "model.safetensors")
    dense = {
        "in_features": H,
        "out_features": D,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    settings = {
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": QUERY_LENGTH,
        "document_length": DOCUMENT_LENGTH, "attend_to_expansion_tokens": request.param,
        "do_query_expansion": True, "skiplist_words": [".", ",", "!"],
    }  # fmt: skip
    for name, content in (
        ("1_Dense/config.json", dense), ("modules.json", modules), ("config_sentence_transformers.json", settings),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32") as llm:
        yield llm


def vectors(folder: Path, text: str, *, is_query: bool) -> Tensor:
    """What ColBERT makes of a text, by Transformers' network."""
    ids = [len(WORDS) + (not is_query)] + [WORDS.index(word) for word in text.split()]
    ids = [2, *ids[: (QUERY_LENGTH if is_query else DOCUMENT_LENGTH) - 2], 3]
    num_attended = len(ids)
    if is_query:
        ids += [WORDS.index("[MASK]")] * (QUERY_LENGTH - len(ids))
        settings = json.loads((folder / "config_sentence_transformers.json").read_text())
        num_attended = len(ids) if settings["attend_to_expansion_tokens"] else num_attended
    body = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        attended = (torch.arange(len(ids)) < num_attended).long()[None]
        hidden = body(input_ids=torch.tensor([ids]), attention_mask=attended).last_hidden_state[0]
    out = torch.nn.functional.normalize(hidden @ load_file(folder / "1_Dense/model.safetensors")["linear.weight"].T)
    counts = [is_query or WORDS[token : token + 1] not in (["."], [","]) for token in ids]
    return out[torch.tensor(counts)]


def test_the_format_of_colberts_own_code(folder: Path, tmp_path: Path) -> None:
    """The same network and texts as pylate's, with names and settings as ColBERT writes them."""
    pylate = json.loads((folder / "config_sentence_transformers.json").read_text())
    metadata = {
        "query_token_id": "[Q] ", "doc_token_id": "[D] ", "query_maxlen": QUERY_LENGTH, "doc_maxlen": DOCUMENT_LENGTH,
        "dim": D, "similarity": "cosine", "mask_punctuation": True,
        "attend_to_mask_tokens": pylate["attend_to_expansion_tokens"],
    }  # fmt: skip
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    body = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    linear = load_file(folder / "1_Dense" / "model.safetensors")
    save_file({**body, **linear}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(tmp_path), dtype="float32") as llm:
        assert llm.engine_info.pooling_tasks == ("token_embed",)
        documents = [vectors(folder, text, is_query=False) for text in DOCUMENTS]
        for text in QUERIES:
            query = vectors(folder, text, is_query=True)
            scores = [output.outputs.score for output in llm.score(text, DOCUMENTS, use_tqdm=False)]
            assert scores == pytest.approx([float((query @ each.T).amax(1).sum()) for each in documents], abs=2e-5)
    (tmp_path / "artifact.metadata").write_text(json.dumps({**metadata, "similarity": "l2"}))
    with pytest.raises(CheckpointError, match="similarity 'l2' is not supported"):
        LLM(str(tmp_path), dtype="float32")
    with pytest.raises(CheckpointError, match="HF_ColBERT of model_type 'albert' is not supported; there are bert"):
        LLM(str(tmp_path), dtype="float32", hf_overrides={"model_type": "albert"})


def test_the_same_bits_beside_texts_of_another_kind(llm: LLM) -> None:
    """Tokens that are not attended to have their texts read apart from the others of a step."""
    prompts = [[2, 5, 6, 3, 4, 4], [2, 7, 3], [2, 5, 3, 4, 4], [2, 8, 9, 10, 11, 3]]
    params = [PoolingParams(task="token_embed", expansion_length=length) for length in (2, 0, 1, 0)]

    def pooled(prompts: list[list[int]], params: list[PoolingParams]) -> list[bytes]:
        return [each.outputs.pooled.data for each in llm.encode(prompts, params, use_tqdm=False)]

    alone = [pooled([prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]
    assert pooled(prompts, params) == alone
    assert pooled(prompts[:1], params[1:2]) != alone[:1]


def test_scores_are_maxsim_of_marked_texts(llm: LLM, folder: Path) -> None:
    documents = [vectors(folder, text, is_query=False) for text in DOCUMENTS]
    for text in QUERIES:
        query = vectors(folder, text, is_query=True)
        assert len(query) == QUERY_LENGTH
        scores = [output.outputs.score for output in llm.score(text, DOCUMENTS, use_tqdm=False)]
        expected = [float((query @ document.T).amax(1).sum()) for document in documents]
        assert scores == pytest.approx(expected, abs=2e-5)
    pairs = [output.outputs.score for output in llm.score(QUERIES, DOCUMENTS[:2], use_tqdm=False)]
    expected = [
        float((vectors(folder, query, is_query=True) @ document.T).amax(1).sum())
        for query, document in zip(QUERIES, documents, strict=False)
    ]
    assert pairs == pytest.approx(expected, abs=2e-5)


def test_vectors_of_a_text_are_a_documents_unless_it_is_called_a_query(llm: LLM, folder: Path) -> None:
    (document,) = llm.encode(DOCUMENTS[0], pooling_task="token_embed", use_tqdm=False)
    torch.testing.assert_close(
        document.outputs.data, vectors(folder, DOCUMENTS[0], is_query=False), atol=2e-6, rtol=2e-6
    )
    (query,) = llm.encode(QUERIES[0], pooling_task="token_embed", prompt_name="query", use_tqdm=False)
    torch.testing.assert_close(query.outputs.data, vectors(folder, QUERIES[0], is_query=True), atol=2e-6, rtol=2e-6)
    params = PoolingParams(task="token_embed", skip_token_ids=(5,))
    (other,) = llm.encode("one , two", params, use_tqdm=False)
    assert other.outputs.data.shape == (5, D)  # [CLS] [D] , two [SEP]
