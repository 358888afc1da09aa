"""Graphs of decode steps: one launch for a whole step, captured per padded number of tokens when first needed.

A graph does the same again on the same memory. What differs between steps is in a small tensor that is written before
each, and in the persistent rows. Steps with fewer tokens than a graph has are filled up with a row that nobody else
has. A row may be in a step with several tokens: drafts behind its last known one, which the same step verifies.

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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces.platforms import platform_of_type
from quire_ops import LoraTokens, fill_on_device
from quire_sampling import SampleMode

__all__ = ["CaptureStep", "ComputeStep", "DecodeGraph", "DecodeGraphs", "GraphCapture"]

_logger = logging.getLogger(__name__)

Tokens = tuple[Tensor, ...]
"""Token ids [P] int64 and the largest logits [P] float32 of P rows; where rows are observed, log probabilities behind
them (`Sampler.sample_in_mode`)."""
Replay = Callable[[], None]
Ints = NDArray[np.int64]


class ComputeStep(Protocol):
    """A decode step, from numbers on the device."""

    def __call__(
        self, spans: Tensor, mode: SampleMode, features: Tensor | None, lora: LoraTokens | None = None
    ) -> Tokens:
        """Compute the token at `spans[1, s]` of row `spans[0, s]` for each s, choose its successor and write it behind.

        Args:
            spans: [5, P] int64: four rows as op `decode_inputs` takes them, and which mask each token gets, -1 for
                none.
            mode: How tokens are chosen.
            features: [P, width] gets what a drafter reads of the step; None where nobody reads any.
            lora: Which tokens have adapters, in memory that stays where it is (`StepAdapters.captured_tokens_of`); None
                for none.
        """


class CaptureStep(Protocol):
    """Captures what a function does on the device."""

    def __call__(self, step: Callable[[], Tokens]) -> tuple[Replay, Tokens]:
        """Run `step` once, noting its work; nothing need be computed.

        Returns:
            What does the same work again on the same tensors, and where its results will be.
        """


class GraphCapture:
    """Captures CUDA graphs, which share their memory: only one of them runs at a time, and what it gives is copied.

    Args:
        runtime: `Platform.runtime` of a platform with graphs.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._pool = runtime.graph_pool_handle()

    def __call__(self, step: Callable[[], Tokens]) -> tuple[Replay, Tokens]:
        """Capture the work of `step` as a graph. Returns what replays it, and where its tokens will be."""
        graph = self._runtime.CUDAGraph()
        # Other threads may go on reading results and running kernels.
        with self._runtime.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            tokens = step()
        return graph.replay, tokens


class _GraphKey(NamedTuple):
    """What tells graphs apart."""

    size: int
    mode: SampleMode
    adapted: bool = False
    """Rows may have adapters."""


class DecodeGraph(NamedTuple):
    """A captured step of some number of rows."""

    spans: Tensor
    replay: Replay
    tokens: Tokens
    padding_row: int

    def run(self, rows: Ints, starts: Ints, mask_of: Ints | None = None) -> Tokens:
        """Run a step.

        Args:
            rows: [N]; at most as many as the graph has.
            starts: [N] position of the token to compute, different ones for the same row. All keys and values are
                stored before any token attends, so tokens of a row see those before them.
            mask_of: [N] which mask each gets, -1 for none; None for none at all.

        Returns:
            Token ids [N], largest logits [N] and what else the step gives of each, of their own memory.
        """
        fill_on_device(self.spans, _host_spans(self.spans.shape[1], self.padding_row, rows, starts, mask_of))
        self.replay()
        # The next step may write over them before they have been read.
        return tuple(each[: len(rows)].clone() for each in self.tokens)


class DecodeGraphs:
    """The graphs of a runner. One thread calls it.

    Args:
        compute: The step; it may be called in another thread, on padding.
        sizes: Numbers of rows that are captured.
        modes: Sample modes that `compute` knows.
        padding_row: The row of entries that stand for nothing.
        device: Where steps run.
        capture: Captures.
        features: [largest size, width] where steps leave what a drafter reads of them; None without such a drafter.
        in_background: Prepare graphs in a thread; otherwise when they are first wanted.
    """

    def __init__(
        self,
        compute: ComputeStep,
        sizes: Sequence[int],
        modes: Sequence[SampleMode],
        *,
        padding_row: int,
        device: torch.device,
        capture: CaptureStep,
        features: Tensor | None = None,
        in_background: bool = True,
    ) -> None:
        self._compute = compute
        self._sizes = sorted(set(sizes))
        self._modes = modes
        self._padding_row = padding_row
        self._device = device
        self._capture = capture
        self.features = features
        """[largest size, width] what a drafter reads of the step that a graph served last, in the order of its entries;
        all graphs write to it."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-graphs") if in_background else None
        self._prepared: dict[_GraphKey, Future[None]] = {}
        self._graphs: dict[_GraphKey, DecodeGraph] = {}
        self.failure: str | None = None
        """Why no more is captured."""

    @property
    def captured(self) -> tuple[tuple[int, SampleMode], ...]:
        """(rows, sample mode) of each graph, in the order in which they were captured."""
        return tuple((key.size, key.mode) for key in self._graphs)

    def size_for(self, num_rows: int) -> int | None:
        """Rows of the graph for a step of so many; None where there is none."""
        place = bisect_left(self._sizes, num_rows)
        return None if place == len(self._sizes) else self._sizes[place]

    def find(self, num_rows: int, mode: SampleMode, lora: LoraTokens | None = None) -> DecodeGraph | None:
        """The graph for a step of so many rows. None where there is none, or none yet: the step is to be run without
        one, and brings it nearer.

        Args:
            num_rows: Rows.
            mode: How their tokens are chosen.
            lora: Which tokens have adapters, for a graph of `size_for(num_rows)` tokens; None for none.
        """
        size = self.size_for(num_rows)
        if size is None or mode not in self._modes:
            return None
        key = _GraphKey(size, mode, lora is not None)
        return self._graphs.get(key) or self._make(key, lora)

    def warm_up(self) -> None:
        """Run the step of every size once on padding, each way: what it needs is there from then on. What edits logits
        is the same for every size."""
        for size in self._sizes:
            for mode in self._modes:
                if mode < SampleMode.EDITED or size == self._sizes[0]:
                    self._warm_up(_GraphKey(size, mode))

    def wait(self) -> None:
        """Wait until everything is prepared that steps have wanted so far; for tools and tests."""
        wait(self._prepared.values())

    def close(self) -> None:
        """Let go of all graphs. Idempotent; `run` must not follow."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._graphs.clear()

    def _make(self, key: _GraphKey, lora: LoraTokens | None) -> DecodeGraph | None:
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
            self._graphs[key] = self._captured(key, lora)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            _logger.warning(
                "decode steps of %d rows cannot be captured in a graph, and run kernel by kernel: %s",
                key.size,
                self.failure,
            )
        return self._graphs.get(key)

    def _prepare(self, key: _GraphKey) -> Future[None]:
        if self._worker is not None:
            return self._worker.submit(self._warm_up, key)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.inference_mode()
    def _warm_up(self, key: _GraphKey) -> None:
        platform_of_type(self._device.type).use(str(self._device))
        # Beside steps, whose features are not to be written over.
        self._compute(self._padding(key.size), key.mode, None)

    def _captured(self, key: _GraphKey, lora: LoraTokens | None) -> DecodeGraph:
        spans = self._padding(key.size)
        features = None if self.features is None else self.features[: key.size]
        # Whatever is kept for later steps is made now, by a step that runs.
        self._compute(spans, key.mode, features, lora)
        replay, tokens = self._capture(lambda: self._compute(spans, key.mode, features, lora))
        return DecodeGraph(spans, replay, tokens, self._padding_row)

    def _padding(self, size: int) -> Tensor:
        nobody = np.empty(0, dtype=np.int64)
        spans = torch.empty((5, size), dtype=torch.int64, device=self._device)
        fill_on_device(spans, _host_spans(size, self._padding_row, nobody, nobody, None))
        return spans


def _host_spans(size: int, padding_row: int, rows: Ints, starts: Ints, mask_of: Ints | None) -> Ints:
    spans = np.empty((5, size), dtype=np.int64)
    spans[0], spans[1], spans[3], spans[4] = padding_row, 0, np.arange(size), -1
    spans[0, : len(rows)], spans[1, : len(starts)] = rows, starts
    spans[2] = spans[1] + 1
    if mask_of is not None:
        spans[4, : len(mask_of)] = mask_of
    return spans
