"""Graphs of decode steps: one launch for a whole step, captured per padded number of tokens before the first request.

A graph does the same again on the same memory. What differs between steps is in a small tensor that is written before
each, and in the persistent rows. Steps with fewer tokens than a graph has are filled up with a row that nobody else
has. A row may be in a step with several tokens: drafts behind its last known one, which the same step verifies.

Capturing holds the thread that runs steps for about as long as launching two steps kernel by kernel. So it is done
before the first request, in the order in which graphs are likely to be used, as far as time and memory go; then while
no step waits; and while steps run at most once in a while, for a step that wants it. Steps run kernel by kernel until
their graph is there. What a graph needs (kernels to compile, libraries to choose algorithms) is first run once beside
the steps, on rows of padding.

Knows how steps are numbered and padded; does not know what a step computes.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces.platforms import platform_of_type
from quire_ops import LoraTokens, fill_on_device
from quire_sampling import SampleMode

__all__ = ["AgreeOnAll", "CaptureStep", "ComputeStep", "DecodeGraph", "DecodeGraphs", "GraphCapture"]

_logger = logging.getLogger(__name__)

STEPS_WITHOUT_MEMORY = 256
"""Steps that want a graph between two questions whether there is memory for one more. Counted, since ranks that share
a network have to ask at the same step, and their clocks differ."""
Tokens = tuple[Tensor, ...]
"""Token ids [P] int64 and the largest logits [P] float32 of P rows; where rows are observed, log probabilities behind
them (`Sampler.sample_in_mode`)."""
Replay = Callable[[], None]
AgreeOnAll = Callable[[bool], bool]
"""Given whether something is so on this rank, whether it is on all; all ranks call it."""
MakeLora = Callable[[int], LoraTokens | None]
Ints = NDArray[np.int64]


class ComputeStep(Protocol):
    """A decode step, from numbers on the device."""

    def __call__(
        self, spans: Tensor, mode: SampleMode, features: Tensor | None, lora: LoraTokens | None = None
    ) -> Tokens:
        """Compute the token at `spans[1, s]` of row `spans[0, s]` for each s, choose its successor and write it behind.

        Args:
            spans: [5, P] int64: four rows as op `decode_inputs` takes them, and which mask each token gets, -1 for
                none. Of steps with prompts as `mixed_graphs.py` lays them out.
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
        spans = _host_spans(self.spans.shape[1], self.padding_row, rows, starts, mask_of)
        return self.run_spans(spans, len(rows))

    def run_spans(self, spans: Ints, num_rows: int) -> Tokens:
        """Run a step whose numbers, of the shape of `spans`, are laid out already. Returns the first `num_rows` of what
        `run` gives."""
        fill_on_device(self.spans, spans)
        self.replay()
        # The next step may write over them before they have been read.
        return tuple(each[:num_rows].clone() for each in self.tokens)


# Many attributes: what steps are computed and captured by, what is prepared and what is captured, and when next.
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
        pause_s: Least time between two captures that hold up steps, in seconds.
        has_memory: Asked before each capture whether there is memory for one more graph.
        clock: Gives seconds.
        pad: Makes the numbers [?, size] of a step of nothing but padding; None for those of decode steps.
        steps: What the steps are, for messages.
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
        pause_s: float = 0.0,
        has_memory: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        pad: Callable[[int], Ints] | None = None,
        steps: str = "decode steps",
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
        self.pause_s = pause_s
        self._has_memory = has_memory
        self._clock = clock
        self._pad = pad or self._all_padding
        self._steps = steps
        self._last_capture_s = -math.inf
        self._steps_until_asked = 0
        """About memory."""
        self._lora_of: MakeLora | None = None
        self._agree: AgreeOnAll | None = None
        """Of ranks that share a network."""
        self._left: dict[_GraphKey, None] = {}
        """What `capture` had no time or memory for, in order of use."""
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

    @property
    def has_left(self) -> bool:
        """Whether `capture_left` has something to do."""
        return bool(self._left) and self.failure is None

    @torch.inference_mode()
    def capture(self, seconds: float, lora_of: MakeLora | None = None) -> None:
        """Capture graphs in order of use, small steps and those without edits first, until all are there or a bound is
        reached. Those that are left are captured by `capture_left`, or when steps want them.

        Args:
            seconds: Time for it; one capture more is not begun where it would probably exceed it.
            lora_of: Gives what a graph of so many tokens with adapters reads (`StepAdapters.captured_tokens_of`), or
                None where there cannot be one. Without it, only graphs without adapters are captured.
        """
        begin_s, longest_s = self._clock(), 0.0
        self._lora_of = lora_of
        self._left = dict.fromkeys(self._in_order_of_use(lora_of is not None))
        while self.has_left and self._clock() - begin_s + longest_s < seconds:
            before_s = self._clock()
            self.capture_left()
            longest_s = max(longest_s, self._clock() - before_s)

    @torch.inference_mode()
    def capture_left(self) -> None:
        """Capture one of the graphs that are left, one that steps have wanted before others. While no step waits.
        Without memory for one more, none is left."""
        if not self._has_memory():
            self._left.clear()
            return
        ready = [key for key in self._left if key not in self._prepared or self._prepared[key].done()]
        if not ready:
            return
        key = next((key for key in ready if key in self._prepared), ready[0])
        lora = self._lora_of(key.size) if key.adapted and self._lora_of is not None else None
        if key.adapted and lora is None:
            del self._left[key]
        else:
            self._try_capture(key, lora)

    def follow_steps(self, agree: AgreeOnAll) -> None:
        """Let steps alone decide what is captured and when, whatever the time. Ranks that share a network get the same
        steps, and have to launch the same collectives in the same order, in one thread: so a graph that one of them
        has no memory for is captured by none until all have it, and after one that one of them cannot capture, none
        is."""
        self._worker, self.pause_s, self._agree = None, 0.0, agree

    def _in_order_of_use(self, has_adapters: bool) -> list[_GraphKey]:
        keys = [
            _GraphKey(size, mode, adapted)
            for adapted in (False, True)[: 1 + has_adapters]
            for mode in self._modes
            for size in self._sizes
        ]
        # Greedy and sampled requests are equally likely.
        return sorted(keys, key=lambda key: (key.adapted, max(key.mode, SampleMode.SAMPLED), key.size, key.mode))

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
        self._left.clear()

    def _make(self, key: _GraphKey, lora: LoraTokens | None) -> DecodeGraph | None:
        """The graph, if it can be captured now."""
        if self.failure is not None:
            return None
        if key not in self._prepared:
            self._prepared[key] = self._prepare(key)
            return None  # this step is served at once
        if not self._prepared[key].done() or self._clock() - self._last_capture_s < self.pause_s:
            return None
        if self._steps_until_asked > 0:
            self._steps_until_asked -= 1
            return None
        has_memory = self._has_memory()
        if not (has_memory if self._agree is None else self._agree(has_memory)):
            self._steps_until_asked = STEPS_WITHOUT_MEMORY
            return None
        self._try_capture(key, lora)
        return self._graphs.get(key)

    def _try_capture(self, key: _GraphKey, lora: LoraTokens | None) -> None:
        """Capture a graph; after a failure none is captured any more.

        Raises:
            Exception: Of ranks that share a network, what a step of padding raised on this one: the others may wait for
                it within that step, so it is a failure like that of any step.
        """
        self.failure = self._captured(key, lora)
        if self.failure is not None:
            _logger.warning(
                "%s of %d tokens cannot be captured in a graph, and run kernel by kernel: %s",
                self._steps,
                key.size,
                self.failure,
            )
        self._left.pop(key, None)
        self._last_capture_s = self._clock()

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

    def _captured(self, key: _GraphKey, lora: LoraTokens | None) -> str | None:
        """Capture a graph, on all ranks or on none. Returns why there is none."""
        agree, graph, failure = self._agree, None, None
        try:
            if key in self._prepared:
                self._prepared[key].result()
            spans = self._padding(key.size)
            features = None if self.features is None else self.features[: key.size]
            step = partial(self._compute, spans, key.mode, features, lora)
            step()  # whatever is kept for later steps is made now
        except Exception as error:
            if agree is not None:
                raise
            return f"{type(error).__name__}: {error}"
        try:
            graph = DecodeGraph(spans, *self._capture(step), self._padding_row)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if agree is not None and not agree(failure is None):
            return failure or "another rank could not capture it"
        if graph is not None:
            self._graphs[key] = graph
        return failure

    def _padding(self, size: int) -> Tensor:
        padding = self._pad(size)
        spans = torch.empty(padding.shape, dtype=torch.int64, device=self._device)
        fill_on_device(spans, padding)
        return spans

    def _all_padding(self, size: int) -> Ints:
        nobody = np.empty(0, dtype=np.int64)
        return _host_spans(size, self._padding_row, nobody, nobody, None)


def _host_spans(size: int, padding_row: int, rows: Ints, starts: Ints, mask_of: Ints | None) -> Ints:
    spans = np.empty((5, size), dtype=np.int64)
    spans[0], spans[1], spans[3], spans[4] = padding_row, 0, np.arange(size), -1
    spans[0, : len(rows)], spans[1, : len(starts)] = rows, starts
    spans[2] = spans[1] + 1
    if mask_of is not None:
        spans[4, : len(mask_of)] = mask_of
    return spans
