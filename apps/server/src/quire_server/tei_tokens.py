"""POST /tokenize with `inputs`, and /decode: texts to tokens with their places, and back, in TEI's shapes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import RequestError, Tokenizer
from quire_renderers.segments import SupportsSegments
from quire_server.body import read_model
from quire_server.config import MAX_PROMPTS
from quire_server.context import ServerContext, in_thread_when
from quire_server.protocol import SMALL_LIST, LenientBody, TokenizeRequest
from quire_server.request_fields import TokenIds, at_most
from quire_server.responses import json_response

__all__ = ["DecodeRequest", "check_token_ids", "decode", "tokens_of_inputs"]


class DecodeRequest(LenientBody):
    """Body of POST /decode."""

    model: str | None = None
    ids: TokenIds | Annotated[list[TokenIds], Field(fail_fast=True), at_most(MAX_PROMPTS)]
    skip_special_tokens: bool = True


class TEIToken(msgspec.Struct):
    """A token, and where it stands in the text, in characters; nowhere where it was put around the text."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


async def tokens_of_inputs(context: ServerContext, body: TokenizeRequest) -> Response:
    """The tokens of each text of `inputs`.

    Raises:
        RequestError: `prompt_name` is no prompt of the checkpoint's.
    """
    prefix = ""
    if body.prompt_name is not None:
        prompts = {} if context.llm.pooling_prompts is None else context.pooler.prompts
        if body.prompt_name not in prompts:
            names = ", ".join(map(repr, prompts)) or "none"
            raise RequestError(f"this model has no prompt {body.prompt_name!r}; it has {names}", param="prompt_name")
        prefix = prompts[body.prompt_name]
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs or []
    special = body.add_special_tokens is not False

    def answer() -> Response:
        return json_response([_tokens(context, prefix + text, add_special_tokens=special) for text in texts])

    return await in_thread_when(body.is_large or len(texts) > SMALL_LIST, answer)


def _tokens(context: ServerContext, text: str, *, add_special_tokens: bool) -> list[TEIToken]:
    renderer = context.llm.renderer
    prompt = renderer.render_prompt(text, add_special_tokens=add_special_tokens)
    ids: list[int] = list(prompt.token_ids)
    begin, end = _own_tokens(renderer.tokenizer, len(ids)) if add_special_tokens else (0, len(ids))
    offsets = renderer.token_offsets(prompt, add_special_tokens=add_special_tokens)
    tokens = []
    for index, token_id in enumerate(ids):
        place: Any = (None, None)
        if not begin <= index < end:
            token = renderer.tokenizer.id_to_token(token_id) or ""
        elif offsets is None:
            token = renderer.tokenizer.decode([token_id], skip_special_tokens=False)
        else:
            place = offsets[index]
            token = text[slice(*place)]
        tokens.append(TEIToken(token_id, token, not begin <= index < end, *place))
    return tokens


def _own_tokens(tokenizer: Tokenizer, count: int) -> tuple[int, int]:
    """Where the tokens of the text itself begin and end among `count` tokens."""
    if not isinstance(tokenizer, SupportsSegments):
        return 0, count
    around = tokenizer.wrap_special_tokens([-1])
    begin = around.index(-1)
    return begin, count - (len(around) - begin - 1)


async def decode(context: ServerContext, request: Request) -> Response:
    """POST /decode: token ids to texts, a list of them."""
    body = await read_model(context, request, DecodeRequest)
    context = context.for_pooling(body.model)
    context.resolve_model(body.model)
    several: list[Any] = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
    size = context.llm.engine.info.vocab_size

    def answer() -> Response:
        texts = []
        for index, ids in enumerate(several):
            check_token_ids(ids, size, f"ids[{index}]" if several is body.ids else "ids")
            texts.append(context.llm.renderer.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens))
        return json_response(texts)

    return await in_thread_when(body.is_large or len(several) > SMALL_LIST, answer)


def check_token_ids(ids: list[int], vocab_size: int, name: str) -> None:
    """Raises RequestError for an id that is not in the vocabulary, which is named as one of the list `name`."""
    for index, token_id in enumerate(ids):
        if token_id >= vocab_size:
            place = f"{name}[{index}]"
            raise RequestError(f"{place} must be a token id from 0 to {vocab_size - 1}, got {token_id}", param=place)
