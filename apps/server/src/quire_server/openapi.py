"""What /openapi.json says of a route: its path and query, its body, and what it answers. Knows no handler.

Bodies and answers are not checked by what stands here: handlers parse them, faster and with errors that name the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from quire_server.errors import OLLAMA_PATHS

__all__ = [
    "BATCH_PAGE",
    "BYTES",
    "EVENTS",
    "FILE_PAGE",
    "HTML",
    "ITEM_PAGE",
    "JSON",
    "JSON_LINES",
    "JSON_OR_EVENTS",
    "LIST",
    "LISTS",
    "NOTHING",
    "OBJECT_OR_LISTS",
    "TEXT",
    "Bodies",
    "Form",
    "Media",
    "Query",
    "RouteDocument",
    "json_of",
]

Media = Mapping[str, Any]
"""What a route answers with: media type -> JSON schema, or the struct that is sent, or several of them."""


@dataclass(frozen=True)
class Form:
    """Fields of a form."""

    schema: dict[str, Any]


Bodies = type[BaseModel] | tuple[type[BaseModel], ...] | Form
"""What a route takes: one model, or any of several; or a form."""
Query = Mapping[str, dict[str, Any]]
"""Parameters behind the question mark: name -> JSON schema."""

NOTHING: Media = {}
JSON: Media = {"application/json": {"type": "object"}}
LIST: Media = {"application/json": {"type": "array", "items": {"type": "object"}}}
OBJECT_OR_LISTS: Media = {"application/json": {"anyOf": [{"type": "object"}, {"type": "array"}]}}
LISTS: Media = {"application/json": {"type": "array"}}
BYTES: Media = {"application/octet-stream": {"type": "string", "format": "binary"}}
EVENTS: Media = {"text/event-stream": {"description": "Server-sent events, each with JSON behind `data:`."}}
JSON_OR_EVENTS: Media = {**JSON, **EVENTS}
JSON_LINES: Media = {"application/x-ndjson": {"description": "A JSON object on each line."}}
TEXT: Media = {"text/plain": {"type": "string"}}
HTML: Media = {"text/html": {"type": "string"}}

FILE_PAGE: Query = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 10000, "default": 10000},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
    "purpose": {"type": "string"},
}
BATCH_PAGE: Query = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "after": {"type": "string"},
}
ITEM_PAGE: Query = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def json_of(*structs: type[msgspec.Struct], events: bool = False) -> Media:
    """One of the structs as JSON; with `events` also as a stream, for those who ask for one."""
    return {"application/json": structs, **(EVENTS if events else {})}


class RouteDocument:
    """Collects what routes say of themselves, and adds the schemas that they name to the app's document."""

    def __init__(self, app: FastAPI) -> None:
        self._schemas: dict[str, Any] = {"Error": _ERROR, "OllamaError": _OLLAMA_ERROR}
        inner = app.openapi

        def openapi() -> dict[str, Any]:
            document = inner()
            document.setdefault("components", {}).setdefault("schemas", {}).update(self._schemas)
            return document

        app.openapi = openapi  # type: ignore[method-assign]

    def describe(self, path: str, answers: Media, body: Bodies | None, query: Query) -> dict[str, Any]:
        """Arguments for FastAPI's `add_api_route`."""
        names = re.findall(r"\{(\w+)(?::\w+)?\}", path)
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
        extra: dict[str, Any] = {"parameters": parameters} if parameters else {}
        if isinstance(body, Form):
            extra["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": body.schema}}}
        elif body is not None:
            schemas = [self._body(each) for each in (body if isinstance(body, tuple) else (body,))]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        name = "OllamaError" if path.startswith(OLLAMA_PATHS) else "Error"
        error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        good: dict[str, Any] = {"description": "Done."}
        if answers:
            good["content"] = {media: {"schema": self._schema(form)} for media, form in answers.items()}
        return {
            "openapi_extra": extra,
            "responses": {
                200: good,
                "4XX": {"description": "The request is wrong; the error names the field.", "content": error},
                "5XX": {"description": "The server cannot answer; the error says why.", "content": error},
            },
            "response_class": Response,  # without a media type of its own
            "response_model": None,
        }

    def _body(self, model: type[BaseModel]) -> dict[str, Any]:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        self._add(schema.pop("$defs", {}))
        return schema

    def _schema(self, form: Any) -> Any:
        if isinstance(form, dict):
            return form
        if isinstance(form, tuple):
            schemas = [self._schema(each) for each in form]
            return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        # Requests and answers have parts of the same names.
        (schema,), parts = msgspec.json.schema_components([form], ref_template="#/components/schemas/{name}Output")
        self._add({f"{name}Output": part for name, part in parts.items()})
        return schema

    def _add(self, schemas: Mapping[str, Any]) -> None:
        for name, schema in schemas.items():
            if self._schemas.setdefault(name, schema) != schema:
                raise ValueError(f"two schemas of /openapi.json are called {name}; rename a class")
