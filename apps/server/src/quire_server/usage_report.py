"""`GET /v1/usage`: what the caller has used, by day, and what is left of its limits; administrators see all tenants."""

from __future__ import annotations

import reprlib
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import RequestError
from quire_server.callers import Caller
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.openapi import Query
from quire_server.usage import MAX_DAYS, Usage

__all__ = ["USAGE_QUERY", "usage"]

USAGE_QUERY: Query = {"days": {"type": "integer", "minimum": 1, "maximum": MAX_DAYS, "default": 30}}


async def usage(context: ServerContext, request: Request) -> Response:
    """Requests and tokens of the caller's key by day (UTC), and what is left of its limits."""
    if not context.api_keys.num_keys:
        raise HTTPError(404, "usage is counted by API key, and this server has none (--api-key-file)", code="no_keys")
    num_days = _num_days(request)
    body = _report(context, context.caller, num_days)
    if context.caller.is_admin:
        body["tenants"] = [_report(context, each, num_days) for each in context.api_keys.callers]
    return JSONResponse(body)


def _num_days(request: Request) -> int:
    text = request.query_params.get("days", "30")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_DAYS and len(text) < 9):
        raise RequestError(f"days must be from 1 to {MAX_DAYS}, got {reprlib.repr(text)}", param="days")
    return int(text)


def _report(context: ServerContext, caller: Caller, num_days: int) -> dict[str, Any]:
    days, total = context.usage.days(caller.tenant, num_days), Usage()
    for each in days.values():
        total.add(each)
    return {
        "object": "usage",
        "tenant": caller.tenant,
        "limits": {name: value for name, value in asdict(caller.limits).items() if value},
        "remaining": context.rate_limiter.remaining(caller),
        "days": [{"date": date, **_sums(each)} for date, each in days.items()],
        "total": _sums(total),
    }


def _sums(usage: Usage) -> dict[str, int]:
    return {**asdict(usage), "total_tokens": usage.total_tokens}
