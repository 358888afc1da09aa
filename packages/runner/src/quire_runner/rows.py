"""`Rows`: what the runner remembers of every running request, in permanent places on the device.

A row holds token ids (prompt first, sampled tokens follow as they are made), a block table per KV cache group, and
the sampling parameters. It is filled once, extended by what is new, and freed; nothing is rebuilt per step. Lengths
are kept on the host, where the scheduler's numbers come from.

Shape legend: R rows (max_num_seqs), L token slots of a row, W block slots of a row.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces.kv_cache import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    SlidingLatentSpec,
    SlidingWindowSpec,
)
from quire_interfaces.media import PromptMedia
from quire_interfaces.step import NewRow, RequestFailure, SchedulerOutput
from quire_ops import DecodeRows, RowTable, to_device
from quire_runner.config import RunnerConfig
from quire_runner.grammars import RowGrammars
from quire_sampling import SamplingState

__all__ = ["BlockTable", "Rows"]


class BlockTable:
    """Block ids of every row for one KV cache group.

    Args:
        max_num_seqs: R.
        width: W, blocks of the longest row.
        group: The group; its block size, and the sliding window if it has one.
        device: Where the table lives.
    """

    __slots__ = ("block_size", "num_blocks", "sliding_window", "table", "width")

    def __init__(self, max_num_seqs: int, width: int, group: KVCacheGroup, device: torch.device) -> None:
        self.block_size = group.spec.block_size
        self.sliding_window = _window(group.spec)
        self.width = width
        self.table: Tensor = torch.zeros(max_num_seqs, width, dtype=torch.int32, device=device)
        """[R, W] block ids in token order, the null block where there is none."""
        self.num_blocks: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        """[R] blocks of each row."""

    def fill(self, row: int, block_ids: Sequence[int]) -> None:
        """Give an empty row its blocks."""
        if len(block_ids) > self.width:
            raise ValueError(f"{len(block_ids)} blocks do not fit a row of {self.width} blocks")
        if block_ids:
            self.table[row, : len(block_ids)] = to_device(np.asarray(block_ids, dtype=np.int32), self.table.device)
        self.num_blocks[row] = len(block_ids)

    def append(self, new_block_ids: dict[int, Sequence[int]]) -> None:
        """Append blocks to several rows: on the host at once, elsewhere with one write to the device."""
        places: list[int] = []
        values: list[int] = []
        on_host = self.table.numpy() if self.table.device.type == "cpu" else None
        for row, block_ids in new_block_ids.items():
            if not block_ids:
                continue
            begin = int(self.num_blocks[row])
            end = begin + len(block_ids)
            if end > self.width:
                raise ValueError(f"row {row} would hold {end} blocks, it has room for {self.width}")
            self.num_blocks[row] = end
            if on_host is not None:
                on_host[row, begin:end] = block_ids
                continue
            places.extend(range(row * self.width + begin, row * self.width + end))
            values.extend(block_ids)
        if places:
            device = self.table.device
            blocks = to_device(np.asarray(values, dtype=np.int32), device)
            self.table.view(-1).index_copy_(0, to_device(places, device), blocks)

    def check(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Make sure that rows [S] have blocks for their first `ends` [S] tokens.

        Raises:
            RuntimeError: one has not (a bug of the scheduler's side).
        """
        short = ends > self.num_blocks[rows] * self.block_size
        if short.any():
            i = int(short.argmax())
            raise RuntimeError(
                f"row {rows[i]} needs {-(-ends[i] // self.block_size)} blocks but was given {self.num_blocks[rows[i]]}"
            )

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.table[row, : int(self.num_blocks[row])] = 0
        self.num_blocks[row] = 0


# Many attributes: each is a column of the rows, or says which rows have something.
class Rows:
    """The persistent state of all rows. The runner is the only writer.

    Args:
        config: Length of the rows.
        groups: KV cache groups, in the order of the scheduler's block id tuples.
        sampling: Sampling parameters per row, and so the number of rows; filled and cleared together with the row.
        grammars: Matchers per row, likewise.
        device: Where token ids and block tables live.
    """

    __slots__ = (
        "_late_failures",
        "_max_model_len",
        "_merged_slot",
        "_num_fills",
        "adapter_slots",
        "block_tables",
        "device_position_deltas",
        "encoder_lens",
        "encoder_tables",
        "failed",
        "grammars",
        "lora_slots",
        "media",
        "num_prompt_tokens",
        "num_tokens",
        "position_deltas",
        "prompt_logprobs",
        "row_len",
        "row_tables",
        "sampling",
        "token_ids",
    )

    def __init__(
        self,
        config: RunnerConfig,
        groups: Sequence[KVCacheGroup],
        sampling: SamplingState,
        grammars: RowGrammars,
        device: torch.device,
    ) -> None:
        self._max_model_len = config.max_model_len
        self.row_len = config.row_len
        self.sampling = sampling
        self.grammars = grammars
        num_rows = sampling.max_num_seqs
        self.token_ids: Tensor = _zero_int32(num_rows, config.row_len, device)
        """[R, L] prompt, output, then drafts of the current step."""
        self.num_tokens: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        """[R] token ids that are certain: later entries of `token_ids` mean nothing."""
        self.num_prompt_tokens: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        """[R]"""
        self.encoder_lens: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        """[R] tokens that the encoder has read, or reads in the row's first step."""
        self.adapter_slots: NDArray[np.int32] = np.full(num_rows, -1, dtype=np.int32)
        """[R] where each row's adapter is, -1 for none."""
        self.lora_slots: NDArray[np.int32] = np.full(num_rows, -1, dtype=np.int32)
        """[R] the same, but -1 where that adapter is in the network's weights."""
        self._merged_slot = -1
        self._num_fills: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self._late_failures: deque[tuple[int, int, RequestFailure]] = deque()
        self.failed: dict[int, RequestFailure] = {}
        """Row -> why its request cannot go on. It stays here until the row is freed: steps that were planned before
        the scheduler heard of the failure must leave the row alone."""
        self.media: dict[int, PromptMedia] = {}
        """Row -> what stands among the tokens of its prompt; only rows with media."""
        self.position_deltas: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        """[R] number that is added to the place of a token behind the prompt, for its position; where it is above 0,
        steps run op by op and it stands in `media` alone."""
        self.device_position_deltas: Tensor | None = None
        """The same on the device, for captured steps; None where all positions are places."""
        if config.rotates_by_axes:
            self.device_position_deltas = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.prompt_logprobs: dict[int, int] = {}
        """Row -> how many of the most likely tokens; only rows that asked."""
        self.block_tables = tuple(
            BlockTable(num_rows, _width(group.spec, config.row_len), group, device) for group in groups
        )
        """Per group; those of cross attention come last."""
        num_own = sum(not isinstance(group.spec, CrossAttentionSpec) for group in groups)
        self.encoder_tables = self.block_tables[num_own:]
        self.row_tables = tuple(
            RowTable(table.table, table.block_size, table.sliding_window) for table in self.block_tables[:num_own]
        )
        """The tables of the rows' own tokens, as op `step_inputs` takes them."""

    def apply(self, output: SchedulerOutput) -> None:
        """Free, fill and extend rows as the scheduler says. Freeing an empty row and filling a full one are fine, so
        that a step which failed later on can be followed by any other. A row that cannot be filled is the request's
        own fault: it is left empty and listed in `failed`.
        """
        for row in output.freed_rows:
            self.free(row)
        for new in output.new_rows:
            try:
                self.fill(new)
            except Exception as error:
                # Whatever a request's parameters do to the code that takes them in, it is that request's failure.
                self.free(new.row)
                self.failed[new.row] = RequestFailure.of(error)
        if output.new_block_ids:
            for group, table in enumerate(self.block_tables):
                table.append({row: ids[group] for row, ids in output.new_block_ids.items() if row not in self.failed})

    def for_decode(
        self, group_of_layer: tuple[int, ...], kv_caches: tuple[Tensor, ...], states: tuple[tuple[Tensor, ...], ...]
    ) -> DecodeRows:
        """The rows as op `decode_step` takes them, with the caches and the states of each layer."""
        return DecodeRows(
            token_ids=self.token_ids,
            num_tokens=self.num_tokens,
            tables=self.row_tables,
            num_blocks=tuple(table.num_blocks for table in self.block_tables[: len(self.row_tables)]),
            group_of_layer=group_of_layer,
            kv_caches=kv_caches,
            states=states,
            lora_slots=self.lora_slots,
            position_deltas=self.position_deltas,
            sample_table=self.sampling.sample_table,
        )

    def check(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Make sure that rows [S] have blocks for their first `ends` [S] tokens, and for what their encoders read.

        Raises:
            RuntimeError: one has not (a bug of the scheduler's side).
        """
        for table in self.block_tables[: len(self.row_tables)]:
            table.check(rows, ends)
        for table in self.encoder_tables:
            table.check(rows, self.encoder_lens[rows])

    def fill(self, new: NewRow) -> None:
        """Put a request in its row.

        Raises:
            ValueError: it does not fit.
        """
        self.free(new.row)
        num_tokens = len(new.token_ids)
        if num_tokens > self._max_model_len:
            raise ValueError(f"{num_tokens} tokens do not fit a context of {self._max_model_len} tokens")
        token_ids = np.asarray(new.token_ids, dtype=np.int32)
        self.token_ids[new.row, :num_tokens] = to_device(token_ids, self.token_ids.device)
        self.num_tokens[new.row] = num_tokens
        self.num_prompt_tokens[new.row] = new.num_prompt_tokens
        self.adapter_slots[new.row] = new.adapter_slot
        self.lora_slots[new.row] = -1 if new.adapter_slot == self._merged_slot else new.adapter_slot
        self.encoder_lens[new.row] = new.num_encoder_tokens
        for table, block_ids in zip(self.block_tables, new.block_ids, strict=True):
            table.fill(new.row, block_ids)
        if new.media is not None:
            self.media[new.row] = new.media
            self._set_position_delta(new.row, min(0, new.media.position_delta))
        if new.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs[new.row] = new.sampling_params.prompt_logprobs
        self.sampling.set_row(
            new.row,
            new.sampling_params,
            seed=new.seed,
            num_prompt_tokens=new.num_prompt_tokens,
            stop_token_ids=new.stop_token_ids,
            request_id=new.request_id,
        )
        self.grammars.fill(new)

    def _set_position_delta(self, row: int, delta: int) -> None:
        if self.position_deltas[row] != delta:
            self.position_deltas[row] = delta
            if self.device_position_deltas is not None:
                self.device_position_deltas[row] = delta

    def has_media_from(self, row: int, position: int) -> bool:
        """Whether tokens of a row, from a position on, take embeddings, see tokens behind them, or have positions that
        `position_deltas` does not tell."""
        media = self.media.get(row)
        if media is None:
            return False
        is_prompt = bool(media.positions) and position < self.num_prompt_tokens[row]
        read_end = max(media.spans[-1].read_end if media.spans else 0, media.prefix_len)
        return is_prompt or media.position_delta > 0 or position < read_end

    def write_next(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: Tensor) -> None:
        """Put sampled tokens behind the positions they were sampled from, where the next step gathers them. Whether
        they are certain is said by `num_tokens`, which this does not change.

        Args:
            rows: [N].
            positions: [N] position of the token whose successor was sampled.
            token_ids: [N], on the device.
        """
        if self.token_ids.device.type == "cpu":
            self.token_ids.numpy()[rows, positions + 1] = token_ids.numpy()
            return
        index = to_device(rows * self.row_len + positions + 1, self.token_ids.device)
        self.token_ids.view(-1).index_copy_(0, index, token_ids.to(torch.int32))

    def write(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        """Put tokens into a row from a position on."""
        tokens = to_device(np.asarray(token_ids, dtype=np.int32), self.token_ids.device)
        self.token_ids[row, position : position + len(token_ids)] = tokens

    def fills(self, rows: list[int]) -> list[int]:
        """Per row a number that tells its requests apart."""
        fills: list[int] = self._num_fills[rows].tolist()
        return fills

    def fail_late(self, row: int, fill: int, why: RequestFailure) -> None:
        """The request that was in the row when `fills` gave this number cannot go on. Taken note of by
        `take_late_failures`; other threads may call this."""
        self._late_failures.append((row, fill, why))

    def take_late_failures(self) -> None:
        """List in `failed` what was told to `fail_late`, of requests that are still in their rows."""
        while self._late_failures:
            row, fill, why = self._late_failures.popleft()
            if self._num_fills[row] == fill:
                self.failed[row] = why

    def history(self, row: int) -> array[int]:
        """The certain tokens of a row, on the host: an array of C integers, which drafters can search as bytes."""
        tokens = self.token_ids[row, : int(self.num_tokens[row])]
        return array("i", tokens.cpu().numpy().tobytes())

    def hide_slot(self, merged: int) -> None:
        """Rows whose adapter is in this slot are like those without one from now on; -1 for no such slot."""
        if merged != self._merged_slot:
            self._merged_slot = merged
            self.lora_slots[:] = np.where(self.adapter_slots == merged, -1, self.adapter_slots)

    def free(self, row: int) -> None:
        """Empty a row."""
        self._num_fills[row] += 1
        self.num_tokens[row] = 0
        self.num_prompt_tokens[row] = 0
        self.adapter_slots[row] = self.lora_slots[row] = -1
        self.encoder_lens[row] = 0
        self.failed.pop(row, None)
        self.media.pop(row, None)
        self._set_position_delta(row, 0)
        self.prompt_logprobs.pop(row, None)
        self.sampling.clear_row(row)
        self.grammars.free(row)
        for table in self.block_tables:
            table.clear(row)


def _width(spec: KVCacheSpec, row_len: int) -> int:
    """Blocks of the longest row."""
    return spec.max_blocks(0) if isinstance(spec, CrossAttentionSpec) else -(-row_len // spec.block_size)


def _window(spec: KVCacheSpec) -> int | None:
    """Tokens whose blocks a token may look at, itself included; None for all."""
    if isinstance(spec, MambaSpec):
        return 2  # the state before a token is in the block of the token before it
    if isinstance(spec, ChunkedLocalSpec):
        return spec.chunk_tokens  # at most: a chunk begins no further back
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec | SlidingLatentSpec) else None


def _zero_int32(num_rows: int, row_len: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # Zero pages from the system: rows that are never filled to their end take no memory.
        return torch.from_numpy(np.zeros((num_rows, row_len), dtype=np.int32))
    return torch.zeros(num_rows, row_len, dtype=torch.int32, device=device)
