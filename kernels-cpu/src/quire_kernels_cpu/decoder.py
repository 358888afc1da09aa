"""All layers of a decoder in one call of the compiled kernels: op `decoder_stack`.

Knows the C interface of a decoder and where a step's tensors are; the arithmetic is in `csrc/decoder.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import LAYER_FACTS, backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.layer_arguments import LayerArguments
from quire_kernels_cpu.lora import LoraTables
from quire_ops import CrossAttentionWeights, PagedLayout, ops
from quire_ops.decoder_stack import DecoderStack, RunDecoder
from quire_ops.lora import LoraTokens

__all__ = [
    "Decoder",
    "cache_format",
    "decoder_stack",
    "path_pointer",
    "pointers_to",
]

LATENTS_IN_FP8 = 5
_CACHE_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3, torch.uint8: 4}


def cache_format(kv_cache: Tensor, dtype: torch.dtype) -> int | None:
    """The number of the cache's format (`csrc/kv_cache.h`) beside numbers of `dtype`, or None if it is not served."""
    if kv_cache.ndim == 3 and kv_cache.dtype == torch.uint8:
        return LATENTS_IN_FP8
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


@backend_for(ops.decoder_stack, **LAYER_FACTS, trees=True)
def decoder_stack(stack: DecoderStack) -> RunDecoder:
    return Decoder(stack)


class Decoder:
    """A decoder of the library. Keeps the weights that it points to."""

    def __init__(self, stack: DecoderStack) -> None:
        library()  # says why when there is none
        self._stack = stack
        self._dtype = DTYPES[stack.dtype]
        self._layers = LayerArguments(stack)
        self._group_of_layer: tuple[int, ...] | None = None
        self._caches: tuple[Tensor, ...] | None = None
        self.cache_format = 0
        """Number of the format of keys and values."""
        self.caches: ctypes.Array[ctypes.Structure]
        """Where they are; from `prepare` on."""
        self.adapters = LoraTables(self._layers.lora)
        """In the order in which the C interface takes them."""
        self.handle: int | None = None
        """What the C functions take; from `prepare` on."""
        crossing = (layer.cache for layer in stack.layers if isinstance(layer.mixer, CrossAttentionWeights))
        self._cross_cache = next(crossing, None)
        """One of those of cross attention: how far its tokens see is the same in all."""

    def __del__(self) -> None:
        self._release()

    def __call__(
        self,
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        states: tuple[tuple[Tensor, ...], ...] = (),
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Run one step: `RunDecoder`."""
        self.prepare(group_of_layer, kv_caches, states)
        x = x.contiguous()
        cosines = [cos.contiguous() for cos, _ in rotations]
        sines = [sin.contiguous() for _, sin in rotations]
        hidden = torch.empty_like(x)
        groups = _groups(layouts)
        first = layouts[0]
        paths, path_stride = path_pointer(first)
        cross = None if self._cross_cache is None else layouts[group_of_layer[self._cross_cache]]
        tap_pointers = None if not taps else self._tap_pointers(taps)
        cos, sin = pointers_to(cosines), pointers_to(sines)
        step = STRUCTS["StepArgument"](
            x=x.data_ptr(),
            hidden=hidden.data_ptr(),
            cos=ctypes.addressof(cos),
            sin=ctypes.addressof(sin),
            tokens=x.shape[0],
            num_sequences=len(first.kv_lens),
            query_start_loc=first.query_start_loc.data_ptr(),
            kv_lens=first.seq_lens.data_ptr(),
            groups=ctypes.addressof(groups),
            caches=ctypes.addressof(self.caches),
            cache_format=self.cache_format,
            lora_order=None if lora is None else lora.order.data_ptr(),
            lora_groups=None if lora is None else lora.groups.data_ptr(),
            num_lora_groups=0 if lora is None else len(lora.groups),
            max_lora_rank=self.adapters.max_rank,
            taps=None if tap_pointers is None else ctypes.addressof(tap_pointers),
            paths=paths,
            path_stride=path_stride,
            cross_start_loc=None if cross is None else cross.query_start_loc.data_ptr(),
            cross_lens=None if cross is None else cross.seq_lens.data_ptr(),
        )
        library().quire_decoder_run(self._dtype, self.handle, ctypes.byref(step))
        if self._stack.group is not None:
            self._stack.group.check()
        return hidden

    def _tap_pointers(self, taps: Mapping[int, Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        num_layers = len(self._stack.layers)
        assert all(tap.is_contiguous() and 0 <= layer <= num_layers for layer, tap in taps.items())
        pointers = (ctypes.c_void_p * (num_layers + 1))()
        for layer, tap in taps.items():
            pointers[layer] = tap.data_ptr()
        return pointers

    def prepare(
        self,
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        states: tuple[tuple[Tensor, ...], ...] = (),
    ) -> None:
        """Make `handle` and `caches` fit; nothing to do when they do already."""
        if group_of_layer != self._group_of_layer:
            self._make(group_of_layer)
        if kv_caches is not self._caches:
            self._point_to(kv_caches, states)

    def _make(self, group_of_layer: tuple[int, ...]) -> None:
        self._release()
        sublayers = self._layers.sublayers(group_of_layer)
        decoder = STRUCTS["DecoderArgument"](
            sublayers=ctypes.addressof(sublayers),
            num_sublayers=len(sublayers),
            num_layers=len(self._stack.layers),
            hidden=self._stack.hidden_size,
            rotary_dim=self._stack.rotary_dim,
            final_norm=self._layers.final_norm,
            lora=self.adapters.address,
            group=None if self._stack.group is None else self._stack.group.handle,
        )
        self.handle = library().quire_decoder_new(self._dtype, ctypes.byref(decoder))
        self._group_of_layer = group_of_layer

    def _point_to(self, kv_caches: tuple[Tensor, ...], states: tuple[tuple[Tensor, ...], ...]) -> None:
        struct, kept = STRUCTS["CacheArgument"], states or ((),) * len(kv_caches)
        self.caches = (struct * len(kv_caches))(*map(self._cache, kv_caches, kept))
        paged = [cache for cache, held in zip(kv_caches, kept, strict=True) if not held]
        formats = {cache_format(cache, self._stack.dtype) for cache in paged}
        assert None not in formats, f"a cache of {paged[0].dtype} is not served"
        self.cache_format = max((number or 0 for number in formats), default=0)
        self._caches = kv_caches

    def _cache(self, kv_cache: Tensor, states: tuple[Tensor, ...]) -> ctypes.Structure:
        struct = STRUCTS["CacheArgument"]
        if states:
            assert all(state.dtype == torch.float32 and state[0].is_contiguous() for state in states)
            conv, *others = states
            fields = {"conv_state": conv.data_ptr(), "conv_stride": conv.stride(0)}
            if others:
                fields |= {"state": others[0].data_ptr(), "state_stride": others[0].stride(0)}
            return struct(**fields)
        latent = kv_cache.ndim == 3
        assert (kv_cache.stride(2) == 1) if latent else kv_cache[0].is_contiguous(), "rows of a cache must be whole"
        size = kv_cache.element_size()
        row_bytes = kv_cache.stride(1) * size if latent else 0
        return struct(data=kv_cache.data_ptr(), block_bytes=kv_cache.stride(0) * size, row_bytes=row_bytes)

    def _release(self) -> None:
        if self.handle is not None:
            library().quire_decoder_delete(self._dtype, self.handle)
            self.handle = None


def _groups(layouts: Sequence[PagedLayout]) -> ctypes.Array[ctypes.Structure]:
    """The KV cache groups of a step."""
    struct = STRUCTS["StepGroup"]
    return (struct * len(layouts))(
        *(
            struct(
                block_table=layout.block_table.data_ptr(),
                table_stride=layout.block_table.stride(0),
                slot_mapping=layout.slot_mapping.data_ptr(),
                block_size=layout.block_size,
            )
            for layout in layouts
        )
    )
