"""What the config.json of a DFlash drafter says, in the published layout (that of a Qwen3 decoder, with `block_size`
and the object `dflash_config`) or in the format of the library `speculators`. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields, read_json
from quire_models.config_fields import stored_dtype
from quire_models.decoder_sizes import decoder_sizes
from quire_models.draft_heads.eagle_config import EagleConfig, EagleSpec, feature_layers, of_speculators
from quire_models.quantization_formats import parse_quantization, quantization_method
from quire_models.spec import HeadSpec, LinearSpec
from quire_models.stored_linears import with_files

__all__ = ["DFlashSpec", "read_dflash_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashSpec(EagleSpec):
    """The network of a drafter: Qwen3's layers, and a projection of the target's features."""

    built_by: ClassVar[str] = "quire_models.draft_heads.dflash:DFlashHead"


def read_dflash_config(folder: str | Path) -> EagleConfig:
    """Read the config.json of a DFlash drafter.

    Raises:
        CheckpointError: No such file, a drafter of another kind, or a field that is missing or wrong.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is no folder of a DFlash drafter")
    stored = read_json(path)
    raw = of_speculators(stored, "dflash", path)
    config = Fields({**raw, "architectures": ["Qwen3ForCausalLM"]}, str(path))
    kinds = config.get("layer_types")
    if config.get("use_sliding_window") or (isinstance(kinds, list) and set(kinds) != {"full_attention"}):
        raise CheckpointError(f"{path}: DFlash drafters whose layers attend within windows do not run here")
    sizes = decoder_sizes(config)
    norms = sizes.head_norms()
    attention = sizes.attention(qkv_bias=config.flag("attention_bias", default=False), **norms)
    network = sizes.network(
        [sizes.pre_norm(layer, attention, prefix="layers") for layer in sizes.layers],
        kind=DFlashSpec,
        body="",
        final_norm="norm",
        head=HeadSpec(tied=False),
        hidden_norm=sizes.rms_norm("hidden_norm"),
        hidden_norm_in="",
    )
    own = Fields(raw["dflash_config"] if isinstance(raw.get("dflash_config"), dict) else raw, str(path))
    head = EagleConfig(
        architecture="DFlashHead",
        model_type="dflash",
        network=network,
        dtype=stored_dtype(config),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=config.token_ids("eos_token_id"),
        quantization=with_files(parse_quantization(config), path.parent),
        quantization_method=quantization_method(config),
        kind="dflash",
        draft_vocab_size=config.integer("draft_vocab_size", default=sizes.vocab_size, minimum=1),
        target_hidden_size=config.integer("target_hidden_size", default=sizes.hidden_size, minimum=1),
        feature_layers=_layers(config),
        mask_token_id=own.integer("mask_token_id", minimum=0),
        block_size=config.integer("block_size", minimum=2),
    )
    fc = LinearSpec(name="fc", in_features=head.num_features * head.target_hidden_size, out_features=sizes.hidden_size)
    return replace(head, network=replace(network, embedding=replace(network.embedding, project_in=fc)))


def _layers(config: Fields) -> tuple[int, ...]:
    """Layers of the target whose input is read. The published layout names layers whose output it is, `speculators` the
    layers behind them."""
    outputs = feature_layers(config, "target_layer_ids", "dflash_config")
    if outputs is not None:
        return tuple(layer + 1 for layer in outputs)
    inputs = feature_layers(config, "aux_hidden_state_layer_ids")
    if inputs is None:
        raise CheckpointError(
            f"{config.source} names no layers of the target that the drafter reads; write target_layer_ids into "
            "dflash_config"
        )
    return inputs
