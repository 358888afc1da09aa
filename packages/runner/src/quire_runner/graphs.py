"""Graphs of decode steps: one launch for a whole step, captured per padded number of rows when first needed.

A graph does the same again on the same memory. What differs between steps is in a small tensor that is written before
each, and in the persistent rows. Steps with fewer rows than a graph has are filled up with a row that nobody else has.

Nobody waits for a graph: steps run kernel by kernel until theirs is there. What a graph needs (kernels to compile,
libraries to choose algorithms) is first run once beside the steps, on rows of padding; capturing then takes about as
long as launching a step.

Knows how steps are numbered and padded; does not know what a step computes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_ops import fill_on_device

__all__ = ["CaptureStep", "ComputeStep", "CudaCapture", "DecodeGraphs"]

_logger = logging.getLogger(__name__)

Tokens = tuple[Tensor, Tensor]
"""Token ids [P] int64 and the largest logits [P] float32 of P rows."""
Replay = Callable[[], None]


class ComputeStep(Protocol):
    """A decode step, from numbers on the device."""

    def __call__(self, spans: Tensor, *, draws: bool) -> Tokens:
        """Compute the token at `spans[1, s]` of row `spans[0, s]` for each s, choose its successor and write it behind.

        Args:
            spans: As op `decode_inputs` takes them.
            draws: Tokens may be drawn; otherwise all are the most likely ones.
        """


class CaptureStep(Protocol):
    """Captures what a function does on the device."""

    def __call__(self, step: Callable[[], Tokens]) -> tuple[Replay, Tokens]:
        """Run `step` once, noting its work; nothing need be computed.

        Returns:
            What does the same work again on the same tensors, and where its results will be.
        """


class CudaCapture:
    """Captures CUDA graphs, which share their memory: only one of them runs at a time, and what it gives is copied."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Tokens]) -> tuple[Replay, Tokens]:
        """See `CaptureStep`."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on reading results and running kernels.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            tokens = step()
        return graph.replay, tokens


class _Key(NamedTuple):
    """What tells graphs apart."""

    size: int
    draws: bool


class _Graph(NamedTuple):
    spans: Tensor
    replay: Replay
    tokens: Tokens


class DecodeGraphs:
    """The graphs of a runner. One thread calls it.

    Args:
        compute: The step; it may be called in another thread, on padding.
        sizes: Numbers of rows that are captured.
        padding_row: The row of entries that stand for nothing.
        device: Where steps run.
        capture: Captures.
        in_background: Prepare graphs in a thread; otherwise when they are first wanted.
    """

    def __init__(
        self,
        compute: ComputeStep,
        sizes: Sequence[int],
        *,
        padding_row: int,
        device: torch.device,
        capture: CaptureStep,
        in_background: bool = True,
    ) -> None:
        self._compute = compute
        self._sizes = sorted(set(sizes))
        self._padding_row = padding_row
        self._device = device
        self._capture = capture
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-graphs") if in_background else None
        self._prepared: dict[_Key, Future[None]] = {}
        self._graphs: dict[_Key, _Graph] = {}
        self.failure: str | None = None
        """Why no more is captured."""

    @property
    def captured(self) -> tuple[tuple[int, bool], ...]:
        """(rows, whether tokens may be drawn) of each graph, in the order in which they were captured."""
        return tuple(self._graphs)

    def run(self, rows: NDArray[np.int64], starts: NDArray[np.int64], *, draws: bool) -> Tokens | None:
        """Run a step by its graph.

        Args:
            rows: [N], different ones.
            starts: [N] position of the token to compute.

        Returns:
            Token ids [N] and largest logits [N], of their own memory. None where there is no graph for it, or none
            yet: then nothing was done.
        """
        place = bisect_left(self._sizes, len(rows))
        if place == len(self._sizes):
            return None
        key = _Key(self._sizes[place], draws)
        graph = self._graphs.get(key) or self._make(key)
        if graph is None:
            return None
        fill_on_device(graph.spans, self._host_spans(key.size, rows, starts))
        graph.replay()
        token_ids, peaks = graph.tokens
        # The next step may write over them before they have been read.
        return token_ids[: len(rows)].clone(), peaks[: len(rows)].clone()

    def rehearse(self) -> None:
        """Run the step of every size once on padding, each way: what it needs is there from then on."""
        for size in self._sizes:
            for draws in (False, True):
                self._warm_up(_Key(size, draws))

    def wait(self) -> None:
        """Wait until everything is prepared that steps have wanted so far; for tools and tests."""
        wait(self._prepared.values())

    def close(self) -> None:
        """Let go of all graphs. Idempotent; `run` must not follow."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._graphs.clear()

    def _make(self, key: _Key) -> _Graph | None:
        """The graph, if it can be captured now."""
        if self.failure is not None:
            return None
        if key not in self._prepared:
            self._prepared[key] = self._prepare(key)
            return None  # this step is served at once
        prepared = self._prepared[key]
        if not prepared.done():
            return None
        try:
            prepared.result()
            self._graphs[key] = self._captured(key)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            _logger.warning(
                "decode steps of %d rows cannot be captured in a graph, and run kernel by kernel: %s",
                key.size,
                self.failure,
            )
        return self._graphs.get(key)

    def _prepare(self, key: _Key) -> Future[None]:
        if self._worker is not None:
            return self._worker.submit(self._warm_up, key)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.inference_mode()
    def _warm_up(self, key: _Key) -> None:
        self._compute(self._padding(key.size), draws=key.draws)

    def _captured(self, key: _Key) -> _Graph:
        spans = self._padding(key.size)
        # Whatever is kept for later steps is made now, by a step that runs.
        self._compute(spans, draws=key.draws)
        replay, tokens = self._capture(lambda: self._compute(spans, draws=key.draws))
        return _Graph(spans, replay, tokens)

    def _padding(self, size: int) -> Tensor:
        nobody = np.empty(0, dtype=np.int64)
        spans = torch.empty((4, size), dtype=torch.int64, device=self._device)
        fill_on_device(spans, self._host_spans(size, nobody, nobody))
        return spans

    def _host_spans(self, size: int, rows: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        spans = np.empty((4, size), dtype=np.int64)
        spans[0], spans[1], spans[3] = self._padding_row, 0, np.arange(size)
        spans[0, : len(rows)], spans[1, : len(starts)] = rows, starts
        spans[2] = spans[1] + 1
        return spans
