"""The pooler of a checkpoint, from the files of sentence-transformers, pylate, ColBERT and BGE-M3 beside its network.
Free of torch; tensors are read by `quire_pooling.weights`.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, Fields, PoolingTask, read_json
from quire_pooling.modules import (
    Module,
    ModuleChain,
    activation_of,
    read_chain,
    read_modules,
    without_last_normalize,
)
from quire_pooling.spec import (
    Activation,
    ActivationSpec,
    DenseSpec,
    DualEncoderSpec,
    LateInteractionSpec,
    PoolerSpec,
    PoolingHeadSpec,
    TokenTaskSpec,
)

__all__ = ["BGE_M3_FILES", "network_folder", "read_pooler", "special_token"]

SENTENCE_FILES = ("sentence_bert_config.json", *(
    f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
))  # fmt: skip
"""Names of the file with the length of texts, the first one of today's checkpoints."""
BGE_M3_FILES = {"token_classify": "sparse_linear.pt", "token_embed": "colbert_linear.pt"}
"""Task per token of BGE-M3 (arXiv 2402.03216) -> file of its head, which has tensors `weight` and `bias`."""
_SIMILARITIES = {
    "MaxSim": "maxsim",
    "cosine": "cosine",
    "dot": "dot",
    "dot_score": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}


def network_folder(folder: Path) -> Path:
    """Where config.json and the weights of the network are: `folder`, or the one below it that modules.json names.

    Raises:
        CheckpointError: modules.json is not understood.
    """
    modules = read_modules(folder)
    return folder / modules[0].path if modules else folder


def read_pooler(
    folder: Path,
    config: Mapping[str, Any],
    *,
    hidden_size: int,
    is_encoder: bool,
    network: PoolerSpec | None = None,
    lm_head: str | None = None,
) -> PoolerSpec:
    """The pooler of a checkpoint.

    Args:
        folder: The checkpoint's.
        config: Its config.json, with what overrides it.
        hidden_size: Width of the network's hidden states.
        is_encoder: Its tokens attend in both directions.
        network: What its class has in place of an LM head, from config.json alone; None for nothing.
        lm_head: Name of the tensor [vocab, hidden_size] of its LM head, or of the table of tokens where both are one.

    Returns:
        What modules.json says, or else `network`, or else one vector per text by the mean of an encoder's tokens, or
        by the last token of a decoder, which `notes` tell.

    Raises:
        CheckpointError: A file is not understood, or something is not supported; the message names it.
    """
    fields = Fields(config, "config.json")
    modules = read_modules(folder)
    path = folder / "config_sentence_transformers.json"
    settings = Fields(read_json(path) if path.exists() else {}, str(path))
    if modules:
        chain = read_chain(folder, modules, _first_width(modules, network, hidden_size), lm_head)
        pooler = _of_modules(chain, modules, settings, network, hidden_size)
    elif network is not None:
        pooler = network
    else:
        pooler = _of_body(hidden_size, is_encoder)
    pooler = _with_matryoshka(_with_bge_m3(pooler, folder, fields), fields)
    pooler = dataclasses.replace(
        pooler,
        notes=(*pooler.notes, *_task_notes(fields)),
        embedding_tasks=fields.texts("lora_adaptations"),
        merged_task=fields.text("default_task", default=None),
    )
    return _with_texts(pooler, folder / (modules[0].path if modules else ""), settings)


def _first_width(modules: list[Module], network: PoolerSpec | None, hidden_size: int) -> int:
    """Width of what the first module gives: SPLADE's gives logits."""
    is_splade = any(module.kind == "SpladePooling" for module in modules)
    return hidden_size if network is None or not is_splade else network.token_head.out_features(hidden_size)


def _of_body(hidden_size: int, is_encoder: bool) -> PoolerSpec:
    method = "the mean of all tokens" if is_encoder else "the last token"
    return PoolerSpec(
        hidden_size=hidden_size,
        methods=("MEAN",) if is_encoder else ("LAST",),
        notes=(
            f"the checkpoint does not say how it is pooled: {method} is taken, normalized; pooler_config says other",
        ),
    )


def _of_modules(
    chain: ModuleChain, modules: list[Module], settings: Fields, network: PoolerSpec | None, hidden_size: int
) -> PoolerSpec:
    kinds = {module.kind for module in modules[1:]}
    head, is_normal = without_last_normalize(chain.head())
    if "SpladePooling" in kinds:
        return _splade(chain, network)
    if not chain.methods:
        if not chain.token_steps and settings.text("model_type", default=None) not in ("ColBERT", "MultiVectorEncoder"):
            return _of_network(settings, network, hidden_size)
        is_of_pylate = any(module.class_name.startswith("pylate.") for module in modules)
        late = _late_interaction(settings, chain, is_of_pylate=is_of_pylate)
        return PoolerSpec(
            hidden_size=hidden_size,
            head=head,
            normalize=is_normal or is_of_pylate,
            tasks=frozenset({"token_embed"}),
            similarity="maxsim",
            late_interaction=late,
        )
    pooler = PoolerSpec(
        hidden_size=hidden_size,
        methods=chain.methods,
        head=head,
        normalize=is_normal,
        include_prompt=chain.include_prompt,
    )
    if not chain.gives_scores:
        return pooler
    tasks: frozenset[PoolingTask] = frozenset({"classify", "score"} if chain.width == 1 else {"classify"})
    return dataclasses.replace(
        pooler,
        tasks=tasks,
        activation=_class_activation(settings, "sigmoid" if chain.width == 1 else "identity"),
        labels=tuple(f"LABEL_{number}" for number in range(chain.width)),
    )


def _of_network(settings: Fields, network: PoolerSpec | None, hidden_size: int) -> PoolerSpec:
    """A cross-encoder's: the network's own head, with the activation that sentence-transformers wrote down."""
    if network is None:
        raise CheckpointError(
            f"{settings.source}: modules.json lists the network alone, which has no head: nothing says how to pool; "
            "give a pooling_type in pooler_config"
        )
    return dataclasses.replace(network, activation=_class_activation(settings, network.activation))


def _class_activation(settings: Fields, default: Activation) -> Activation:
    name = settings.text("activation_fn", default=None)
    return default if name is None else activation_of(name, settings.source)


def _splade(chain: ModuleChain, network: PoolerSpec | None) -> PoolerSpec:
    """SPLADE's: the head of the masked language model per token, then the function and the method of the module."""
    if network is None or not network.token_head.steps:
        raise CheckpointError(
            f"{chain.folder / 'modules.json'}: SpladePooling needs the head of a masked language model, and "
            "config.json's architectures name no class with one (...ForMaskedLM)"
        )
    steps = network.token_head.steps
    last = steps[-1]
    if isinstance(last, DenseSpec):
        steps = (*steps[:-1], dataclasses.replace(last, activation="identity"))
    elif isinstance(last, ActivationSpec):
        steps = steps[:-1]
    return dataclasses.replace(
        network,
        methods=chain.methods,
        token_head=PoolingHeadSpec(steps=(*steps, *chain.token_steps)),
        head=PoolingHeadSpec(steps=tuple(chain.steps)),
    )


def _late_interaction(settings: Fields, chain: ModuleChain, *, is_of_pylate: bool) -> LateInteractionSpec:
    """pylate's settings with its defaults; of the library's own multi-vector models, what modules say."""
    if not is_of_pylate:
        return LateInteractionSpec(skiplist_words=chain.skiplist_words)
    words = settings.texts("skiplist_words") if settings.get("skiplist_words") is not None else string.punctuation
    expands = settings.flag("do_query_expansion", default=True)
    expansion_token = special_token(chain.folder / "tokenizer_config.json", "mask_token", "eos_token")
    return LateInteractionSpec(
        expansion_token=expansion_token,
        query_prefix=settings.text("query_prefix", default="[Q] "),
        document_prefix=settings.text("document_prefix", default="[D] "),
        query_length=settings.integer("query_length", default=32, minimum=1),
        document_length=settings.integer("document_length", default=180, minimum=1),
        do_query_expansion=expands,
        attend_to_expansion_tokens=expands and settings.flag("attend_to_expansion_tokens", default=False),
        skiplist_words=tuple(words),
    )


def special_token(file: Path, *names: str) -> str:
    """The first of the special tokens that a tokenizer_config.json has; empty where it has none."""
    settings = read_json(file) if file.exists() else {}
    for name in names:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    return ""


def _with_bge_m3(pooler: PoolerSpec, folder: Path, config: Fields) -> PoolerSpec:
    """Heads per token of BGE-M3, where the checkpoint has both files: a weight of each token but the special ones at
    both ends, and a vector of each but the first one."""
    if not all((folder / name).exists() for name in BGE_M3_FILES.values()):
        return pooler

    def linear(task: str, out_features: int, activation: Activation) -> PoolingHeadSpec:
        file = BGE_M3_FILES[task]
        return PoolingHeadSpec(steps=(
            DenseSpec(
                weight=f"{file}/weight",
                bias=f"{file}/bias",
                in_features=pooler.hidden_size,
                out_features=out_features,
                activation=activation,
            ),
        ))  # fmt: skip

    first, last = frozenset(config.token_ids("bos_token_id")), frozenset(config.token_ids("eos_token_id"))
    width = config.integer("colbert_dim", default=-1)
    sparse = TokenTaskSpec(head=linear("token_classify", 1, "relu"), skip_token_ids=first | last)
    vectors = TokenTaskSpec(
        head=linear("token_embed", width if width > 0 else pooler.hidden_size, "identity"),
        normalize=True,
        skip_token_ids=first,
    )
    return dataclasses.replace(
        pooler,
        tasks=pooler.tasks | {"token_embed", "token_classify"},
        token_tasks={"token_classify": sparse, "token_embed": vectors},
    )


def _task_notes(config: Fields) -> list[str]:
    """Which of the tasks that a checkpoint has adapters of (Jina Embeddings v3) texts are embedded for."""
    tasks = config.texts("lora_adaptations")
    if not tasks:
        return []
    task = config.text("default_task", default=None)
    if task is not None:
        return [f"all texts are embedded for the task {task}; the checkpoint has {', '.join(tasks)}"]
    return [
        f"requests choose a task ({', '.join(tasks)}), without which texts are embedded by the weights alone; "
        "hf_overrides default_task makes one part of the weights, which is faster"
    ]


def _with_matryoshka(pooler: PoolerSpec, config: Fields) -> PoolerSpec:
    """The dimensions that config.json says embeddings may be cut to, in vLLM's fields."""
    dimensions = config.get("matryoshka_dimensions")
    if dimensions is None:
        return dataclasses.replace(pooler, dimensions=()) if config.flag("is_matryoshka", default=False) else pooler
    if not isinstance(dimensions, list) or not all(isinstance(each, int) and each > 0 for each in dimensions):
        raise CheckpointError(f"{config.source}: matryoshka_dimensions must be numbers above 0, is {dimensions!r}")
    return dataclasses.replace(pooler, dimensions=tuple(dimensions))


def _with_texts(pooler: PoolerSpec, folder: Path, settings: Fields) -> PoolerSpec:
    """How texts are put to the network: prompts, length, case; and how embeddings are compared."""
    file = next((folder / name for name in SENTENCE_FILES if (folder / name).exists()), None)
    sentence = Fields({} if file is None else read_json(file), str(file))
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{settings.source}: prompts must be texts by their names, is {prompts!r}")
    default = settings.text("default_prompt_name", default=None)
    if default is not None and default not in prompts:
        raise CheckpointError(f"{settings.source}: default_prompt_name {default!r} is none of {', '.join(prompts)}")
    similarity = settings.text("similarity_fn_name", default=None)
    length = sentence.integer("max_seq_length", default=None, minimum=1)
    return dataclasses.replace(
        pooler,
        prompts=prompts,
        default_prompt_name=default,
        similarity=pooler.similarity if similarity is None else _SIMILARITIES.get(similarity, similarity),
        max_seq_length=_tokenizer_length(folder) if length is None else length,
        do_lower_case=sentence.flag("do_lower_case", default=False),
        dual_encoder=_with_padding(pooler.dual_encoder, folder / "tokenizer_config.json"),
    )


def _with_padding(dual: DualEncoderSpec | None, file: Path) -> DualEncoderSpec | None:
    """The texts of a model that reads images apart, with the token that its tokenizer fills them up with."""
    if dual is None or dual.text_length is None:
        return dual
    if not (token := special_token(file, "pad_token")):
        raise CheckpointError(f"{file}: pad_token is missing, with which the texts of this model are filled up")
    return dataclasses.replace(dual, padding_token=token)


def _tokenizer_length(folder: Path) -> int | None:
    """Tokens of a text that the tokenizer passes on, where newer checkpoints have the length; None for no bound, for
    which Transformers writes a number with 30 digits."""
    file = folder / "tokenizer_config.json"
    length = read_json(file).get("model_max_length") if file.exists() else None
    is_bound = isinstance(length, int) and not isinstance(length, bool) and 0 < length <= _LONGEST_TEXT
    return length if is_bound else None


_LONGEST_TEXT = 1 << 24
"""More tokens than any network reads."""
