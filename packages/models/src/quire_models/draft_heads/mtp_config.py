"""The layer behind the last one of some checkpoints, which predicts a further token, as a network of its own. Free of
torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.feed_forward_spec import SparseMoESpec
from quire_models.mixer_spec import LatentSelfAttentionSpec, SelfAttentionSpec
from quire_models.spec import (
    CheckpointNames,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    NetworkSpec,
    NormSpec,
    Weight,
    inside,
    recast,
)

__all__ = ["UNSUPPORTED", "MtpSpec", "mtp_config"]

_LIKE_DEEPSEEK = ("DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
_GATED = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")
_UNDESCRIBED = "whose layout no published class describes"
UNSUPPORTED: dict[str, str] = {
    "DeepseekV4ForCausalLM": f"are the tensors mtp.*, {_UNDESCRIBED}",
    "Glm5NextForCausalLM": "stand behind the last layer; its configuration does not say which attention they have",
    "HYV4ForCausalLM": f"are the tensors model.mtp_layers.*, {_UNDESCRIBED}",
    "InklingForCausalLM": "have short convolutions, whose states would have to go back after each guess",
    "Qwen4ExpForCausalLM": f"are the tensors mtp.*, {_UNDESCRIBED}",
}
"""Architecture -> why the layers that its checkpoints have for further tokens do not draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec(NetworkSpec):
    """One layer, which reads embedding and hidden state, each normalised, side by side through a projection
    (DeepSeek-AI 2024, DeepSeek-V3, sec. 2.2). Embedding and head are the target's."""

    embedding_norm: NormSpec
    hidden_norm: NormSpec
    projection: LinearSpec
    has_normed_states: bool
    """What the final norm gives stands for the target's hidden states (Qwen3-Next, Qwen3.5, with gated attention);
    otherwise what goes into it."""
    built_by: ClassVar[str] = "quire_models.draft_heads.mtp:MtpHead"

    def weights(self) -> Iterator[Weight]:
        """Parameters by their full names, but the tables of embedding and head."""
        yield from NetworkSpec.weights(self)
        for norm in (self.embedding_norm, self.hidden_norm):
            yield from inside(self.body, norm.weights())
        yield from inside(self.body, self.projection.weights("projection"))


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The network of the first layer behind the last one of `target`.

    Raises:
        ConfigError: its checkpoint has no such layer, or one of another kind.
    """
    architecture = target.text_architecture or target.architecture
    if architecture in UNSUPPORTED:
        raise ConfigError(
            f"the layers that {target.architecture} has for further tokens {UNSUPPORTED[architecture]}; use another "
            "speculative method",
            field="speculative_method",
        )
    if architecture not in (*_LIKE_DEEPSEEK, *_GATED):
        raise ConfigError(
            f"{target.architecture} has no layers that predict further tokens, or none that are understood; method mtp "
            f"is for {', '.join(sorted((*_LIKE_DEEPSEEK, *_GATED)))}",
            field="speculative_method",
        )
    is_gated = architecture in _GATED
    if not target.network.num_mtp_layers:
        raise ConfigError(
            "this checkpoint has no layers that predict further tokens "
            f"({'mtp_num_hidden_layers' if is_gated else 'num_nextn_predict_layers'} in its config.json is 0); use "
            "another speculative method",
            field="speculative_method",
        )
    network = _gated(target.network) if is_gated else _like_deepseek(target.network)
    return dataclasses.replace(target, architecture="MtpHead", network=network, media=None)


def _like_deepseek(target: NetworkSpec) -> NetworkSpec:
    """The target's last layer, with experts, under the number behind its last one, with an indexer of its own where the
    target has indexers."""
    layer = dataclasses.replace(target.layers[-1], feed_forward=target.mtp_feed_forward)
    mixer = layer.mixers[0]
    if isinstance(mixer, LatentSelfAttentionSpec) and mixer.indexer is not None:
        mixer = dataclasses.replace(mixer, indexer=dataclasses.replace(mixer.indexer, is_shared=False))
    body = f"model.layers.{len(target.layers)}"
    return _network(
        target, body, dataclasses.replace(layer, name=body, mixers=(mixer,)),
        norms=("enorm", "hnorm", "shared_head.norm"), projection="eh_proj", has_normed_states=False,
    )  # fmt: skip


def _gated(target: NetworkSpec) -> NetworkSpec:
    """Gated attention, and experts where the target has any."""
    layer = next((each for each in target.layers if isinstance(each.mixers[0], SelfAttentionSpec)), None)
    if layer is None:
        raise ConfigError("method mtp needs a model in which some layers attend", field="speculative_method")
    feed_forward = (_last_with_experts(target.layers) or layer).feed_forward
    return _network(
        target, "mtp", dataclasses.replace(layer, name="mtp.layers.0", feed_forward=feed_forward),
        norms=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), projection="fc", has_normed_states=True,
    )  # fmt: skip


def _network(
    target: NetworkSpec,
    body: str,
    layer: LayerSpec,
    *,
    norms: tuple[str, str, str],
    projection: str,
    has_normed_states: bool,
) -> MtpSpec:
    """The network of this layer.

    Args:
        norms: Names of the norms of embedding and hidden state, and behind the layer, relative to `body`.
        projection: Name of what joins embedding and hidden state.
    """
    assert target.final_norm is not None
    embedding_norm, hidden_norm, final_norm = (dataclasses.replace(target.final_norm, name=name) for name in norms)
    size = target.hidden_size
    network = dataclasses.replace(
        target,
        body=body,
        layers=(layer,),
        final_norm=final_norm,
        head=HeadSpec(tied=False),
        checkpoint=CheckpointNames(),
        num_mtp_layers=0,
    )
    return recast(
        MtpSpec,
        network,
        embedding_norm=embedding_norm,
        hidden_norm=hidden_norm,
        projection=LinearSpec(name=projection, in_features=2 * size, out_features=size, is_plain=True),
        has_normed_states=has_normed_states,
    )


def _last_with_experts(layers: tuple[LayerSpec, ...]) -> LayerSpec | None:
    sparse = [layer for layer in layers if isinstance(layer.feed_forward, SparseMoESpec)]
    return sparse[-1] if sparse else None
