"""`EngineClient`: all that a front may ask of an engine, wherever the engine runs, and however many stand behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from quire_engine.messages import AddRequest, EngineInfo
from quire_engine.streams import OutputStream
from quire_interfaces import AdapterInfo, FinishReason, SchedulerStats
from quire_interfaces.engine_watch import RequestRecord, WatchCursor, WatchReport

__all__ = ["PAUSE_MODES", "EngineClient", "PauseMode"]

PauseMode = Literal["keep", "wait", "abort"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class EngineClient(Protocol):
    """Requests in, streams of outputs back, control calls. All calls from one event loop.

    Whatever talks to the engine raises EngineDeadError once there is none, and when an answer does not come in time.
    """

    @property
    def info(self) -> EngineInfo | None:
        """Facts about the engine; None until it is ready for the first time."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """Name -> folder of each adapter that requests may choose; the same again after a restart of the engine."""

    async def ready(self) -> EngineInfo:
        """Wait until the engine takes requests.

        Raises:
            EngineDeadError: it could not start; the message carries its cause and remedy.
        """

    # Requests.

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        """Send requests that share one stream (the n completions of a prompt). Ids must never have been used before.

        Raises:
            OverloadedError: too many requests are in flight.
            RequestError: an id is in use, or a request holds something that cannot be sent.
            EngineDeadError: there is no engine.
        """

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests before the engine's next step; their streams end with `reason`. Unknown ids are ignored."""

    def abort_all(self) -> None:
        """End every request in flight."""

    def num_requests(self) -> int:
        """Number of requests in flight; each of n completions counts."""

    # Holding requests, giving memory back.

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        """Hold new requests until `resume`, and return when nothing runs any more.

        Args:
            mode: What becomes of running requests: "keep" holds them where they are, "wait" waits for their end,
                "abort" ends them, and those that wait, with `FinishReason.ABORT`.
            clear_cache: Forget all cached blocks then; what is held is computed anew.

        Raises:
            RequestError: there is no such mode, or the engine sleeps.
        """

    async def resume(self) -> None:
        """Undo `pause`.

        Raises:
            RequestError: the engine sleeps.
        """

    async def is_paused(self) -> bool:
        """Whether new requests are held, by `pause` or by `sleep`."""

    async def sleep(self, level: int = 1) -> int:
        """Hold all requests until `wake_up`.

        Args:
            level: 0 keeps everything where it is. 1 forgets the KV cache and gives its memory back. 2 discards the
                weights as well.

        Returns:
            Number of bytes given back.

        Raises:
            RequestError: a level that this engine cannot have.
        """

    async def wake_up(self, tags: Sequence[str] = ()) -> int | None:
        """Undo `sleep`. Nothing happens when the engine is awake. Arguments, result and errors as those of
        `EngineCore.wake_up`."""

    async def sleep_level(self) -> int | None:
        """Level of the sleep; None while the engine is awake."""

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks.

        Args:
            preempt_running: Preempt running requests first, whose blocks are in use.

        Returns:
            Whether it worked: it does not while blocks are in use.
        """

    async def reset_encoder_cache(self) -> bool:
        """Forget the embeddings of media that no running request needs.

        Returns:
            Whether none are left: some are while running requests need them.
        """

    # Adapters.

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Read an adapter and serve it under a name from now on; see `quire_interfaces.AdapterStore.load`.

        Raises:
            RequestError: the name is taken, the files cannot be used, or the engine serves no adapters.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget the name of an adapter; requests that run with it keep it.

        Raises:
            ModelNotFoundError: no adapter has this name.
        """

    # Looking into engines.

    async def engine_ranks(self) -> list[int]:
        """Ranks of the engines that may be watched."""

    async def watch(self, rank: int, watcher: str, cursor: WatchCursor) -> WatchReport:
        """What has happened in an engine since a cursor. It notes what happens while somebody fetches reports.

        Args:
            rank: Of the engine.
            watcher: Name of who looks, the same for each report.
            cursor: Of the last report.

        Raises:
            RequestError: there is no engine of this rank.
        """

    async def leave_watch(self, watcher: str) -> None:
        """Fetch no more reports of any engine."""

    async def explain_request(self, request_id: str) -> RequestRecord | None:
        """What the engines know of a request in flight; None for one that none of them has."""

    async def collective_rpc(
        self, method: str, arguments: Sequence[Any] = (), named: Mapping[str, Any] = {}
    ) -> list[list[Any]]:
        """Have all ranks of all engines do a call between two steps.

        Args:
            method: Its name, one of those that ranks know.
            arguments: Plain data.
            named: The same, by name.

        Returns:
            For each engine, what each of its ranks returned.

        Raises:
            RequestError: there is no such call, or it refuses.
        """

    async def reconfigure(self, values: Mapping[str, Any]) -> None:
        """Change settings of all engines while they run, or of none. Engines that start later have them as well.

        Args:
            values: Name -> value of all that are to be others than at the start; none for those of the start.

        Raises:
            RequestError: a value is not possible.
        """

    # Health.

    async def stats(self) -> SchedulerStats:
        """Counters and gauges of this moment; counters go on over restarts of the engine."""

    async def ping(self) -> float:
        """Round trip to the step loop, in seconds."""

    async def check_integrity(self) -> str | None:
        """None when the engine's bookkeeping is consistent, else what is wrong."""

    def check_health(self) -> None:
        """Raise when the engine is gone.

        Raises:
            EngineDeadError: the engine has failed, or was shut down.
        """

    @property
    def is_loading(self) -> bool:
        """Whether the engine starts, or starts again; requests wait for it."""

    @property
    def is_resting(self) -> bool:
        """`is_paused`, as far as this client has paused the engine or put it to sleep; asks nobody."""

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has taken no step for `stall_timeout_s` though it has requests."""

    @property
    def stalled_s(self) -> float:
        """Seconds without a step though the engine has requests; 0.0 while it loads or rests."""

    # The end.

    async def shutdown(self, drain_s: float | None = None) -> None:
        """Stop the engine. Idempotent.

        Args:
            drain_s: Seconds that requests in flight get to finish; None for as many as configured.
        """
