"""What the config.json of an EAGLE or EAGLE-3 head says. Free of torch.

Published heads name their architecture in several ways (some are called LlamaForCausalLM), so that the kind comes from
whoever asks; everything else is read as Llama's. Heads in the format of the library `speculators` say their kind, and
have what is Llama's in an object of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields, read_json
from quire_models.config import ModelConfig
from quire_models.config_fields import stored_dtype
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.quantization_formats import parse_quantization, quantization_method
from quire_models.spec import HeadSpec, LinearSpec, NetworkSpec, NormSpec, Weight, inside
from quire_models.stored_linears import with_files

__all__ = [
    "EAGLE_KINDS",
    "EagleConfig",
    "EagleSpec",
    "default_feature_layers",
    "feature_layers",
    "of_speculators",
    "read_eagle_config",
]

EAGLE_KINDS = ("eagle", "eagle3")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OWN_OF_SPECULATORS = (
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "quantization_config", _LAYERS,
    "aux_hidden_state_layer_ids", "mask_token_id", "ptd_token_id", "block_size",
)  # fmt: skip
"""Fields of a head in the format of `speculators` that stand beside its layer's."""
_OTHER_DRAFTERS = {"DFlashDraftModel": "dflash", "MLPSpeculatorPreTrainedModel": "mlp_speculator"}
"""architectures -> kind of drafters that are no heads of EAGLE."""
_METHODS = ("eagle", "eagle3", "dflash", "mlp_speculator")
"""Kinds that are speculative methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec(NetworkSpec):
    """The network of a head: Llama's layers behind a projection."""

    hidden_norm: NormSpec | None = None
    """Of the states beside the embedding (EAGLE-3)."""
    norm_before_residual: bool = False
    """Whether the residual is the state behind that norm."""
    hidden_norm_in: str = "midlayer"
    """Name of the part that the norm belongs to; empty for the head itself (DFlash)."""
    built_by: ClassVar[str] = "quire_models.draft_heads.eagle:EagleHead"

    def weights(self) -> Iterator[Weight]:
        """Parameters by their full names, but the tables of embedding and head."""
        yield from NetworkSpec.weights(self)
        if self.hidden_norm is not None:
            yield from inside(self.hidden_norm_in, self.hidden_norm.weights())


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(ModelConfig):
    """A head. `vocab_size` is the target's."""

    kind: str
    """One of `EAGLE_KINDS`."""
    draft_vocab_size: int
    """Tokens that the head can propose."""
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None = None
    """Layers of the target whose input is read (EAGLE-3, DFlash); None where the checkpoint leaves it to the target's
    depth."""
    mask_token_id: int | None = None
    """Token that stands for those that are not known yet, where all drafts come from one pass (P-EAGLE, DFlash)."""
    block_size: int = 0
    """Tokens of a block, the last known one among them (DFlash); 0 for heads without blocks."""

    @property
    def num_features(self) -> int:
        """Features of a position, each as wide as the target's hidden states."""
        if self.kind == "eagle":
            return 1  # the hidden states
        return 3 if self.feature_layers is None else len(self.feature_layers)


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Those that EAGLE-3 heads read unless they say otherwise: the input of layers 2, L/2 and L - 3 (SafeAILab's
    reference implementation of Li et al. 2025)."""
    return (2, num_layers // 2, num_layers - 3)


def read_eagle_config(folder: str | Path, kind: str) -> EagleConfig:
    """Read the config.json of a head.

    Raises:
        CheckpointError: No such file, or a field that is missing or wrong.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is no folder of an EAGLE head")
    raw = of_speculators(read_json(path), kind, path)
    config = Fields({**raw, "architectures": ["LlamaForCausalLM"]}, str(path))
    sizes = decoder_sizes(config)
    head = EagleConfig(
        architecture="EagleHead",
        model_type="eagle",
        network=_network(config, sizes, kind),
        dtype=stored_dtype(config),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=config.token_ids("eos_token_id"),
        quantization=with_files(parse_quantization(config), path.parent),
        quantization_method=quantization_method(config),
        kind=kind,
        draft_vocab_size=config.integer("draft_vocab_size", default=sizes.vocab_size, minimum=1),
        target_hidden_size=config.integer("target_hidden_size", default=sizes.hidden_size, minimum=1),
        feature_layers=feature_layers(config, _LAYERS) if kind == "eagle3" else None,
        mask_token_id=_mask_token_id(config, raw) if kind == "eagle3" else None,
    )
    size, has_embedding = sizes.hidden_size, kind == "eagle"
    inputs = head.num_features * head.target_hidden_size + has_embedding * size
    project_in = LinearSpec(name="fc", in_features=inputs, out_features=size)
    embedding = replace(head.network.embedding, project_in=project_in)
    return replace(head, network=replace(head.network, embedding=embedding))


def _mask_token_id(config: Fields, raw: dict[str, Any]) -> int | None:
    """The token that a P-EAGLE head reads in the place of those that are only guessed; None for other heads."""
    name = "ptd_token_id" if "ptd_token_id" in raw else "mask_token_id"
    return config.integer(name, minimum=0) if raw.get(name) is not None else None


def of_speculators(raw: dict[str, Any], kind: str, source: Path) -> dict[str, Any]:
    """The fields as the original repositories have them. P-EAGLE is a kind of EAGLE-3.

    Raises:
        CheckpointError: a drafter of another kind.
    """
    names = raw.get("architectures")
    others = [_OTHER_DRAFTERS[name] for name in names if name in _OTHER_DRAFTERS] if isinstance(names, list) else []
    found = raw.get("speculators_model_type", others[0] if others else kind)
    if found != kind and not (found == "peagle" and kind == "eagle3"):
        method = "eagle3" if found == "peagle" else found
        choice = (
            f"choose speculative method {method}" if method in _METHODS else "drafters of that kind do not run here"
        )
        raise CheckpointError(
            f"{source} is the configuration of a drafter of the kind {found!r}, not {kind!r}: {choice}"
        )
    if "speculators_model_type" not in raw:
        return raw
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{source}: transformer_layer_config must be an object, is {layer!r}")
    if kind == "eagle" and raw.get("layernorms"):
        raise CheckpointError(f"{source}: EAGLE heads with norms of their own (layernorms) do not run here")
    return layer | {name: raw[name] for name in _OWN_OF_SPECULATORS if raw.get(name) is not None}


def _network(config: Fields, sizes: DecoderSizes, kind: str) -> NetworkSpec:
    """The first layer of EAGLE has no norm before its attention. In EAGLE-3's first one attention sees embedding and
    state side by side."""
    bias, mlp = (
        config.flag("attention_bias", default=False),
        sizes.gated_mlp(bias=config.flag("mlp_bias", default=False)),
    )
    is_eagle3 = kind == "eagle3"
    attention = sizes.attention(qkv_bias=bias)
    layers = [sizes.pre_norm(layer, attention, mlp, prefix="layers") for layer in sizes.layers]
    wide = sizes.attention(qkv_bias=bias, in_features=2 * sizes.hidden_size)
    layers[0] = (
        replace(layers[0], name="midlayer", mixers=(wide,)) if is_eagle3 else replace(layers[0], input_norm=None)
    )
    return sizes.network(
        layers,
        kind=EagleSpec,
        body="",
        final_norm="norm" if is_eagle3 else None,
        head=HeadSpec(tied=False),
        hidden_norm=sizes.rms_norm("hidden_norm") if is_eagle3 else None,
        norm_before_residual=config.flag("norm_before_residual", default=False),
    )


def feature_layers(config: Fields, name: str, within: str = "eagle_config") -> tuple[int, ...] | None:
    """A list of layers, from the field `name` or the field of that name in the object `within`; None for neither.

    Raises:
        CheckpointError: it is no list of layers.
    """
    nested = config.get(within)
    layers = config.get(name) or (nested.get(name) if isinstance(nested, dict) else None)
    if layers is None:
        return None
    if not isinstance(layers, list) or not layers or any(type(layer) is not int or layer < 0 for layer in layers):
        raise CheckpointError(f"{config.source}: {name} must be a list of layers, is {layers!r}")
    return tuple(layers)
