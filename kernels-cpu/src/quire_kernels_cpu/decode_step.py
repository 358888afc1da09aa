"""Op `decode_step` by the compiled kernels: one call per step, with nothing made anew for it.

Knows the C interface; the step is in `csrc/decode_step.h`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import LAYER_FACTS, backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.decoder import Decoder, pointers_to
from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.matrix import matrix_argument
from quire_kernels_cpu.sampling import sample_table
from quire_ops import DecodeNetwork, DecodeRows, RunDecode, ops

__all__ = ["decode_step"]

_P, _L = ctypes.c_void_p, ctypes.c_int64


@backend_for(ops.decode_step, **LAYER_FACTS)
def decode_step(network: DecodeNetwork, rows: DecodeRows) -> RunDecode:
    return _DecodeStep(network, rows)


class _DecodeStep:
    """Keeps everything that the arguments point to."""

    def __init__(self, network: DecodeNetwork, rows: DecodeRows) -> None:
        self._network, self._kept = network, rows
        self._decoder = Decoder(network.stack)
        self._decoder.prepare(rows.group_of_layer, rows.kv_caches, rows.states)
        self._dtype, width, embedding = DTYPES[network.stack.dtype], network.stack.hidden_size, network.embedding
        self._group, sizes = network.stack.group, network.head.rank_sizes
        self._matrices = [matrix_argument(*each[:5], inputs=width) for each in (network.head, embedding)]
        self._run = library().quire_decode_step
        num_rows, num_groups = len(rows.num_tokens), len(rows.tables)
        self._tables = (STRUCTS["RowTable"] * num_groups)(
            *(
                STRUCTS["RowTable"](table=table.data_ptr(), width=table.shape[1], block_size=size, window=window or 0)
                for table, size, window in rows.tables
            )
        )
        self._num_blocks = (_P * num_groups)(*(numbers.ctypes.data for numbers in rows.num_blocks))
        self._sample_table = sample_table(rows.sample_table)
        self._rows: ctypes.Array[Any] = (_L * num_rows)()
        self._starts: ctypes.Array[Any] = (_L * num_rows)()
        self._ids: ctypes.Array[Any] = (_L * num_rows)()
        self._max_logits = (ctypes.c_float * num_rows)()
        self._length = 0
        self._arguments = STRUCTS["DecodeArguments"](
            embedding=ctypes.addressof(self._matrices[1]),
            num_embeddings=len(embedding.weight),
            head=ctypes.addressof(self._matrices[0]),
            vocab_size=sum(sizes) or network.head.weight.shape[0],
            token_ids=rows.token_ids.data_ptr(),
            row_len=rows.token_ids.shape[1],
            num_tokens=rows.num_tokens.ctypes.data,
            tables=ctypes.addressof(self._tables),
            num_blocks=ctypes.addressof(self._num_blocks),
            num_groups=num_groups,
            caches=ctypes.addressof(self._decoder.caches),
            cache_format=self._decoder.cache_format,
            lora_slots=rows.lora_slots.ctypes.data,
            max_lora_rank=self._decoder.adapters.max_rank,
            position_deltas=rows.position_deltas.ctypes.data,
            sample_table=ctypes.addressof(self._sample_table),
            embedding_factor=network.embedding_factor,
            logits_factor=network.logits_factor,
            soft_cap=network.logits_soft_cap or 0.0,
            rows=ctypes.addressof(self._rows),
            starts=ctypes.addressof(self._starts),
            ids=ctypes.addressof(self._ids),
            max_logits=ctypes.addressof(self._max_logits),
        )
        if sizes or network.embedding_rows:
            self._share(sizes, network.embedding_rows)

    def __call__(
        self, rows: list[int], starts: list[int], masks: tuple[Tensor, Tensor] | None = None
    ) -> list[int] | None:
        """See `RunDecode`."""
        arguments = self._arguments
        arguments.logits = arguments.mask_of = arguments.mask_bits = None
        if masks is not None:
            mask_of, bitmask = masks
            num_words = -(-arguments.vocab_size // 32)
            if bitmask.shape[1] != num_words:
                raise ValueError(f"masks must have {num_words} words, got {bitmask.shape[1]}")
            arguments.mask_of, arguments.mask_bits = mask_of.data_ptr(), bitmask.data_ptr()
        return self._ids[: len(rows)] if self._compute(rows, starts) else None

    def logits(self, rows: list[int], starts: list[int]) -> Tensor | None:
        """See `RunDecode`."""
        logits = torch.empty(len(rows), self._arguments.vocab_size, dtype=torch.float32)
        self._arguments.logits = logits.data_ptr()
        return logits if self._compute(rows, starts) else None

    def _compute(self, rows: list[int], starts: list[int]) -> bool:
        arguments, count = self._arguments, len(rows)
        if max(starts) >= self._length:
            self._reach(max(starts) + 1)
        self._rows[:count], self._starts[:count] = rows, starts  # numbers are taken too
        arguments.count = count
        done: int = self._run(self._dtype, self._decoder.handle, ctypes.byref(arguments))
        if not done and self._group is not None:
            self._group.check()
        return bool(done)

    def _share(self, head_sizes: tuple[int, ...], embedding_rows: tuple[int, ...]) -> None:
        """Say how ranks share out the tokens of the head and of the embedding; empty where each has all."""
        self._shares = [(_L * len(each))(*each) for each in (head_sizes, embedding_rows)]
        of_head, of_embedding = (ctypes.addressof(each) if each else None for each in self._shares)
        self._matrices[0].rank_sizes, self._arguments.embedding_rows = of_head, of_embedding

    def _reach(self, length: int) -> None:
        tables = [rotation(length) for rotation in self._network.rotations]
        self._cosines, self._sines = [cos for cos, _ in tables], [sin for _, sin in tables]
        self._length = min(map(len, self._cosines), default=sys.maxsize)
        self._angles = pointers_to(self._cosines), pointers_to(self._sines)
        self._arguments.cos, self._arguments.sin = map(ctypes.addressof, self._angles)
        self._arguments.num_rotations = len(self._cosines)
