"""What drafts for a model: found, checked against it, and counted before anything is loaded. Free of torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.block_weights import kept_blocks
from quire.config import QuireConfig
from quire_interfaces import CheckpointError, ConfigError, FullAttentionSpec, KVCacheSpec, LatentAttentionSpec
from quire_models.config import ModelConfig
from quire_models.draft_heads.eagle_config import EagleConfig, default_feature_layers, read_eagle_config
from quire_models.draft_heads.medusa_config import MedusaConfig, read_medusa_config
from quire_models.draft_heads.mtp_config import mtp_config
from quire_models.hub import resolve_model
from quire_models.ledger import weight_ledger
from quire_models.named_formats import resolved_linear_method
from quire_renderers import load_tokenizer
from quire_spec_decode import LAST_STATE_METHODS, SpecDecodeConfig

if TYPE_CHECKING:
    from quire_models.draft_heads.mlp_speculator_config import MLPSpeculatorConfig

__all__ = ["DraftPlan", "plan_draft"]

_OF_TARGET = ("embedding", "LM head")
"""Parts that a layer of the target's checkpoint takes from the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A network that drafts."""

    folder: Path
    config: ModelConfig
    dtype: str
    linear_method: str
    weight_bytes: int
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose input it reads."""
    feature_width: int = 0
    """Elements that it reads of the target's hidden states of each token."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether it has a KV cache beside the target's."""
        return self.config.num_layers > 0

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it keeps for the tokens of one block.

        Raises:
            ConfigError: its layers keep something else than keys and values.
        """
        specs = self.config.kv_cache_specs(block_size, self.dtype).values()
        if not all(isinstance(spec, FullAttentionSpec | LatentAttentionSpec) for spec in specs):
            raise ConfigError(
                f"the draft model {str(self.folder)!r} keeps recurrent states, and would have to go back to earlier "
                "ones after each guess; choose one whose every layer attends",
                field="speculative_model",
            )
        return sum(spec.block_bytes for spec in specs)


def plan_draft(config: QuireConfig, target: ModelConfig, target_folder: Path | None, dtype: str) -> DraftPlan:
    """The network that drafts, where the method is one of `NETWORK_METHODS`.

    Args:
        config: Settings.
        target: The model it drafts for.
        target_folder: Its folder, for the comparison of the vocabularies; None compares their sizes only. Method mtp
            drafts with what is in it.
        dtype: What the target runs in; the drafter runs in the same.

    Raises:
        CheckpointError: there is no such drafter, or it is not understood.
        ConfigError: it does not belong to the model.
    """
    settings = config.speculative
    if settings.method == "mtp":
        layer = mtp_config(target)
        method = resolved_linear_method(settings.quantization, layer, field="speculative_quantization")
        own = {
            part: size
            for part, size in weight_ledger(layer, dtype, method, in_blocks=kept_blocks(config)).items()
            if part not in _OF_TARGET
        }
        folder = target_folder or Path()
        return DraftPlan(
            folder=folder,
            config=layer,
            dtype=dtype,
            linear_method=method,
            weight_bytes=sum(own.values()),
            feature_width=target.hidden_size,
        )
    folder = _folder(config)
    if settings.method in LAST_STATE_METHODS:
        heads = _last_state_heads(settings, folder, target)
        return DraftPlan(
            folder=folder,
            config=heads,
            dtype=dtype,
            linear_method="plain",
            weight_bytes=heads.weight_bytes(dtype),
            feature_width=target.hidden_size,
        )
    if settings.method == "draft_model":
        draft = ModelConfig.from_path(folder, trust_remote_code=config.model.trust_remote_code)
        _check_vocabulary(draft, folder, target, target_folder, trust_remote_code=config.model.trust_remote_code)
        layers, num_features = tuple[int, ...](), 0
    else:
        draft = _head(settings, folder)
        _check_head(draft, folder, target)
        layers = draft.feature_layers or default_feature_layers(target.num_layers)
        layers = () if settings.method == "eagle" else layers
        num_features = len(layers) or 1
    method = resolved_linear_method(settings.quantization, draft, field="speculative_quantization")
    return DraftPlan(
        folder=folder,
        config=draft,
        dtype=dtype,
        linear_method=method,
        weight_bytes=sum(weight_ledger(draft, dtype, method, in_blocks=kept_blocks(config)).values()),
        feature_layers=layers,
        feature_width=num_features * target.hidden_size,
    )


def _folder(config: QuireConfig) -> Path:
    settings = config.speculative
    if settings.model is not None:
        return resolve_model(
            settings.model,
            settings.revision,
            modelscope=config.model.use_modelscope,
            pickled=config.model.load_format == "pt",
            with_code=config.model.trust_remote_code,
        )
    if config.model.model is None:
        from quire_demo_model import draft_paths

        if settings.method in draft_paths():
            return draft_paths()[settings.method]
    raise ConfigError(
        f"speculative method {settings.method} needs the model that drafts: give --speculative-model, or model in "
        "--speculative-config",
        field="speculative_model",
    )


def require_place(specs: dict[str, KVCacheSpec]) -> None:
    """A network that drafts keeps its keys and values beside those of a layer that attends to all tokens.

    Raises:
        ConfigError: the model has no such layer.
    """
    if not any(type(spec) in (FullAttentionSpec, LatentAttentionSpec) for spec in specs.values()):
        raise ConfigError(
            "no layer of this model keeps keys and values of all tokens, so that a drafting network has no place for "
            "its own; use speculative method ngram or suffix, or medusa or mlp_speculator with heads for this model",
            field="speculative_method",
        )


def _check_vocabulary(
    draft: ModelConfig, folder: Path, target: ModelConfig, target_folder: Path | None, *, trust_remote_code: bool
) -> None:
    """Tokenizers are compared, and not the embeddings' sizes, which are padded as each model likes."""
    theirs = _tokens(folder, trust_remote_code)
    ours = None if target_folder is None else _tokens(target_folder, trust_remote_code)
    if theirs is None or ours is None:  # a drafter may come without a tokenizer
        if draft.vocab_size < target.vocab_size:
            raise ConfigError(
                f"the draft model {str(folder)!r} has {draft.vocab_size} tokens, the model {target.vocab_size}, and "
                "there are no two tokenizers to compare: a draft model needs the same vocabulary; put its tokenizer "
                "into its folder",
                field="speculative_model",
            )
        return
    for token, token_id in ours.items():
        if theirs.get(token) != token_id:
            raise ConfigError(
                f"the draft model {str(folder)!r} has another vocabulary: token {token!r} is {token_id} for the model "
                f"and {theirs.get(token)} for the draft model",
                field="speculative_model",
            )


def _tokens(folder: Path, trust_remote_code: bool) -> dict[str, int] | None:
    """Token -> id of a folder's tokenizer; None where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _tokens_of_other_files(folder, trust_remote_code)
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
        vocab = stored["model"]["vocab"]
        table = dict(vocab) if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        table |= {token["content"]: token["id"] for token in stored.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError):
        return None
    return table


def _tokens_of_other_files(folder: Path, trust_remote_code: bool) -> dict[str, int] | None:
    """Text -> id of each token of a tokenizer that is kept in another format."""
    try:
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    except CheckpointError:
        return None
    names = ((tokenizer.id_to_token(token_id), token_id) for token_id in range(tokenizer.vocab_size))
    return {name: token_id for name, token_id in names if name}


def _last_state_heads(
    settings: SpecDecodeConfig, folder: Path, target: ModelConfig
) -> MedusaConfig | MLPSpeculatorConfig:
    """Heads that read the last hidden state alone, if they are for the target and for as many tokens."""
    heads: MedusaConfig | MLPSpeculatorConfig
    if settings.method == "medusa":
        heads = read_medusa_config(folder, target)
        count, name = heads.medusa_heads, "Medusa heads"
    else:
        from quire_models.draft_heads.mlp_speculator_config import read_mlp_speculator_config

        heads = read_mlp_speculator_config(folder, target)
        count, name = heads.num_heads_ahead, "heads of an MLP speculator"
    if settings.num_speculative_tokens > count:
        raise ConfigError(
            f"{str(folder)!r} has {count} {name}, each for one token ahead; lower "
            f"num_speculative_tokens ({settings.num_speculative_tokens}) to {count} or less",
            field="num_speculative_tokens",
        )
    if settings.quantization is not None:
        raise ConfigError(
            f"{name} are held as they are; leave speculative_quantization out", field="speculative_quantization"
        )
    return heads


def _head(settings: SpecDecodeConfig, folder: Path) -> EagleConfig:
    """A head that reads the target's hidden states of every token, if it drafts as many tokens as is asked."""
    if settings.method == "dflash":
        from quire_models.draft_heads.dflash_config import read_dflash_config

        head = read_dflash_config(folder)
        if settings.num_speculative_tokens >= head.block_size:
            raise ConfigError(
                f"{str(folder)!r} fills blocks of {head.block_size} tokens, the last known one among them; lower "
                f"num_speculative_tokens ({settings.num_speculative_tokens}) to {head.block_size - 1} or less",
                field="num_speculative_tokens",
            )
        return head
    head = read_eagle_config(folder, settings.method)
    if not settings.parallel_drafting:
        return replace(head, mask_token_id=None)
    if head.mask_token_id is not None and settings.eagle_topk > 1:
        raise ConfigError(
            f"{str(folder)!r} says all tokens of a draft in one pass, which gives no trees; leave eagle_topk "
            f"({settings.eagle_topk}) at 1, or turn parallel_drafting off",
            field="eagle_topk",
        )
    return head


def _check_head(head: EagleConfig, folder: Path, target: ModelConfig) -> None:
    if (head.target_hidden_size, head.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ConfigError(
            f"the head {str(folder)!r} is for a model of hidden size {head.target_hidden_size} and {head.vocab_size} "
            f"tokens, this one has {target.hidden_size} and {target.vocab_size}",
            field="speculative_model",
        )
    if head.kind == "eagle":
        return
    if not target.network.has_one_stream:
        raise ConfigError(
            f"the head {str(folder)!r} reads the stream between layers, and {target.architecture} has several; draft "
            "with ngram, suffix, a draft model, or a head that reads the last hidden states",
            field="speculative_method",
        )
    layers = head.feature_layers or default_feature_layers(target.num_layers)
    if head.feature_layers is None and not layers[0] < layers[1] < layers[2]:
        raise CheckpointError(
            f"the head {str(folder)!r} names no layers that it reads, and those of EAGLE-3 by default (2, half of all, "
            f"the third from the end) need a model of 7 layers or more, this one has {target.num_layers}; write "
            "eagle_aux_hidden_state_layer_ids into the head's config.json"
        )
    if any(not 0 <= layer <= target.num_layers for layer in layers):
        raise CheckpointError(
            f"the head {str(folder)!r} reads layers {', '.join(map(str, layers))} of a model that has "
            f"{target.num_layers}; it was trained for another model"
        )
    if head.mask_token_id is not None and head.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"the mask token of {str(folder)!r} is {head.mask_token_id}, the model has {target.vocab_size} tokens; it "
            "was trained for another model"
        )
    if head.kind == "dflash" and target.num_layers in layers:
        raise CheckpointError(
            f"the drafter {str(folder)!r} reads what comes out of the last layer, and its configuration does not say "
            "whether behind the final norm; such drafters do not run here"
        )
