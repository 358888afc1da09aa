"""The whole stack of decoder layers in one call of the compiled kernels: op `decoder_stack`.

Knows the C interface of a decoder and where its tensors are; the arithmetic is in `csrc/decoder.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import ATTENTION_FACTS, backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.lora import LoraTables
from quire_kernels_cpu.matrix import matrix_argument
from quire_kernels_cpu.moe import CompiledExperts
from quire_kernels_cpu.routing import routing_rule
from quire_ops import DecoderLayerWeights, GatedWeights, LinearWeights, PagedLayout, RoutedExperts, ops
from quire_ops.decoder_stack import DecoderStack, RunDecoder
from quire_ops.lora import LoraTokens

__all__ = [
    "Decoder",
    "cache_format",
    "decoder_stack",
    "path_pointer",
    "pointers_to",
]

_CACHE_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3, torch.uint8: 4}


def cache_format(kv_cache: Tensor, dtype: torch.dtype) -> int | None:
    """The number of the cache's format (`csrc/kv_cache.h`) beside numbers of `dtype`, or None if it is not served."""
    return 0 if kv_cache.dtype == dtype else _CACHE_FORMATS.get(kv_cache.dtype)


def path_pointer(layout: PagedLayout) -> tuple[int | None, int]:
    """Where the layout's paths are, if it has any, and how far from one token's to the next."""
    if layout.paths is None:
        return None, 0
    assert layout.paths.dtype == torch.int32
    assert layout.paths.stride(1) == 1
    return layout.paths.data_ptr(), layout.paths.stride(0)


def pointers_to(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where they are, as an array of the C interface."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@backend_for(ops.decoder_stack, **ATTENTION_FACTS, trees=True)
def decoder_stack(stack: DecoderStack) -> RunDecoder:
    return Decoder(stack)


_VECTORS = (
    "input_norm",
    "attention_out_norm",
    "feed_forward_norm",
    "feed_forward_out_norm",
    "q_norm",
    "k_norm",
    "sinks",
)
"""Of a layer, which the library takes in float32."""


class Decoder:
    """A decoder of the library. Keeps the weights that it points to."""

    def __init__(self, stack: DecoderStack) -> None:
        library()  # says why when there is none
        self._stack = stack
        self._dtype = DTYPES[stack.dtype]
        self._group_of_layer: tuple[int, ...] | None = None
        self._caches: tuple[Tensor, ...] = ()
        self.cache_format = 0
        """Number of the caches' format."""
        self.cache_pointers = (ctypes.c_void_p * len(stack.layers))()
        self._experts = {
            i: CompiledExperts(layer.feed_forward.experts)
            for i, layer in enumerate(stack.layers)
            if isinstance(layer.feed_forward, RoutedExperts)
        }
        self._final_norm = stack.final_norm.float().contiguous()
        self._vectors = [
            {name: vector.float().contiguous() for name in _VECTORS if (vector := getattr(layer, name)) is not None}
            for layer in stack.layers
        ]
        self.adapters = LoraTables([None if each is None else each.lora for x in stack.layers for each in _linears(x)])
        """In the order in which the C interface takes them."""
        self.handle: int | None = None
        """What the C functions take; from `prepare` on."""

    def __del__(self) -> None:
        self._release()

    def __call__(
        self,
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """See `RunDecoder`."""
        self.prepare(group_of_layer, kv_caches)
        x = x.contiguous()
        cosines, sines = ([each.contiguous() for each in part] for part in zip(*rotations, strict=True))
        hidden = torch.empty_like(x)
        groups = (STRUCTS["StepGroup"] * len(layouts))(
            *(
                STRUCTS["StepGroup"](
                    block_table=layout.block_table.data_ptr(),
                    table_stride=layout.block_table.stride(0),
                    slot_mapping=layout.slot_mapping.data_ptr(),
                )
                for layout in layouts
            )
        )
        first = layouts[0]
        library().quire_decoder_run(
            self._dtype,
            self.handle,
            x.data_ptr(),
            hidden.data_ptr(),
            pointers_to(cosines),
            pointers_to(sines),
            x.shape[0],
            len(first.kv_lens),
            first.query_start_loc.data_ptr(),
            first.seq_lens.data_ptr(),
            groups,
            self.cache_pointers,
            self.cache_format,
            kv_caches[0].shape[3],
            None if lora is None else lora.order.data_ptr(),
            None if lora is None else lora.groups.data_ptr(),
            0 if lora is None else len(lora.groups),
            self.adapters.max_rank,
            None if not taps else self._tap_pointers(taps),
            *path_pointer(first),
        )
        return hidden

    def _tap_pointers(self, taps: Mapping[int, Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        num_layers = len(self._stack.layers)
        assert all(tap.is_contiguous() and 0 <= layer <= num_layers for layer, tap in taps.items())
        pointers = (ctypes.c_void_p * (num_layers + 1))()
        for layer, tap in taps.items():
            pointers[layer] = tap.data_ptr()
        return pointers

    def prepare(self, group_of_layer: tuple[int, ...], kv_caches: tuple[Tensor, ...]) -> None:
        """Make `handle` and `cache_pointers` fit; nothing to do when they do already."""
        if group_of_layer != self._group_of_layer:
            self._make(group_of_layer)
        if kv_caches is not self._caches:
            self._point_to(kv_caches)

    def _make(self, group_of_layer: tuple[int, ...]) -> None:
        self._release()
        stack, first = self._stack, self._stack.layers[0]
        layers = (STRUCTS["LayerArgument"] * len(stack.layers))(
            *map(self._layer, range(len(stack.layers)), group_of_layer)
        )
        self.handle = library().quire_decoder_new(
            self._dtype,
            len(layers),
            layers,
            self._final_norm.data_ptr(),
            self._final_norm.shape[0],
            first.q.weight.shape[0] // stack.head_dim,
            first.k.weight.shape[0] // stack.head_dim,
            stack.head_dim,
            stack.rotary_dim,
            stack.activation == "gelu",
            stack.eps,
        )
        library().quire_decoder_set_lora(self._dtype, self.handle, self.adapters.address)
        self._group_of_layer = group_of_layer

    def _layer(self, index: int, group: int) -> ctypes.Structure:
        layer, hidden = self._stack.layers[index], self._final_norm.shape[0]
        gated = _gated(layer)
        inner = 0 if gated is None else gated.gate.weight.shape[0]
        inputs = (hidden, hidden, hidden, layer.q.weight.shape[0], hidden, hidden, inner)
        given: dict[str, Any] = {name: vector.data_ptr() for name, vector in self._vectors[index].items()}
        for name, weights, cols in zip(
            ("q", "k", "v", "o", "gate", "up", "down"), _linears(layer), inputs, strict=True
        ):
            if weights is not None:
                given[name] = matrix_argument(*weights[:5], inputs=cols)
        if isinstance(routed := layer.feed_forward, RoutedExperts):
            biases = {"router_bias": routed.router_bias, "choice_bias": routed.choice_bias}
            for name, bias in biases.items():
                if bias is not None:
                    assert bias.dtype == torch.float32
                    assert bias.is_contiguous()
                    given[name] = bias.data_ptr()
            if routed.shared_gate is not None:
                given["shared_gate"] = routed.shared_gate.data_ptr()
            given["experts"] = self._experts[index].handle(self._stack.dtype)
            given["router"] = matrix_argument(routed.router, inputs=hidden)
            given["num_experts"] = len(routed.router)
            given["rule"] = routing_rule(routed.rule, len(routed.router))
        return STRUCTS["LayerArgument"](
            **given,
            kv_scale=None if layer.kv_scale is None else layer.kv_scale.data_ptr(),
            inner=inner,
            window=layer.sliding_window or 0,
            group=group,
            rotation=-1 if layer.rotation is None else layer.rotation,
            interleaved=layer.interleaved,
            norm_of_all_heads=layer.q_norm is not None and layer.q_norm.shape[0] > self._stack.head_dim,
            norm_after_rotation=layer.norm_after_rotation,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
            residual_factor=layer.residual_factor,
        )

    def _point_to(self, kv_caches: tuple[Tensor, ...]) -> None:
        for i, cache in enumerate(kv_caches):
            assert cache.is_contiguous(), "a layer's cache must be contiguous"
            self.cache_pointers[i] = cache.data_ptr()
        number = cache_format(kv_caches[0], self._stack.dtype)
        assert number is not None, f"a cache of {kv_caches[0].dtype} is not served"
        self.cache_format = number
        self._caches = kv_caches

    def _release(self) -> None:
        if self.handle is not None:
            library().quire_decoder_delete(self._dtype, self.handle)
            self.handle = None


def _gated(layer: DecoderLayerWeights) -> GatedWeights | None:
    """What all tokens of the layer use: its feed-forward network, or the one beside its experts."""
    return layer.feed_forward if isinstance(layer.feed_forward, GatedWeights) else layer.feed_forward.shared


def _linears(layer: DecoderLayerWeights) -> tuple[LinearWeights | None, ...]:
    """The matrices of a layer in the order in which the C interface takes their adapters; None for one that it has
    not."""
    return (layer.q, layer.k, layer.v, layer.o, *(_gated(layer) or (None, None, None)))
