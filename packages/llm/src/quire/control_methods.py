"""What `LLM` offers between requests: calls of its ranks, and profiles of what they compute, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.shared_engine import SharedEngine
from quire_interfaces import RequestError

__all__ = ["ControlMethods"]


class ControlMethods:
    """The methods of `LLM` that its ranks answer between two steps."""

    _shared: SharedEngine

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Have every rank do a call, one of a fixed list (`quire.parallel.collective_rpc.RANK_CALLS`).

        Args:
            method: Its name. Functions are not taken: ranks are other processes.
            timeout: Of vLLM; a rank that is gone ends the call anyway.
            args: Its arguments.
            kwargs: Its named arguments.

        Returns:
            What each rank returned, rank 0 first.

        Raises:
            RequestError: there is no such call, or it refuses.
        """
        if not isinstance(method, str):
            raise RequestError(
                f"method must be the name of a call that ranks know, got {type(method).__name__}", param="method"
            )
        with self._shared.turn() as engine:
            return engine.collective_rpc(method, list(args), dict(kwargs or {}))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record what all ranks compute, as the setting `profiler_config` says.

        Args:
            profile_prefix: Stands before the names of the files.

        Raises:
            RequestError: there is no profiler, or it runs already.
        """
        self.collective_rpc("start_profile", args=[] if profile_prefix is None else [profile_prefix])

    def stop_profile(self) -> list[str]:
        """End the recording, and write the traces. Their paths, each on the host of its rank.

        Raises:
            RequestError: the profiler does not run.
        """
        return [path for paths in self.collective_rpc("stop_profile") for path in paths]
