"""The whole stack of decoder layers in one call of the compiled kernels: op `decoder_stack`.

Knows the C interface of a decoder and where its tensors are; the arithmetic is in `csrc/decoder.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire_kernels_cpu.builds import library
from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.lora import LoraTables
from quire_kernels_cpu.matrix import Matrix
from quire_kernels_cpu.moe import CompiledExperts
from quire_kernels_cpu.routing import Rule
from quire_ops import DecoderLayerWeights, GatedWeights, LinearWeights, RoutedExperts
from quire_ops.declarations import PagedLayout
from quire_ops.decoder_stack import DecoderStack, RunDecoder
from quire_ops.lora import LoraTokens

__all__ = ["MAX_HEAD_DIM", "MAX_QUERIES_PER_KV_HEAD", "Decoder", "cache_format", "decoder_stack", "path_pointer"]

MAX_HEAD_DIM = 256
MAX_QUERIES_PER_KV_HEAD = 64
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


def decoder_stack(stack: DecoderStack) -> RunDecoder:
    """Op `decoder_stack`."""
    return Decoder(stack)


class Decoder:
    """A decoder of the library. Keeps the weights that it points to."""

    def __init__(self, stack: DecoderStack) -> None:
        library()  # says why when there is none
        self._stack = stack
        self._dtype = DTYPES[stack.final_norm.dtype]
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
        self._sinks = [None if layer.sinks is None else layer.sinks.float().contiguous() for layer in stack.layers]
        self.adapters = LoraTables([None if each is None else each.lora for x in stack.layers for each in _linears(x)])
        """In the order in which the C interface takes them."""
        self.handle: int | None = None
        """What the C functions take; from `prepare` on."""

    def __del__(self) -> None:
        self._release()

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """See `RunDecoder`."""
        self.prepare(group_of_layer, kv_caches)
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        hidden = torch.empty_like(x)
        pointers: list[int] = []
        for layout in layouts:
            table = layout.block_table
            pointers += (table.data_ptr(), table.stride(0), layout.slot_mapping.data_ptr())
        groups = (ctypes.c_int64 * len(pointers))(*pointers)
        first = layouts[0]
        library().quire_decoder_run(
            self._dtype,
            self.handle,
            x.data_ptr(),
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
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
        stack, num_layers = self._stack, len(self._stack.layers)
        hidden, first = stack.final_norm.shape[0], stack.layers[0]
        gated = [each.feed_forward for each in stack.layers if isinstance(each.feed_forward, GatedWeights)]
        intermediate = gated[0].gate.weight.shape[0] if gated else 0
        norms: list[int | None] = []
        matrices: list[Matrix] = []
        for layer, sinks in zip(stack.layers, self._sinks, strict=True):
            of_layer = (layer.input_norm, layer.post_attention_norm, layer.q_norm, layer.k_norm, layer.kv_scale, sinks)
            norms += [None if norm is None else norm.data_ptr() for norm in of_layer]
            inputs = (hidden, hidden, hidden, layer.q.weight.shape[0], hidden, hidden, intermediate)
            for weights, cols in zip(_linears(layer), inputs, strict=True):
                matrices.append(Matrix() if weights is None else Matrix.of(*weights[:5], inputs=cols))
        windows = [layer.sliding_window or 0 for layer in stack.layers]
        self.handle = library().quire_decoder_new(
            self._dtype,
            num_layers,
            (ctypes.c_void_p * len(norms))(*norms),
            (Matrix * len(matrices))(*matrices),
            (ctypes.c_int * num_layers)(*windows),
            (ctypes.c_int * num_layers)(*group_of_layer),
            stack.final_norm.data_ptr(),
            hidden,
            intermediate,
            first.q.weight.shape[0] // stack.head_dim,
            first.k.weight.shape[0] // stack.head_dim,
            stack.head_dim,
            stack.activation == "gelu",
            stack.eps,
            stack.scale,
        )
        library().quire_decoder_set_lora(self._dtype, self.handle, self.adapters.address)
        for i, experts in self._experts.items():
            self._set_experts(i, experts)
        self._group_of_layer = group_of_layer

    def _set_experts(self, index: int, experts: CompiledExperts) -> None:
        routed = self._stack.layers[index].feed_forward
        assert isinstance(routed, RoutedExperts)
        num_experts = len(routed.router)
        biases = (routed.router_bias, routed.choice_bias)
        assert all(bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()) for bias in biases)
        library().quire_decoder_set_experts(
            self._dtype,
            self.handle,
            index,
            experts.handle(self._stack.final_norm.dtype),
            ctypes.byref(Matrix.of(routed.router, None, None, inputs=self._stack.final_norm.shape[0])),
            num_experts,
            *(None if bias is None else bias.data_ptr() for bias in biases),
            ctypes.byref(Rule.of(routed.rule, num_experts)),
        )

    def _point_to(self, kv_caches: tuple[Tensor, ...]) -> None:
        for i, cache in enumerate(kv_caches):
            assert cache.is_contiguous(), "a layer's cache must be contiguous"
            self.cache_pointers[i] = cache.data_ptr()
        number = cache_format(kv_caches[0], self._stack.final_norm.dtype)
        assert number is not None, f"a cache of {kv_caches[0].dtype} is not served"
        self.cache_format = number
        self._caches = kv_caches

    def _release(self) -> None:
        if self.handle is not None:
            library().quire_decoder_delete(self._dtype, self.handle)
            self.handle = None


def _linears(layer: DecoderLayerWeights) -> tuple[LinearWeights | None, ...]:
    """The matrices of a layer in the order in which the C interface takes them; None where it has experts instead."""
    gated = layer.feed_forward if isinstance(layer.feed_forward, GatedWeights) else (None, None, None)
    return (layer.q, layer.k, layer.v, layer.o, *gated)
