"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import RequestError
from quire_server.body import read_model
from quire_server.context import ServerContext, in_thread_when_long
from quire_server.protocol import DetokenizeRequest, TokenizeRequest

__all__ = ["detokenize", "tokenize"]


async def tokenize(context: ServerContext, request: Request) -> Response:
    """A prompt or a conversation to token ids."""
    body = await read_model(context, request, TokenizeRequest)
    context.resolve_model(body.model)
    renderer, prompt, messages = context.llm.renderer, body.prompt, body.messages
    if prompt is not None and messages is None:
        special = body.add_special_tokens if body.add_special_tokens is not None else True
        rendered = await in_thread_when_long(
            len(prompt), lambda: renderer.render_prompt(prompt, add_special_tokens=special)
        )
    elif messages is not None and prompt is None:
        rendered = await in_thread_when_long(
            sum(len(str(message.get("content") or "")) for message in messages),
            lambda: renderer.render_chat(
                messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=context.template_kwargs(body.chat_template_kwargs),
                add_special_tokens=bool(body.add_special_tokens),
            ),
        )
    else:
        raise RequestError("give either prompt or messages", param="prompt" if prompt is None else "messages")
    answer = {
        "count": len(rendered.token_ids),
        "max_model_len": context.llm.engine_info.max_model_len,
        "tokens": rendered.token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [context.llm.tokenizer.id_to_token(token_id) for token_id in rendered.token_ids]
    return JSONResponse(answer)


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Token ids to text."""
    body = await read_model(context, request, DetokenizeRequest)
    context.resolve_model(body.model)
    vocab_size = context.llm.engine_info.vocab_size
    for index, token_id in enumerate(body.tokens):
        if token_id >= vocab_size:
            raise RequestError(
                f"tokens[{index}] must be a token id from 0 to {vocab_size - 1}, got {token_id}",
                param=f"tokens[{index}]",
            )
    return JSONResponse({"prompt": context.llm.tokenizer.decode(body.tokens, skip_special_tokens=False)})
