"""The part of a network that one pipeline stage has, as a description of its own. Free of torch.

A stage is a run of consecutive layers; the first one embeds the tokens, the last one has the final norm and the head.
Knows weights by their number; does not know how stages talk to each other (`layers/stage_lm.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from quire_distributed import Collectives
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.sharding import shard
from quire_models.spec import HeadSpec, MixerSpec, NetworkSpec, Weight, inside, recast

__all__ = ["StageSpec", "part_of_rank", "stage", "stage_layers", "stage_refusal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec(NetworkSpec):
    """One of several stages of a decoder. Embedding, final norm and head are described on all of them, so far as they
    are not layers' own; `has_table`, `is_first` and `is_last` say which are there."""

    stage: int
    num_stages: int
    first_layer: int
    """Number of layers in the stages before."""
    num_layers: int
    """Number of layers of all stages."""
    first_cache: int
    """Number of mixers in the stages before."""
    elsewhere: tuple[str, ...]
    """What the names of the parameters begin with that only other stages have."""
    built_by: ClassVar[str] = "quire_models.layers.stage_lm:StageLM"

    @property
    def is_first(self) -> bool:
        """It embeds the tokens, and has the towers."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """It computes the hidden states that logits and outputs of poolers are made of."""
        return self.stage == self.num_stages - 1

    @property
    def has_table(self) -> bool:
        """It has the table of tokens: to embed them, as the head's or the pooler's matrix, or for a drafting head."""
        return self.is_first or (self.is_last and keeps_table(self))

    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the tensors of its pooler, which the last stage has."""
        return NetworkSpec.head_shapes(self) if self.is_last else {}

    def cache_names(self) -> tuple[str, ...]:
        """Name of each mixer's cache, as the whole network calls it."""
        if self.caches_by_mixer:
            return NetworkSpec.cache_names(self)
        return tuple(f"model.layers.{i}" for i in range(self.first_cache, self.first_cache + len(self.mixers)))

    def weights(self) -> Iterator[Weight]:
        """Its parameters by their full names, but the tables of embedding and head."""
        embedding = {weight.name for weight in inside(self.body, self.embedding.weights())}
        for weight in NetworkSpec.weights(self):
            if self.is_first or weight.name not in embedding:
                yield weight

    def is_elsewhere(self, name: str) -> bool:
        """Whether only another stage has the parameter, or the module, of this name."""
        return f"{name}.".startswith(self.elsewhere)


def stage_refusal(model: ModelConfig, size: int) -> str:
    """Why the network cannot be cut into `size` stages; empty where it can.

    Raises:
        ConfigError: There are fewer layers than stages.
    """
    network = model.network
    if type(network) is not NetworkSpec or not model.is_native:
        return f"layers of {model.architecture} take more than what the layer before gives; serve it with one stage"
    num_own = len(stage_layers(network, size)[0])
    if model.media is not None and model.media.cross_attention_layers:
        return (
            "layers of all stages attend to media, which the first one alone has; serve the language model by itself, "
            "with --language-model-only"
        )
    deepest = max(model.media.deepstack_layers, default=0) if model.media is not None else 0
    if deepest > num_own:
        return (
            f"features of media are added in front of layer {deepest}, and the stage that has the towers has "
            f"{num_own} layers; take fewer stages, or serve the language model alone, with --language-model-only"
        )
    return ""


def keeps_table(network: NetworkSpec) -> bool:
    """Whether the last stage has the table of tokens, too."""
    is_head = network.has_lm_head and network.head.tied
    is_pooled = network.pooler is not None and network.embedding_name in network.pooler.shapes()
    return is_head or is_pooled or network.last_stage_embeds


def stage_layers(network: NetworkSpec, size: int) -> tuple[range, ...]:
    """The layers of each of `size` stages, so that the stage with the most weights has as few as can be. The head
    counts with the last stage; the table of tokens does not, since a step reads few of its rows. Layers that read what
    the index of a layer before found are in that layer's stage.

    Raises:
        ConfigError: There are fewer layers that a stage can begin with than stages.
    """
    begins = [i for i, layer in enumerate(network.layers) if not any(map(_shares_index, layer.mixers))]
    if size > len(begins):
        what = "layers" if len(begins) == len(network.layers) else "layers with an index of their own"
        raise ConfigError(
            f"pipeline_parallel_size is {size}, and the network has {len(begins)} {what}; a stage has at least one",
            field="pipeline_parallel_size",
        )
    begins.append(len(network.layers))
    costs = [
        sum(weight.num_experts * math.prod(weight.shape) for weight in layer.weights()) for layer in network.layers
    ]
    costs[-1] += network.vocab_size * network.embedding.size if network.has_lm_head else 0
    sums = [[0, *accumulate(costs)][begin] for begin in begins]
    # best[k][i]: least size of the largest of k stages that end before begins[i], and where the last one begins.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for k in range(1, size + 1):
        best.append(
            {
                end: min(
                    (max(most, sums[end] - sums[begin]), begin)
                    for begin, (most, _) in best[k - 1].items()
                    if begin < end
                )
                for end in range(k, len(begins) - (size - k))
            }
        )
    ends = [len(begins) - 1]
    for k in range(size, 0, -1):
        ends.append(best[k][ends[-1]][1])
    ends.reverse()
    return tuple(range(begins[begin], begins[end]) for begin, end in pairwise(ends))


def _shares_index(mixer: MixerSpec) -> bool:
    index = getattr(mixer, "indexer", None)
    return index is not None and index.is_shared


def stage(network: NetworkSpec, rank: int, size: int) -> NetworkSpec:
    """The network of stage `rank` of `size`; with one stage, the network itself."""
    if size == 1:
        return network
    own = stage_layers(network, size)[rank]
    is_first, is_last = rank == 0, rank == size - 1
    elsewhere = [f"{layer.name}." for i, layer in enumerate(network.layers) if i not in own]
    if not is_first and not (is_last and keeps_table(network)):
        elsewhere.append(f"{network.embedding_name}.")
    if not is_first:
        elsewhere += [f"{weight.name}." for weight in inside(network.body, network.embedding.weights())]
    if not is_last:
        elsewhere += [f"{name}." for name in (network.head.name, *network.head_shapes())]
        ends = [] if network.final_norm is None else [*inside(network.body, network.final_norm.weights())]
        if network.head.project_out is not None:
            ends += inside(network.body, network.head.project_out.weights("LM head"))
        elsewhere += [f"{weight.name}." for weight in ends]
    part = dataclasses.replace(
        network,
        layers=network.layers[own.start : own.stop],
        final_norm=network.final_norm if is_last else None,
        head=network.head if is_last else HeadSpec(name=network.head.name, tied=network.head.tied),
        has_lm_head=network.has_lm_head and is_last,
    )
    return recast(
        StageSpec,
        part,
        stage=rank,
        num_stages=size,
        first_layer=own.start,
        num_layers=len(network.layers),
        first_cache=sum(len(layer.mixers) for layer in network.layers[: own.start]),
        elsewhere=tuple(elsewhere),
    )


def part_of_rank(network: NetworkSpec, tp_group: Collectives | None, pp_group: Collectives | None) -> NetworkSpec:
    """What the rank of these groups has of a network: its stage, and of that its heads. None is a group of one."""
    if tp_group is not None:
        network = shard(network, tp_group.rank, tp_group.size)
    return network if pp_group is None else stage(network, pp_group.rank, pp_group.size)
