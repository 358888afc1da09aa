"""The seam of connectors: keys and values of single requests that another engine has, or is to get.

A *tier* (`KVConnector`) is content-addressed: it has blocks, and knows no requests. A connector knows requests: a
client or a router says with a request, in its `kv_transfer_params`, where its prompt was computed, and the blocks are
fetched from there; or that another engine goes on with it, and the blocks are held until that one has them.

A connector has two halves, as a tier. `RequestConnector` sits beside the scheduler and knows no bytes;
`RequestConnectorWorker` sits beside the runner and copies bytes. They speak through the steps, by `KVTransferPlan`:
jobs (loads and holds) and the connector's own metadata. Methods have the names that vLLM gives those of the same
meaning in its `KVConnectorBase_V1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quire_interfaces.kv_transfer import BlockMemory, KVTransferJob
from quire_interfaces.request import Request

__all__ = ["RequestConnector", "RequestConnectorWorker", "kv_transfer_params_of"]


def kv_transfer_params_of(request: Request) -> Mapping[str, Any]:
    """What the request says of its keys and values; empty where it says nothing.

    They are in `SamplingParams.extra_args["kv_transfer_params"]`, where `LLM.generate` takes them as well.
    """
    params: Mapping[str, Any] = (request.sampling_params.extra_args or {}).get("kv_transfer_params") or {}
    return params


class RequestConnector(Protocol):
    """The scheduler's half. Calls are cheap: they are made while a step is planned."""

    def check(self, request: Request) -> None:
        """Called before a request is queued.

        Raises:
            RequestError: its `kv_transfer_params` make no sense.
        """

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Number of tokens behind the first `num_computed_tokens`, which are in memory, that can be loaded: whole
        blocks. None while that is not known: the request waits, and the question comes again with the next step. Not
        asked again once there was an answer."""

    def update_state_after_alloc(self, request: Request, job: KVTransferJob) -> None:
        """There are blocks to load into: `job` goes to the worker with the next step, and the request waits for it."""

    def request_finished(self, request: Request, job: KVTransferJob | None) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; see its `finish_reason`.

        Args:
            request: The request, whose blocks are free but for those of `job`.
            job: Its cached blocks; None where there are none, or where it was aborted or failed.

        Returns:
            Whether they are to be held until the worker reports the job, and what the client is to hand on
            (`kv_transfer_params` of the answer).
        """

    def build_connector_meta(self) -> bytes | None:
        """What the worker has to know with the next step beside the jobs; None for nothing. Called once per step."""

    def make_worker(self, memory: BlockMemory) -> RequestConnectorWorker:
        """The other half, beside the memory of the KV cache."""


class RequestConnectorWorker(Protocol):
    """The runner's half. One thread calls it; copying goes on in others."""

    def begin(self, loads: Sequence[KVTransferJob], holds: Sequence[KVTransferJob], metadata: bytes | None) -> None:
        """Start the jobs of a step, before the step runs: what earlier steps wrote is there. Never raises: what cannot
        be done is reported as not arrived."""

    def get_finished(self, waits: bool = False) -> dict[int, list[bool]]:
        """Jobs that have ended since the last call, each once: of a load, whether each block arrived; of a hold, an
        empty list. Nothing touches their blocks from now on. With `waits`, and jobs under way, it may take some
        milliseconds until one of them ends."""

    def late_loads(self) -> list[int]:
        """Loads that make no progress: not worth waiting for. They end some time, and are reported then."""

    def close(self) -> None:
        """End all threads and connections, within a bounded time; the memory is not touched afterwards. Idempotent."""
