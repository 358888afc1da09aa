"""Small random checkpoints with the files that embedding models are published with: one function per kind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from llm_encoder_folders import write_wordpiece
from safetensors.torch import load_file, save_file
from sentence_transformers.sentence_transformer.modules import Dense
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from quire_testkit.parity.cases import CASES
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import sample_text, write_tokenizer

__all__ = [
    "PUBLISHED",
    "VOCAB_SIZE",
    "bge_m3",
    "e5_mistral",
    "edit_json",
    "gritlm",
    "rename_tensors",
    "set_template",
    "write_metaspace_bpe",
    "write_network",
    "write_qwen_tokenizer",
]

VOCAB_SIZE = 400
WIDTH = 64
QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
"""The prompt of Qwen3-Embedding."""


def edit_json(file: Path, fields: Mapping[str, Any]) -> None:
    """Fields of a JSON object in a file, which is made where there is none; None takes one away."""
    values = {**(json.loads(file.read_text()) if file.exists() else {}), **fields}
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def rename_tensors(folder: Path, rename: Callable[[str], str]) -> None:
    """The tensors of a checkpoint by other names."""
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_network(
    folder: Path, architecture: str, base: str | None = None, *, weight_scale: float = 0.2, **fields: Any
) -> Any:
    """A random network of a class of Transformers.

    Args:
        folder: Written to.
        architecture: The class.
        base: The architecture whose parity case has its sizes; None for `architecture`.
        weight_scale: Standard deviation of matrices.
        fields: Fields of its configuration.

    Returns:
        Transformers' network.
    """
    case = {**CASES, **ENCODER_CASES}[base or architecture]
    return write_checkpoint(
        folder,
        architecture,
        dataclasses.replace(
            case, fields={**case.fields, "vocab_size": VOCAB_SIZE, **fields}, weight_scale=weight_scale
        ),
    )


def write_modules(
    folder: Path,
    pooling: Mapping[str, Any],
    *modules: str,
    sentence: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """modules.json and what it names.

    Args:
        folder: The checkpoint's.
        pooling: Fields of 1_Pooling/config.json beside the width.
        modules: Kinds of the modules behind; Dense layers are written before.
        sentence: sentence_bert_config.json; None for no such file.
        settings: config_sentence_transformers.json beside versions; None for no such file.
    """
    kinds = ["Transformer", "Pooling", *modules]
    entries = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "",
         "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    edit_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **pooling})
    if sentence is not None:
        edit_json(folder / "sentence_bert_config.json", sentence)
    if settings is not None:
        versions = {"sentence_transformers": "5.1.0", "transformers": "4.57.0", "pytorch": "2.8.0"}
        edit_json(folder / "config_sentence_transformers.json", {"__version__": versions, **settings})


def methods(mode: str) -> dict[str, bool]:
    """All flags of 1_Pooling/config.json, one of them set."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {f"pooling_mode_{name}": name == mode for name in names}


def set_template(folder: Path, single: str, *special: tuple[str, int]) -> None:
    """The post-processor of tokenizer.json."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special))
    tokenizer.save(str(path))


def write_qwen_tokenizer(folder: Path, *, ends: bool) -> None:
    """Byte-level BPE that pads on the left; `ends` puts <|endoftext|> behind texts."""
    write_tokenizer(folder, vocab_size=VOCAB_SIZE)
    edit_json(folder / "tokenizer_config.json", {"padding_side": "left", "model_max_length": 131072})
    if ends:
        set_template(folder, "$A <|endoftext|>", ("<|endoftext|>", VOCAB_SIZE - 3))


def write_metaspace_bpe(folder: Path, special: Sequence[str], single: str, **settings: Any) -> None:
    """A BPE tokenizer whose words begin with a mark for the space before them, as Llama and Gemma have.

    Args:
        folder: Written to.
        special: Special tokens from id 0 on.
        single: Template of a text.
        settings: tokenizer_config.json.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator([sample_text(3000)], trainer)
    pieces = [(token, special.index(token)) for token in special if token in single.split()]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pieces)
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def write_xlm_roberta_tokenizer(folder: Path, max_length: int) -> None:
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    write_metaspace_bpe(
        folder, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "<s> $A </s>", model_max_length=max_length,
        **{f"{kind}_token": token for kind, token in names.items()},
    )  # fmt: skip


def qwen3_embedding(folder: Path) -> None:
    """A causal network saved without its LM head and without the prefix of its body."""
    write_network(folder, "Qwen3Model", "Qwen3ForCausalLM", tie_word_embeddings=True)
    edit_json(folder / "config.json", {"architectures": ["Qwen3ForCausalLM"]})
    write_qwen_tokenizer(folder, ends=True)
    settings = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None}
    pooling = {**methods("lasttoken"), "include_prompt": True}
    write_modules(folder, pooling, "Normalize", settings={**settings, "similarity_fn_name": "cosine"})


def e5_mistral(folder: Path) -> None:
    """An end token behind texts, which the tokenizer's settings ask for too."""
    write_network(folder, "MistralModel", "MistralForCausalLM")
    write_metaspace_bpe(
        folder, ["<unk>", "<s>", "</s>"], "<s> $A </s>", tokenizer_class="LlamaTokenizer", add_bos_token=True,
        add_eos_token=True, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>",
        padding_side="left", model_max_length=1000000000000000019884624838656,
    )  # fmt: skip
    prompts = {
        "web_search_query": f"{QUERY} ",
        "sts_query": "Instruct: Retrieve semantically similar text.\nQuery: ",
    }
    sentence = {"max_seq_length": 48, "do_lower_case": False}
    settings = {"prompts": prompts, "default_prompt_name": None}
    write_modules(folder, methods("lasttoken"), "Normalize", sentence=sentence, settings=settings)


def gte_qwen2(folder: Path) -> None:
    """A decoder's layers without a causal mask."""
    write_network(folder, "Qwen2Model", "Qwen2ForCausalLM", use_sliding_window=False, is_causal=False)
    code = {"AutoModel": "modeling_qwen.Qwen2Model", "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM"}
    edit_json(folder / "config.json", {"architectures": ["Qwen2ForCausalLM"], "auto_map": code})
    write_qwen_tokenizer(folder, ends=True)
    sentence = {"max_seq_length": 200, "do_lower_case": False}
    settings = {"prompts": {"query": f"{QUERY} "}, "default_prompt_name": None}
    write_modules(folder, methods("lasttoken"), "Normalize", sentence=sentence, settings=settings)


def bge_base(folder: Path) -> None:
    """BERT's first token; texts in lower case; no settings but versions."""
    write_network(folder, "BertModel")
    write_wordpiece(folder, VOCAB_SIZE)
    sentence = {"max_seq_length": 50, "do_lower_case": True}
    write_modules(folder, methods("cls_token"), "Normalize", sentence=sentence, settings={})


def bge_m3(folder: Path) -> None:
    """XLM-RoBERTa with heads of each token in files of torch beside it."""
    write_network(folder, "XLMRobertaModel", pad_token_id=1, bos_token_id=0, type_vocab_size=1)
    write_xlm_roberta_tokenizer(folder, 8192)
    torch.manual_seed(5)
    torch.save(torch.nn.Linear(WIDTH, WIDTH).state_dict(), folder / "colbert_linear.pt")
    torch.save(torch.nn.Linear(WIDTH, 1).state_dict(), folder / "sparse_linear.pt")
    sentence = {"max_seq_length": 200, "do_lower_case": False}
    write_modules(folder, methods("cls_token"), "Normalize", sentence=sentence, settings={})


def nomic(folder: Path) -> None:
    """Prompts that say the task, and the mean of all tokens."""
    write_network(folder, "NomicBertModel")
    write_wordpiece(folder, VOCAB_SIZE)
    prompts = {name: f"{name}: " for name in ("search_query", "search_document", "classification", "clustering")}
    sentence = {"max_seq_length": 200, "do_lower_case": False}
    settings = {"prompts": {"query": "search_query: ", "document": "search_document: ", **prompts}}
    write_modules(folder, methods("mean_tokens"), "Normalize", sentence=sentence, settings=settings)


def snowflake_arctic(folder: Path) -> None:
    """XLM-RoBERTa's first token, and a prompt of queries alone (version 2)."""
    write_network(folder, "XLMRobertaModel", pad_token_id=1, bos_token_id=0, type_vocab_size=1)
    write_xlm_roberta_tokenizer(folder, 200)
    settings = {"prompts": {"query": "query: "}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    sentence = {"max_seq_length": 200, "do_lower_case": False}
    write_modules(folder, methods("cls_token"), "Normalize", sentence=sentence, settings=settings)


def embedding_gemma(folder: Path) -> None:
    """Gemma 3's layers in both directions, windows among them, and two layers behind the mean."""
    write_network(
        folder, "Gemma3TextModel", "Gemma3ForCausalLM", use_bidirectional_attention=True, sliding_window=16,
        bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    edit_json(folder / "config.json", {"sliding_window": 16})
    write_metaspace_bpe(
        folder, ["<pad>", "<eos>", "<bos>", "<unk>"], "<bos> $A <eos>", bos_token="<bos>", eos_token="<eos>",
        pad_token="<pad>", unk_token="<unk>", model_max_length=2048,
    )  # fmt: skip
    torch.manual_seed(3)
    for number, sizes in ((2, (WIDTH, 4 * WIDTH)), (3, (4 * WIDTH, WIDTH))):
        path = folder / f"{number}_Dense"
        path.mkdir()
        Dense(*sizes, bias=False, activation_function=torch.nn.Identity()).save(str(path))
    prompts = {
        "query": "task: search result | query: ",
        "document": "title: none | text: ",
        "STS": "task: sentence similarity | query: ",
    }
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    pooling = {**methods("mean_tokens"), "include_prompt": True}
    sentence = {"max_seq_length": 120, "do_lower_case": False}
    write_modules(folder, pooling, "Dense", "Dense", "Normalize", sentence=sentence, settings=settings)


def gritlm(folder: Path) -> Any:
    """Mistral's layers without a causal mask, and the mean of the tokens behind the instruction.

    Returns:
        Transformers' network, which has a causal mask.
    """
    network = write_network(folder, "MistralModel", "MistralForCausalLM", sliding_window=None)
    edit_json(folder / "config.json", {"architectures": ["GritLM"]})
    write_metaspace_bpe(
        folder, ["<unk>", "<s>", "</s>"], "<s> $A", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="</s>", model_max_length=2048,
    )  # fmt: skip
    settings = {"prompts": {"query": "<|user|>\nfind papers\n<|embed|>\n", "document": "<|embed|>\n"}}
    pooling = {**methods("mean_tokens"), "include_prompt": False}
    write_modules(folder, pooling, "Normalize", settings=settings)
    return network


PUBLISHED: dict[str, Callable[[Path], None]] = {
    "Qwen3-Embedding": qwen3_embedding,
    "E5-Mistral": e5_mistral,
    "GTE-Qwen2": gte_qwen2,
    "BGE base": bge_base,
    "BGE-M3": bge_m3,
    "Nomic": nomic,
    "Snowflake Arctic": snowflake_arctic,
    "EmbeddingGemma": embedding_gemma,
}
"""Kind of embedding model -> what writes its folder, which sentence-transformers loads without code of the folder."""
