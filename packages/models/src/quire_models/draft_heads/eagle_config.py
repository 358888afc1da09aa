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

__all__ = ["EAGLE_KINDS", "EagleConfig", "EagleSpec", "default_feature_layers", "read_eagle_config"]

EAGLE_KINDS = ("eagle", "eagle3")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OWN_OF_SPECULATORS = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "quantization_config", _LAYERS)
"""Fields of a head in the format of `speculators` that stand beside its layer's."""
_OTHER_DRAFTERS = {"DFlashDraftModel": "dflash", "MLPSpeculatorPreTrainedModel": "mlp_speculator"}
"""architectures -> kind of drafters that are no heads of EAGLE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec(NetworkSpec):
    """The network of a head: Llama's layers behind a projection."""

    hidden_norm: NormSpec | None = None
    """Of the states beside the embedding (EAGLE-3)."""
    norm_before_residual: bool = False
    """Whether the residual is the state behind that norm."""
    built_by: ClassVar[str] = "quire_models.draft_heads.eagle:EagleHead"

    def weights(self) -> Iterator[Weight]:
        """Parameters by their full names, but the tables of embedding and head."""
        yield from NetworkSpec.weights(self)
        if self.hidden_norm is not None:
            yield from inside(self.layers[0].name, self.hidden_norm.weights())


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(ModelConfig):
    """A head. `vocab_size` is the target's."""

    kind: str
    """One of `EAGLE_KINDS`."""
    draft_vocab_size: int
    """Tokens that the head can propose."""
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None = None
    """Layers of the target whose input is read (EAGLE-3); None where the checkpoint leaves it to the target's depth."""

    @property
    def num_features(self) -> int:
        """Features of a position, each as wide as the target's hidden states."""
        if self.kind == "eagle":
            return 1
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
    raw = _of_speculators(read_json(path), kind, path)
    config = Fields({**raw, "architectures": ["LlamaForCausalLM"]}, str(path))
    sizes = decoder_sizes(config)
    if kind == "eagle3" and sizes.num_layers != 1:
        raise CheckpointError(f"{path}: an EAGLE-3 head has one layer, num_hidden_layers is {sizes.num_layers}")
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
        feature_layers=_feature_layers(config) if kind == "eagle3" else None,
    )
    size, has_embedding = sizes.hidden_size, kind == "eagle"
    inputs = head.num_features * head.target_hidden_size + has_embedding * size
    project_in = LinearSpec(name="fc", in_features=inputs, out_features=size)
    embedding = replace(head.network.embedding, project_in=project_in)
    return replace(head, network=replace(head.network, embedding=embedding))


def _of_speculators(raw: dict[str, Any], kind: str, source: Path) -> dict[str, Any]:
    """The fields as the original repositories have them.

    Raises:
        CheckpointError: a drafter of another kind.
    """
    names = raw.get("architectures")
    others = [_OTHER_DRAFTERS[name] for name in names if name in _OTHER_DRAFTERS] if isinstance(names, list) else []
    found = raw.get("speculators_model_type", others[0] if others else kind)
    if found != kind:
        choice = (
            f"choose speculative method {found}" if found in EAGLE_KINDS else "drafters of that kind do not run here"
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
    """The first layer of EAGLE has no norm before its attention. EAGLE-3's attention sees embedding and state side by
    side."""
    bias, mlp = (
        config.flag("attention_bias", default=False),
        sizes.gated_mlp(bias=config.flag("mlp_bias", default=False)),
    )
    is_eagle3 = kind == "eagle3"
    attention = sizes.attention(qkv_bias=bias, in_features=2 * sizes.hidden_size if is_eagle3 else 0)
    layers = [sizes.pre_norm(layer, attention, mlp, prefix="layers") for layer in sizes.layers]
    layers[0] = replace(layers[0], name="midlayer") if is_eagle3 else replace(layers[0], input_norm=None)
    return sizes.network(
        layers,
        kind=EagleSpec,
        body="",
        final_norm="norm" if is_eagle3 else None,
        head=HeadSpec(tied=False),
        hidden_norm=sizes.rms_norm("hidden_norm") if is_eagle3 else None,
        norm_before_residual=config.flag("norm_before_residual", default=False),
    )


def _feature_layers(config: Fields) -> tuple[int, ...] | None:
    nested = config.get("eagle_config")
    layers = config.get(_LAYERS) or (nested.get(_LAYERS) if isinstance(nested, dict) else None)
    if layers is None:
        return None
    if not isinstance(layers, list) or not layers or any(type(layer) is not int or layer < 0 for layer in layers):
        raise CheckpointError(f"{config.source}: {_LAYERS} must be a list of layers, is {layers!r}")
    return tuple(layers)
