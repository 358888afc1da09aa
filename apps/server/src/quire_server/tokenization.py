"""POST /tokenize and /detokenize, in the shapes of vLLM, TEI and llama.cpp; GET /tokenizer_info, in vLLM's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import RenderedPrompt, RequestError, SamplingParams
from quire_server.body import read_model
from quire_server.chat_history import readable_messages
from quire_server.context import ServerContext, in_thread_when
from quire_server.functions import as_tool_messages
from quire_server.protocol import DetokenizeRequest, TokenizeRequest
from quire_server.responses import json_response
from quire_server.tei_tokens import check_token_ids, tokens_of_inputs
from quire_server.tool_choice import chat_client_tools, chat_tool_use
from quire_server.turn import ChatTurn, render_turn

__all__ = ["detokenize", "tokenize", "tokenizer_info"]


async def tokenize(context: ServerContext, request: Request) -> Response:
    """A prompt or a conversation to token ids; `inputs`, which are TEI's, to tokens and their places; `content`, which
    is llama.cpp's, to token ids alone or with their texts."""
    body = await read_model(context, request, TokenizeRequest)
    if body.model is not None:
        context = context.for_pooling(body.model)
    context.resolve_model(body.model)
    if body.inputs is not None:
        if body.prompt is not None or body.messages is not None:
            raise RequestError("inputs stand alone: leave prompt and messages out", param="inputs")
        return await tokens_of_inputs(context.for_pooling(body.model), body)
    if body.content is not None:
        if body.prompt is not None or body.messages is not None:
            raise RequestError("content stands alone: leave prompt and messages out", param="content")
        return await _pieces(context, body, body.content)
    token_ids = (await _rendered(context, body)).token_ids

    def answer() -> Response:
        fields = {
            "count": len(token_ids),
            "max_model_len": context.llm.engine.info.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            fields["token_strs"] = [context.llm.renderer.tokenizer.id_to_token(token_id) for token_id in token_ids]
        return json_response(fields)

    return await in_thread_when(body.is_large, answer)


async def _pieces(context: ServerContext, body: TokenizeRequest, text: str) -> Response:
    """The tokens of a text as llama.cpp tells them, with their texts, or bytes where these are no text alone."""
    renderer = context.llm.renderer

    def piece(token_id: int) -> str | list[int]:
        data = renderer.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)

    def answer() -> Response:
        token_ids = renderer.render_prompt(text, add_special_tokens=body.add_special).token_ids
        if not body.with_pieces:
            return json_response({"tokens": token_ids})
        return json_response({"tokens": [{"id": token_id, "piece": piece(token_id)} for token_id in token_ids]})

    return await in_thread_when(body.is_large, answer)


async def _rendered(context: ServerContext, body: TokenizeRequest) -> RenderedPrompt:
    prompt = body.prompt
    if (prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt" if prompt is None else "messages")
    if prompt is not None:
        special = body.add_special_tokens if body.add_special_tokens is not None else True
        renderer = context.llm.renderer
        return await in_thread_when(body.is_large, lambda: renderer.render_prompt(prompt, add_special_tokens=special))
    return await render_turn(context, lambda: _turn(context, body), is_large=body.is_large)


def _turn(context: ServerContext, body: TokenizeRequest) -> ChatTurn:
    return ChatTurn(
        messages=readable_messages(as_tool_messages(body.messages or []), context.modalities),
        params=SamplingParams(),
        tool_use=chat_tool_use(chat_client_tools(body.tools or ()), None, None),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=context.template_kwargs(body.chat_template_kwargs),
        mm_processor_kwargs=body.mm_processor_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
    )


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Token ids to text."""
    body = await read_model(context, request, DetokenizeRequest)
    if body.model is not None:
        context = context.for_pooling(body.model)
    context.resolve_model(body.model)

    def answer() -> Response:
        check_token_ids(body.tokens, context.llm.engine.info.vocab_size, "tokens")
        text = context.llm.renderer.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text, "content": text})  # vLLM's name, and llama.cpp's

    return await in_thread_when(body.is_large, answer)


async def tokenizer_info(context: ServerContext, request: Request) -> Response:
    """What tokenizer_config.json says, with the chat template that is served."""
    return JSONResponse(context.llm.renderer.tokenizer_config)
