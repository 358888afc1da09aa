"""What a checkpoint is run for, and how its hidden states are pooled. Nothing here loads torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from quire.config import QuireConfig
from quire_interfaces import CheckpointError, ConfigError, PoolerConfig, PoolingTask, Tokenizer, read_json
from quire_models.config import ModelConfig
from quire_models.overrides import overridden
from quire_models.registry import architecture_entry
from quire_models.retrieval import COLBERT, RETRIEVERS
from quire_pooling import DenseSpec, PoolerSpec, PoolingHeadSpec, read_pooler
from quire_pooling.checkpoint import network_folder
from quire_pooling.colbert import colbert_metadata, with_colbert_texts
from quire_pooling.retrieval_texts import with_retrieval_texts
from quire_pooling.spec import TOKEN_TASKS

__all__ = [
    "PoolingChoice",
    "cached_pooling_tasks",
    "choose_pooling",
    "converted_overrides",
    "longest_embedded_text",
    "network_overrides",
    "pooling_tasks",
    "read_pooler_spec",
]

CLASSIFIER_FIELDS = ("classifier_from_token", "is_original_qwen3_reranker", "method")
"""vLLM's fields of config.json, which --hf-overrides may bring: which tokens of the LM head are the classes."""
POOLER_FIELDS = (*CLASSIFIER_FIELDS, "is_matryoshka", "matryoshka_dimensions", "colbert_dim")
"""Fields of config.json that poolers read and networks do not."""
CLASS_FIELDS = ("id2label", "num_labels", "problem_type")
"""Fields of config.json that say what classes there are."""
_ENDS = {"embed": "Model", "classify": "ForSequenceClassification", "reward": "ForRewardModel"}
"""`--convert` -> end of the name of the class that the network is loaded as."""
_GENERATORS = ("ForConditionalGeneration", "ForCausalLM", "ForVisionText2Text", "LMHeadModel")
"""Ends of names of classes with towers that generate."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingChoice:
    """What an engine is for."""

    runner: Literal["generate", "pooling"]
    pools: bool
    """It takes pooling requests, beside generation or alone."""
    reason: str
    """Why, for people."""


def choose_pooling(config: QuireConfig, folder: Path, model: ModelConfig) -> PoolingChoice:
    """What the settings and the checkpoint's files ask for.

    Args:
        config: Settings.
        folder: The model's.
        model: Its configuration, as its files have it.

    Raises:
        ConfigError: the settings ask for what the model cannot do.
    """
    asked, convert = config.model.runner, config.model.convert
    if not model.generates:
        if asked == "generate":
            kind = "is an encoder" if model.is_encoder else "has no LM head"
            raise ConfigError(
                f"{model.architecture} {kind}: it reads texts and generates none; leave runner=generate out",
                field="runner",
            )
        return PoolingChoice(runner="pooling", pools=True, reason=_why_pooling(config, folder, model))
    converts = convert in ("embed", "classify", "reward")
    if asked == "generate":
        reason = f"as asked, and --convert {convert}" if converts else "as asked"
        return PoolingChoice(runner="generate", pools=converts, reason=reason)
    if converts or asked == "pooling":
        if convert == "none":
            raise ConfigError(
                f"runner=pooling and convert=none: {model.architecture} generates, and only converted it pools; leave "
                "one of them out",
                field="convert",
            )
        return PoolingChoice(runner="pooling", pools=True, reason="as asked")
    has_classes = "classifier_from_token" in (config.model.hf_overrides or {})
    if convert == "auto" and (has_classes or (folder / "modules.json").is_file()):
        return PoolingChoice(runner="pooling", pools=True, reason=_why_pooling(config, folder, model))
    return PoolingChoice(runner="generate", pools=False, reason="the checkpoint's class")


def _why_pooling(config: QuireConfig, folder: Path, model: ModelConfig) -> str:
    if config.model.runner == "pooling" or config.model.convert != "auto":
        return "as asked"
    if (folder / "modules.json").is_file():
        return "a sentence-transformers folder (modules.json)"
    if model.generates:
        return "classifier_from_token names tokens of classes"
    return f"{model.architecture} is an encoder" if model.is_encoder else f"{model.architecture} has no LM head"


def converted_overrides(config: QuireConfig, folder: Path, model: ModelConfig) -> dict[str, Any] | None:
    """Fields of config.json by which a network that generates is loaded as the class that it is converted into; None
    where it stays as it is.

    Args:
        config: Settings.
        folder: The model's.
        model: Its configuration, as its files have it.

    Raises:
        ConfigError: as `choose_pooling`.
    """
    choice = choose_pooling(config, folder, model)
    overrides = _converted(config, folder, model) if choice.runner == "pooling" and model.generates else None
    if overrides is None and config.model.convert == "classify" and _waiting_fields(config):
        return network_overrides(config, folder, is_converted=True)  # not converted: it reads them, or refuses them
    return overrides


def _converted(config: QuireConfig, folder: Path, model: ModelConfig) -> dict[str, Any] | None:
    """`converted_overrides` of a network that generates, and is to pool."""
    end = _ENDS.get(config.model.convert, "Model")
    if classifier_tokens(config, folder):
        end = "Model"  # its classes are rows of the LM head, which the pooler reads
    if model.language_names is not None:  # with towers
        return _converted_towers(config, folder, model, end)
    if not model.is_native:
        return None
    for stem_end in ("ForCausalLM", "LMHeadModel"):
        name = model.architecture.removesuffix(stem_end) + end
        if model.architecture.endswith(stem_end) and architecture_entry(name).is_native:
            return {**network_overrides(config, folder, is_converted=True), "architectures": [name]}
    return None


def _converted_towers(config: QuireConfig, folder: Path, model: ModelConfig, end: str) -> dict[str, Any] | None:
    """As `converted_overrides`, of a network with towers: one that embeds stays as it is, and its LM head unused."""
    if end == "Model":
        return None
    if end != _ENDS["classify"] or not model.is_native:
        kind = "has towers" if model.is_native else "runs through Transformers"
        raise ConfigError(
            f"{model.architecture} {kind} and cannot be converted so; with convert=classify and the tokens of its "
            "answers as classifier_from_token (hf_overrides) it gives classes, with convert=embed embeddings",
            field="convert",
        )
    stem = next((each for each in _GENERATORS if model.architecture.endswith(each)), "")
    overrides = network_overrides(config, folder, is_converted=True)
    return {**overrides, "architectures": [model.architecture.removesuffix(stem) + end]}


def classifier_tokens(config: QuireConfig, folder: Path) -> tuple[str, ...]:
    """Texts of the tokens whose logits are the classes of a generative reranker; none where nothing names them."""
    tokens = _json_fields(config, folder).get("classifier_from_token") or ()
    if isinstance(tokens, str) or not all(isinstance(each, str) for each in tokens):
        raise ConfigError(f"classifier_from_token must be a list of texts, is {tokens!r}", field="hf_overrides")
    return tuple(tokens)


def _classifier_method(config: QuireConfig, folder: Path, num_tokens: int) -> str:
    """What the logits of the tokens become: "from_2_way_softmax", the probability of the second one against the first,
    as it is of two tokens unless config.json says other; or "no_post_processing", a class each."""
    method = _json_fields(config, folder).get("method")
    if method is None:
        return "from_2_way_softmax" if num_tokens == 2 else "no_post_processing"
    if method not in ("from_2_way_softmax", "no_post_processing"):
        raise ConfigError(
            f"method must be from_2_way_softmax or no_post_processing, is {method!r}", field="hf_overrides"
        )
    if method == "from_2_way_softmax" and num_tokens != 2:
        raise ConfigError(
            f"method from_2_way_softmax takes two tokens, and classifier_from_token names {num_tokens}",
            field="hf_overrides",
        )
    return str(method)


def _waiting_fields(config: QuireConfig) -> dict[str, Any]:
    """Overrides that say what the classes of a converted network are: the network that generates does not read them."""
    overrides = config.model.hf_overrides or {}
    if config.model.convert != "classify" or "architectures" in overrides:
        return {}
    fields = {name: overrides[name] for name in CLASS_FIELDS if name in overrides}
    if fields.get("num_labels") is not None and "id2label" not in fields:
        fields["id2label"] = None  # that of config.json names others
    return fields


def network_overrides(config: QuireConfig, folder: Path, *, is_converted: bool = False) -> dict[str, Any]:
    """Overrides of config.json that the network reads.

    vLLM's users name a class with a classifier (...ForSequenceClassification) for generative rerankers, whose classes
    are rows of the LM head: the body alone is loaded then.

    Args:
        is_converted: With those of the classes of a network that `convert` makes.
    """
    overrides = {name: value for name, value in (config.model.hf_overrides or {}).items() if name not in POOLER_FIELDS}
    if config.model.convert == "classify" and (waiting := _waiting_fields(config)):
        overrides = {name: value for name, value in overrides.items() if name not in waiting}
        overrides |= waiting if is_converted else {}
    is_plain = "architectures" not in overrides and not (network_folder(folder) / "artifact.metadata").is_file()
    return overrides if is_plain else _class_overrides(config, network_folder(folder), overrides)


def _class_overrides(config: QuireConfig, folder: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides where they name a class, or where ColBERT's own code has written the checkpoint."""
    own = read_json(path) if (path := folder / "config.json").is_file() else {}
    classes, names = own.get("architectures") or (), overrides.get("architectures")
    if names is None and COLBERT in classes:
        return {"dim": colbert_metadata(folder).integer("dim", default=128), **overrides}
    if not isinstance(names, list) or not classifier_tokens(config, folder):
        return overrides
    if any(str(name).endswith("ForConditionalGeneration") for name in classes):
        return {name: value for name, value in overrides.items() if name != "architectures"}
    end = _ENDS["classify"]
    names = [name.removesuffix(end) + "Model" if str(name).endswith(end) else name for name in names]
    return {**overrides, "architectures": names}


def read_pooler_spec(
    config: QuireConfig, folder: Path, model: ModelConfig, tokenizer: Tokenizer | None = None
) -> PoolerSpec:
    """The pooler that the checkpoint's files describe, with what `pooler_config` replaces.

    Args:
        config: Settings.
        folder: The model's.
        model: Its configuration.
        tokenizer: Says the ids of the tokens that a generative reranker answers with; needed by these alone.

    Raises:
        CheckpointError: the files cannot be understood.
        ConfigError: a wrong field of `pooler_config`, or tokens that are none.
    """
    network = model.network
    lm_head = network.embedding_name if network.head.tied else f"{network.head.name}.weight"
    spec = read_pooler(
        folder,
        _json_fields(config, folder),
        hidden_size=model.hidden_size,
        is_encoder=model.is_encoder,
        network=network.pooler,
        lm_head=lm_head,
    )
    if COLBERT in (_json_fields(config, folder).get("architectures") or ()):
        spec = with_colbert_texts(spec, network_folder(folder))
    if model.architecture in RETRIEVERS:
        spec = with_retrieval_texts(spec, network_folder(folder), _json_fields(config, folder))
    if tokens := classifier_tokens(config, folder):
        is_pair = _classifier_method(config, folder, len(tokens)) == "from_2_way_softmax"
        spec = _with_token_classes(spec, tokens, tokenizer, lm_head, is_pair=is_pair)
    return spec.with_config(PoolerConfig.from_dict(config.model.pooler_config or {}))


def longest_embedded_text(config: QuireConfig) -> int:
    """Most tokens of a text that is embedded in chunks (`enable_chunked_processing` of `pooler_config`); 0 where none
    is. Raises ConfigError for a wrong field."""
    if not config.model.pooler_config:
        return 0
    pooler = PoolerConfig.from_dict(config.model.pooler_config)
    return (pooler.max_embed_len or 0) if pooler.enable_chunked_processing else 0


def pooling_tasks(spec: PoolerSpec) -> tuple[PoolingTask, ...]:
    """Tasks of a pooler, its default first."""
    return (spec.default_task, *sorted(spec.tasks - {spec.default_task}))


def cached_pooling_tasks(spec: PoolerSpec) -> tuple[PoolingTask, ...]:
    """Tasks that pool the last token alone, so that prompts whose keys and values are cached need not be read again."""
    if spec.methods != ("LAST",) or spec.token_head.steps:
        return ()
    return tuple(task for task in pooling_tasks(spec) if task not in TOKEN_TASKS)


def _json_fields(config: QuireConfig, folder: Path) -> dict[str, Any]:
    """config.json with its overrides."""
    path = network_folder(folder) / "config.json"
    return overridden(read_json(path) if path.is_file() else {}, config.model.hf_overrides or {})


def _with_token_classes(
    spec: PoolerSpec, tokens: tuple[str, ...], tokenizer: Tokenizer | None, lm_head: str, *, is_pair: bool
) -> PoolerSpec:
    """A pooler whose classes are rows of the LM head.

    Args:
        is_pair: Two tokens are one class, the probability of the second one against the first (Zhang et al., "Qwen3
            Embedding", arXiv 2506.05176, section 2).
    """
    if tokenizer is None:
        raise CheckpointError("classifier_from_token names texts of tokens, and this model has no tokenizer")
    token_ids = []
    for token in tokens:
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"classifier_from_token names {token!r}, which is {len(ids)} tokens; it must be one",
                field="hf_overrides",
            )
        token_ids += ids
    rows, minus_rows = (token_ids[1:], token_ids[:1]) if is_pair else (token_ids, [])
    dense = DenseSpec(
        weight=lm_head,
        in_features=spec.hidden_size,
        out_features=len(rows),
        rows=tuple(rows),
        minus_rows=tuple(minus_rows),
    )
    return dataclasses.replace(
        spec,
        methods=("LAST",),
        head=PoolingHeadSpec(steps=(dense,)),
        activation="sigmoid" if len(rows) == 1 else "softmax",
        normalize=False,
        tasks=frozenset({"classify", "score"} if len(rows) == 1 else {"classify"}),
        labels=tokens[1:] if is_pair else tokens,
    )
