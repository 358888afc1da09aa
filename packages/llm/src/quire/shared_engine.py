"""`SharedEngine`: one engine for the calls of several threads.

Each call adds its requests and takes steps in turn with the others. A step serves the requests of every call, and its
outputs go to the calls they belong to, whoever took it. Knows no prompts and no settings.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from quire.lora_request import LoRARequest
from quire.media import HeldMedia
from quire.prompts import naming_prompt
from quire_engine import LLMEngine, PooledRequestOutput, RequestOutput
from quire_interfaces import (
    EngineDeadError,
    OverloadedError,
    PoolingParams,
    RenderedPrompt,
    RequestError,
    RequestOptions,
    SamplingParams,
)

__all__ = ["OfflineRequest", "SharedEngine"]


@dataclass(slots=True, kw_only=True)
class OfflineRequest:
    """One prompt of a call."""

    prompt: RenderedPrompt
    params: SamplingParams | PoolingParams
    options: RequestOptions
    lora_request: LoRARequest | None = None
    """What to load as `options.adapter` before the request is added, unless it is there."""
    media: HeldMedia | None = None
    """What stands in the prompt, released when the request has ended."""


class SharedEngine:
    """Runs batches of requests. Thread-safe.

    Args:
        engine: Owned from now on: `close` closes it.
        load_adapter: Called before a request with a `lora_request` is added, by the thread whose turn it is.
    """

    def __init__(self, engine: LLMEngine, load_adapter: Callable[[LoRARequest], None]) -> None:
        self._engine = engine
        self._load_adapter = load_adapter
        self._turn = _FairLock()
        self._calls: dict[str, _Call] = {}
        """By request id: whom its output is for."""
        self._is_closed = False
        self._is_torn = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[LLMEngine]:
        """The engine between two steps, for this thread alone. An interrupt (Ctrl-C) waits until the turn is over, so
        that it finds no step half done; a second one does not wait.

        Raises:
            EngineDeadError: the engine is closed, or was interrupted in the middle of a step.
        """
        with _interrupts_held(), self._turn:
            if self._is_closed:
                raise EngineDeadError("this LLM is closed; make another one")
            if self._is_torn:
                raise EngineDeadError("this LLM was interrupted in the middle of a step; make another one")
            yield self._engine

    def run(
        self, requests: Sequence[OfflineRequest], advance: Callable[[RequestOutput], None] = lambda output: None
    ) -> list[RequestOutput]:
        """All outputs, in the order of the requests.

        Args:
            requests: What to run.
            advance: Called with each output as it comes, by this thread.

        Raises:
            RequestError: one of them cannot run; the message says which one. The others are dropped.
            OverloadedError: the engine's queue takes none at all.
            EngineDeadError: the engine failed, or was closed meanwhile.
        """
        outputs = self._run(_Call(requests, len(requests)), advance)
        return cast(list[RequestOutput], outputs)

    def run_pooling(
        self,
        requests: Sequence[OfflineRequest],
        *,
        window: int,
        keeps_errors: bool = False,
        advance: Callable[[PooledRequestOutput], None] = lambda output: None,
    ) -> list[PooledRequestOutput]:
        """All outputs of requests that are pooled, in their order.

        Args:
            requests: What to run. Each is read once, in order, when it is its turn: a sequence may make them then.
            window: Most requests that are in the engine at a time.
            keeps_errors: A request that cannot run has its error as its output, and the others go on.
            advance: Called with each output as it comes, by this thread.

        Raises:
            RequestError: one of them cannot run; the message says which one. The others are dropped.
            QuireError: the engine could not compute one of them.
            OverloadedError: the engine's queue takes none at all.
            EngineDeadError: the engine failed, or was closed meanwhile.
        """
        call = _Call(requests, window, keeps_errors=keeps_errors)
        return cast(list[PooledRequestOutput], self._run(call, advance))

    def _run(self, call: _Call, advance: Callable[[Any], None]) -> list[Output | None]:
        """All outputs of a call."""
        try:
            while call.num_left:
                call.make_ready()
                with self.turn() as engine:
                    self._admit(call, engine)
                    if call.num_left:
                        self._step(engine)
                while call.new_outputs:
                    output = call.new_outputs.popleft()
                    call.check(output)
                    advance(output)
        finally:
            if call.places:
                self._drop(call)
        return call.outputs

    def close(self) -> None:
        """Close the engine between two steps; calls that wait for outputs raise EngineDeadError. Idempotent."""
        with _interrupts_held(), self._turn:
            self._is_closed = True
            self._engine.close()

    def _admit(self, call: _Call, engine: LLMEngine) -> None:
        """Queue as many of its requests as the engine takes."""
        while call.ready:
            place, request = call.ready[0]
            try:
                with naming_prompt(place, len(call.requests)):
                    if request.lora_request is not None:
                        self._load_adapter(request.lora_request)
                    request_id = engine.add_request(request.prompt, request.params, request.options)
            except OverloadedError:
                if not engine.has_unfinished_requests():
                    raise
                return
            except RequestError as error:
                call.refuse(place, error)
            else:
                call.places[request_id] = place
                if request.media is not None:
                    call.media[request_id] = request.media
                self._calls[request_id] = call
            call.ready.popleft()

    def _step(self, engine: LLMEngine) -> None:
        try:
            outputs = engine.step()
        except Exception:
            raise
        except BaseException:
            self._is_torn = True
            raise
        for output in outputs:
            call = self._calls.pop(output.request_id, None)
            if call is not None:
                call.take(output)

    def _drop(self, call: _Call) -> None:
        with _interrupts_held(), self._turn:
            for request_id in call.places:
                self._calls.pop(request_id, None)
            if not (self._is_closed or self._is_torn):
                self._engine.abort(call.places)


Output = RequestOutput | PooledRequestOutput


@dataclass(slots=True)
class _Call:
    """A batch of requests and what came of it."""

    requests: Sequence[OfflineRequest]
    window: int
    """Most requests that were read and have no output yet."""
    keeps_errors: bool = False
    """A request that fails does not end the call."""
    num_read: int = 0
    """Number of requests that were taken from the sequence."""
    num_left: int = 0
    """Number of requests without an output."""
    ready: deque[tuple[int, OfflineRequest]] = field(default_factory=deque)
    """Requests to be queued, each with its index."""
    places: dict[str, int] = field(default_factory=dict)
    """Index of each request that runs, by its id."""
    media: dict[str, HeldMedia] = field(default_factory=dict)
    """What stands in the prompts of requests that run, by their ids."""
    outputs: list[Output | None] = field(default_factory=list)
    new_outputs: deque[Output] = field(default_factory=deque)
    """Outputs that the caller has not seen."""

    def __post_init__(self) -> None:
        self.num_left = len(self.requests)
        self.outputs = [None] * len(self.requests)

    def make_ready(self) -> None:
        """Read as many requests as the window has room for."""
        while self.num_read < len(self.requests) and len(self.ready) + len(self.places) < self.window:
            place = self.num_read
            self.num_read += 1
            try:
                with naming_prompt(place, len(self.requests)):
                    self.ready.append((place, self.requests[place]))
            except RequestError as error:
                self.refuse(place, error)

    def refuse(self, place: int, error: RequestError) -> None:
        """A request cannot run: that is its output, or the end of the call, with the error."""
        if not self.keeps_errors:
            raise error
        name = f"request[{place}]"
        output = PooledRequestOutput(request_id=name, packed_token_ids=b"", pooled=None, error=error)
        self.places[name] = place
        self.take(output)

    def check(self, output: Output) -> None:
        """Raise the error of a pooled request that failed, unless errors are kept."""
        if isinstance(output, PooledRequestOutput) and output.error is not None and not self.keeps_errors:
            raise output.error

    def take(self, output: Output) -> None:
        self.outputs[self.places.pop(output.request_id)] = output
        if (media := self.media.pop(output.request_id, None)) is not None:
            media.release()
        self.new_outputs.append(output)
        self.num_left -= 1


class _FairLock:
    """A lock that threads get in the order in which they asked: one that takes step after step would else keep it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._owner == me:
                raise RuntimeError("an LLM was called from within its own step, by a logits processor for instance")
            if self._owner is None:
                self._owner = me
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:
            with self._mutex:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                else:  # it was this thread's turn already
                    self._pass_on()
            raise
        self._owner = me

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._owner = -1  # of the thread that wakes up
            self._waiting.popleft().release()
        else:
            self._owner = None


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """SIGINT has its effect at the end of the block; a second one has it at once. Only the main thread gets any."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    pending: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        pending.append((number, frame))
        if len(pending) > 1:
            previous(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if len(pending) == 1:
            previous(*pending[0])
