"""What a runner and a loader ask of any network. Networks hold weights only; the cache comes with the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire_attention import AttentionBackend, ForwardBatch
from quire_interfaces import ConfigError
from quire_lora import AdapterSlots
from quire_models.config import ModelConfig
from quire_models.layers.expert_parallel import ExpertBalancer
from quire_models.layers.fused import named_tensors
from quire_models.layers.fused_decoder import FusedDecoder
from quire_models.layers.linear import Linear
from quire_models.layers.moe import FusedExperts
from quire_models.layers.pooling_head import PoolingHead
from quire_models.layers.routing import Router
from quire_models.layers.scope import Packed, Parameter, Scope
from quire_models.layers.stored_linear import StoredLinear
from quire_models.layers.towers import Towers
from quire_ops import DecodeRows, LoraTokens, RunDecode
from quire_quantization.methods import QuantizedLinear, ServedLinear

__all__ = ["Network"]

LAYOUT_OPS = frozenset(
    {
        "causal_conv1d",
        "channel_delta_rule",
        "compress_windows",
        "compressed_attention",
        "compressed_topk",
        "gated_delta_rule",
        "index_topk",
        "index_topk_blocks",
        "latent_attention",
        "latent_attention_with_lse",
        "mamba2_scan",
        "paged_attention_with_lse",
        "pooled_index_topk",
        "position_slots",
        "selective_scan",
        "wkv",
    }
)
"""Ops of layers that get a step's layout; attention is bound elsewhere."""


class Network:
    """A network on a single device. Not an autograd module: it serves, and no weight asks for gradients."""

    loads_itself: bool = False
    """Weights are read by `load`; there are no parameters for a loader to fill."""
    ignored_tensors: frozenset[str] = frozenset()
    """Names of checkpoint tensors that are not needed."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        """Args:
        scope: What layers get from outside; collects the parameters.
        """
        self.config = config
        self._scope = scope
        self._pooling_head = PoolingHead(config.network, scope)
        self._stack: FusedDecoder | None = None
        """All layers in one call; set once weights are loaded, where a backend takes them."""
        self.towers: Towers | None = None
        """What encodes media; None where it has none, or none was built."""
        self.num_kv_scales = 0
        """Number of layers for whose KV cache the checkpoint has scales."""

    @property
    def batch_invariant(self) -> bool:
        """Whether logits are promised to depend, to the bit, on nothing but the tokens before them."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self._scope.dtype

    @property
    def cache_dtype(self) -> str:
        """Dtype of the KV caches: a name of `quire_interfaces.KV_CACHE_DTYPES`."""
        return self._scope.cache_dtype or str(self._scope.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._scope.device

    @property
    def attention_backend(self) -> AttentionBackend:
        """The backend that all layers use; it says what shape the caches have."""
        return self._scope.attention_backend

    @property
    def adapters(self) -> AdapterSlots | None:
        """Where its layers find adapters; None where it takes none."""
        return self._scope.adapters

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layers that can be quantized, the LM head aside."""
        return tuple(layer for layer in self._scope.layers if isinstance(layer, Linear))

    @property
    def stored_forms(self) -> str:
        """In which forms the checkpoint holds the layers that are quantized in it, and how many others are plain there:
        "packed, 4 bits, groups of 128; 2 layers plain". Empty where none is."""
        stored = self._scope.stored
        if not stored:
            return ""
        forms = " and ".join(dict.fromkeys(method.config.form for method in stored))
        plain = sum(not isinstance(layer.method, StoredLinear) for layer in self.linears)
        return f"{forms}; {plain} layers plain" if plain else forms

    @property
    def linear_kernels(self) -> str:
        """What multiplies with the layers that are quantized, in the checkpoint or while they are loaded, for how many
        of them, and why nothing before it in order does: "grouped_linear for 14 (int8_linear: takes no int4)". Empty
        where there are none."""
        method = self._scope.linear_method
        if isinstance(method, QuantizedLinear | ServedLinear) and method.choice is not None:
            return method.choice.report(len(self.linears))
        counts = Counter(method.choice for method in self._scope.stored if method.choice is not None)
        return ", ".join(choice.report(count) for choice, count in counts.items())

    @property
    def expert_methods(self) -> str:
        """What runs its experts, for how many layers, and why nothing before it in order does: "fused_moe for 24".
        Empty where there are none."""
        experts = [layer for layer in self._scope.layers if isinstance(layer, FusedExperts)]
        counts = Counter(str(each.choice) for each in experts if each.choice is not None)
        return ", ".join(f"{choice} for {count}" for choice, count in counts.items())

    @property
    def shared_parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parts that tensor-parallel ranks share out, and parts that each of them has whole."""
        scope, linears = self._scope, self.linears
        num_shared = sum(layer.shard is not None for layer in linears)
        shared = [
            f"{num_shared} of {len(linears)} linear layers",
            f"the heads of {len(scope.head_shards)} of {len({*scope.attentions, *scope.head_shards})} attentions",
            "the LM head",
        ]
        table = self.config.network.embedding_name
        shares_table = any(each.name == table and each.shard is not None for each in scope.parameters)
        if shares_table:
            shared.append("the embedding")
        if scope.expert_parallel is not None:
            shared.append(scope.expert_parallel.summary)
        whole = {
            "embedding": not shares_table,
            "norms": True,
            "experts": scope.expert_parallel is None and any(isinstance(each, FusedExperts) for each in scope.layers),
            "recurrent states": any(mixer.states for mixer in self.config.network.mixers),
            "towers": self.towers is not None,
        }
        return tuple(shared), tuple(part for part, is_there in whole.items() if is_there)

    @property
    def routers(self) -> tuple[Router, ...]:
        """What chooses experts, in the order of the layers; none where no layer has routed experts."""
        return tuple(self._scope.routers)

    @property
    def expert_balancer(self) -> ExpertBalancer | None:
        """What moves experts between ranks; None where they stay where they are."""
        parallel = self._scope.expert_parallel
        return None if parallel is None else parallel.balancer

    def go_op_by_op(self) -> None:
        """Run layers one by one from now on, with the bits of the one call that ran them all. Once weights are
        loaded."""
        self._stack = None

    @property
    def in_one_call(self) -> bool:
        """Whether a backend runs all layers in one call (op `decoder_stack`), not op by op."""
        return self._stack is not None

    @property
    def attention_names(self) -> tuple[str, ...]:
        """Names of the parts that attend over a paged cache, with the dot behind: "model.layers.0.self_attn."."""
        return tuple(self._scope.attentions)

    @property
    def head_weights(self) -> Mapping[str, Tensor]:
        """Tensors of `config.network.pooler` by their names there: float32, but the table of tokens where the pooler
        shares it, which is in the compute dtype. Empty before weights are loaded, and without a pooler."""
        weights = self._pooling_head.weights
        name = self.config.network.embedding_name
        return {**weights, name: self._token_table()} if name in self._pooling_head.names else weights

    def _token_table(self) -> Tensor:
        """The table of tokens, [vocab_size, width]."""
        raise NotImplementedError

    @property
    def num_checkpoint_kv_heads(self) -> int:
        """Key-value heads that the checkpoint has: those of all ranks."""
        heads = getattr(self.config.network.attention, "heads", None)
        return self.config.num_kv_heads if heads is None else heads.num_kv_heads

    @property
    def parameters(self) -> list[Parameter]:
        """What the checkpoint has to bring."""
        return self._scope.parameters

    @property
    def packs(self) -> dict[str, Packed]:
        """What the checkpoint may bring in the place of several parameters, by its name there."""
        return self._scope.packs

    @property
    def absent(self) -> Collection[str]:
        """Names of experts that other ranks have."""
        parallel = self._scope.expert_parallel
        return () if parallel is None else parallel.absent

    @property
    def host_lengths(self) -> tuple[str, ...]:
        """Parts of the network that read lengths of sequences on the host, which keeps decode steps from being captured
        in a graph; empty where none does."""
        if self.loads_itself:
            return ("a network of Transformers",)  # nobody has looked at what its classes do there
        if self._stack is not None:
            return ("op decoder_stack",)
        if self._scope.pp_group is not None:
            return ("a pipeline stage",)
        if self._scope.expert_parallel is not None:
            return ("what experts of other ranks get",)
        return self._refusals("device_lengths")

    @property
    def host_query_lens(self) -> tuple[str, ...]:
        """Parts of the network that read on the host how many tokens of each sequence are in a step, which keeps steps
        with prompts from being captured in a graph; empty where none does."""
        return self.host_lengths or self._refusals("device_query_lens")

    @property
    def tree_refusals(self) -> tuple[str, ...]:
        """Parts of the network that read a step's tokens in the order of the cache, and cannot read them as trees
        (`PagedLayout.paths`); empty where none does."""
        return ("a network of Transformers",) if self.loads_itself else self.span_refusals

    @property
    def span_refusals(self) -> tuple[str, ...]:
        """Parts of the network that cannot let the tokens of an image attend to those behind them; empty where all
        can."""
        return self._refusals("trees")

    def _refusals(self, ability: str) -> tuple[str, ...]:
        """Parts of the network that attend or keep states, and lack an ability that backends declare."""
        refusals = []
        if not getattr(self.attention_backend.op_backend, ability):
            refusals.append(f"attention backend {self.attention_backend.name}")
        refusals += [
            f"op {backend.op.name} of backend {backend.name}"
            for backend in self._scope.chosen
            if backend.op.name in LAYOUT_OPS and not getattr(backend, ability)
        ]
        if any(attention.is_chunked for attention in self._scope.attentions.values()):
            refusals.append("attention within chunks")
        return tuple(dict.fromkeys(refusals))

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A tensor of the checkpoint as parameters: renamed, split, transposed; unknown names are passed on, tensors of
        towers left out."""
        spec, names = self.config.network, self.config.language_names
        own = name if names is None else names(name)
        if own is None:
            return ()
        name = own
        return named_tensors(spec.checkpoint, spec.head.name, name, tensor, self._pooling_head.names)

    def parameter_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A tensor of the checkpoint as parameters, where one that stands for several of them is taken apart. Sizes are
        not checked: adapters have another number of columns."""
        for own, part in self.checkpoint_tensors(name, tensor):
            packed = self.packs.get(own)
            yield from [(own, part)] if packed is None else packed.split(part)

    def set_kv_scales(self, scales: Mapping[str, Tensor]) -> None:
        """Take the checkpoint's scales for an fp8 KV cache; other caches have no use for them. Before `finish_loading`.

        Args:
            scales: A name of `attention_names` -> [2, num_kv_heads] float32, keys first. The others keep a scale of 1.
        """
        self.num_kv_scales = len(scales)
        if self.cache_dtype in ("fp8_e4m3", "fp8_e5m2"):
            for name, scale in scales.items():
                heads = self._scope.head_shards.get(name)
                own = scale if heads is None else scale[:, heads.kv_heads].contiguous()
                self._scope.attentions[name].kv_scale = own.to(self.device)

    def load(self, folder: str | Path, *, dummy: bool = False, language_model_only: bool = False) -> None:
        """Read the checkpoint, where `loads_itself`."""
        raise NotImplementedError

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Give the loaded parameters to their layers. Once, after all parameters have their tensor.

        Args:
            after_each: Called whenever a layer has what it needs of its parameters.
        """
        for finish in self._scope.finishers:
            finish()
            after_each()
        self._scope.finishers.clear()

    def use_adapters(self, lora: LoraTokens | None) -> None:
        """Let linear layers apply the adapters of a pass's tokens: the first thing that `forward` and `encode` do, with
        what their batch carries."""
        if self._scope.adapters is not None:
            self._scope.adapters.tokens = lora

    def encode(self, batch: ForwardBatch) -> None:
        """Have the encoder read `batch.encoder`, and write what cross attention reads. Before `forward`, in steps that
        have such inputs; for networks with an encoder."""
        raise NotImplementedError

    def encode_media(self, modality: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Embeddings of some items of one modality for `ForwardBatch.media`, [num_embeds, width] each.

        Args:
            modality: A value of `quire_interfaces.Modality`.
            items: Arrays of each item under the names that its processor gives them.

        Raises:
            ConfigError: No tower takes this modality, or none was built.
        """
        if self.towers is None:
            raise ConfigError(f"{self.config.architecture} has no towers here: it takes text alone", field="media")
        return self.towers.encode(modality, items)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T] tokens -> hidden states [T, hidden_size] after the final norm; writes the step's keys and values."""
        raise NotImplementedError

    def forward_with_features(self, batch: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Hidden states as `forward` gives them, and the residual stream before some layers side by side,
        [T, len(layers) * hidden_size]. The number of layers stands for the stream behind the last one, before the last
        norm."""
        raise NotImplementedError

    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """Hidden states [N, hidden_size] -> logits [N, vocab_size] float32. `lora`: which of them have adapters that
        may change the LM head; None where none has."""
        raise NotImplementedError

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """The network joined with the rows of a runner, for steps in which every row has one token to compute; None
        where no backend runs these in one call."""
        return None

    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden_size] -> the largest logit's token [N] int64, the lowest id among equals, and that
        logit [N] float32 (NaN where a logit is NaN). `lora` as in `compute_logits`."""
        max_logits, token_ids = self.compute_logits(hidden, lora).max(dim=-1)
        return token_ids, max_logits
