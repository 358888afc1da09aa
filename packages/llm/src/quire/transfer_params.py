"""What requests say of their keys and values, and whether an engine takes it."""

from __future__ import annotations

from quire_engine import EngineInfo
from quire_interfaces import RequestError, SamplingParams

__all__ = ["KV_CONNECTOR", "check_transfer"]

KV_CONNECTOR = "kv_connector"
"""In `EngineInfo.extra`: name of the connector that knows requests."""


def check_transfer(params: SamplingParams, info: EngineInfo) -> None:
    """Refuse `kv_transfer_params` that nothing of the engine reads.

    Raises:
        RequestError: there are some, and the engine has no connector that knows requests.
    """
    if params.extra_args and params.extra_args.get("kv_transfer_params") and KV_CONNECTOR not in info.extra:
        raise _not_taken()


def _not_taken() -> RequestError:
    return RequestError(
        "this engine neither sends keys and values to others nor takes them: leave kv_transfer_params out, or start it "
        "with --kv-transfer-config",
        param="kv_transfer_params",
        code="unsupported",
    )
