"""OpenAI's files: the routes of /v1/files.

Source of the shapes: OpenAI's public API reference. Knows no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from quire_interfaces import RequestError
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.files.file_store import StoredFile, uploading
from quire_server.files.folder import KeptFiles, open_files
from quire_server.files.upload import UploadLimits, read_form
from quire_server.item_lists import whole_number
from quire_server.readiness import refuse_while_draining
from quire_server.store_access import StoreAccess

__all__ = ["MAX_LISTED", "FilesService", "is_newest_first", "page_limit", "page_of", "unknown_file"]

MAX_LISTED = 10_000
"""Files in one answer."""

_logger = logging.getLogger(__name__)


class FilesService:
    """The routes, and what others ask of files.

    Args:
        config: Settings.
        has_several_owners: Whether there are several API keys.
    """

    def __init__(self, config: ServerConfig, *, has_several_owners: bool = False) -> None:
        self._limits = UploadLimits(max_bytes=config.files_max_bytes, timeout_s=config.body_timeout_s)
        self._access: StoreAccess[KeptFiles] | None = None
        if config.files_dir is not None:
            self._access = StoreAccess("files", lambda: open_files(config, has_several_owners=has_several_owners))

    @property
    def access(self) -> StoreAccess[KeptFiles]:
        """Raises RequestError when this server keeps none."""
        if self._access is None:
            raise RequestError(
                "this server keeps no files and runs no batches: start it with --files-dir FOLDER",
                param=None,
                code="files_not_kept",
            )
        return self._access

    @property
    def keeps_files(self) -> bool:
        """Whether there is a folder for them."""
        return self._access is not None

    async def create(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/files: a form with `file`, `purpose` and maybe `expires_after[anchor]`, `expires_after[seconds]`."""
        refuse_while_draining(context)
        store = (await self.access.ask(lambda kept: kept)).files
        try:
            with uploading(store, context.caller.owner) as upload:
                form = await read_form(request, self._limits, upload.write)
                if form.filename is None:
                    raise RequestError("file is required", param="file")
                purpose, filename, expires_after_s = form.purpose(), form.filename, form.expires_after_s()
                await asyncio.to_thread(upload.sync)
                file = await asyncio.to_thread(
                    upload.keep, purpose=purpose, filename=filename, expires_after_s=expires_after_s
                )
        except OSError as error:
            _logger.error("a file cannot be stored: %s", error)
            raise HTTPError(503, "the file cannot be stored, the server's log says why", code="store_failed") from None
        return JSONResponse(file.object())

    async def list_files(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/files: `limit`, `order`, `after` and `purpose` of the query choose."""
        query = request.query_params
        limit = page_limit(query, default=MAX_LISTED, most=MAX_LISTED)
        after, purpose, newest_first = query.get("after"), query.get("purpose"), is_newest_first(query)
        owner = context.caller.owner
        found = await self.access.ask(
            lambda kept: kept.files.listed(
                owner=owner, purpose=purpose, after=after, limit=limit + 1, newest_first=newest_first
            )
        )
        if found is None:
            raise RequestError(f"there is no file {(after or '')[:100]!r} in this list", param="after")
        return JSONResponse(page_of([file.object() for file in found], limit))

    async def retrieve(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/files/ID."""
        return JSONResponse((await self.file(context, request.path_params["id"])).object())

    async def content(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/files/ID/content: the bytes, streamed; `Range` asks for a part."""
        file = await self.file(context, request.path_params["id"])
        path = await self.path(file)
        try:
            status = await asyncio.to_thread(os.stat, path)
        except OSError:
            raise unknown_file(file.id) from None
        return FileResponse(
            path,
            media_type="application/octet-stream",
            filename=file.filename,
            stat_result=status,
            headers={"x-content-type-options": "nosniff"},
        )

    async def delete(self, context: ServerContext, request: Request) -> Response:
        """DELETE /v1/files/ID; 400 while a batch that is not done reads it."""
        name, owner = request.path_params["id"], context.caller.owner
        is_gone = await self.access.ask(lambda kept: _deleted(kept, name, owner))
        if isinstance(is_gone, RequestError):
            raise is_gone
        if not is_gone:
            raise unknown_file(name)
        return JSONResponse({"id": name, "object": "file", "deleted": True})

    async def file(self, context: ServerContext, name: str) -> StoredFile:
        """A file of the caller's.

        Raises:
            HTTPError: it is not there (404), or the store failed.
        """
        owner = context.caller.owner
        found = await self.access.ask(lambda kept: kept.files.get(name, owner=owner))
        if found is None:
            raise unknown_file(name)
        return found

    async def path(self, file: StoredFile) -> Path:
        """Where its content is."""
        return await self.access.ask(lambda kept: kept.files.path_of(file.id))

    async def close(self) -> None:
        """Give everything back."""
        if self._access is not None:
            with contextlib.suppress(HTTPError):
                await self._access.ask(lambda kept: kept.close())


def _deleted(kept: KeptFiles, name: str, owner: str) -> bool | RequestError:
    """A refusal is no failure of the store."""
    try:
        return kept.files.delete(name, owner=owner)
    except RequestError as error:
        return error


def unknown_file(name: str, param: str = "file_id") -> HTTPError:
    return HTTPError(404, f"there is no file {name[:100]!r} (any more)", code="file_not_found", param=param)


def page_limit(query: Mapping[str, str], *, default: int, most: int) -> int:
    """`limit` of a query. Raises RequestError naming it."""
    limit = whole_number(query, "limit", default)
    if not 1 <= limit <= most:
        raise RequestError(f"limit must be from 1 to {most}, got {limit}", param="limit")
    return limit


def is_newest_first(query: Mapping[str, str]) -> bool:
    """`order` of a query. Raises RequestError naming it."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {reprlib.repr(order)}", param="order")
    return order == "desc"


def page_of(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list, of which one more than fits was looked for."""
    page = objects[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(objects) > limit}
