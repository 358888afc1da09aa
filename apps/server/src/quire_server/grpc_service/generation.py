"""Requests to generate, from their messages to sampling parameters, and outputs back to messages. Knows no engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from quire_engine import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import RequestError, SamplingParams
from quire_server.body import check_fields
from quire_server.errors import HTTPError
from quire_server.logprobs import LOWEST
from quire_server.protocol import CompletionRequest

__all__ = ["GeneratedMessages", "request_fields", "token_params"]

_NUMBERS = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "n")
"""Fields whose 0 is no value but an absence, as the protocol has no other way to leave them out."""
_OPTIONAL = ("temperature", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_SWITCHES = ("ignore_eos", "include_stop_str_in_output")
_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "structural_tag": "structural_tag"}
"""Field of the message -> field of `structured_outputs`."""


def request_fields(request: Any) -> CompletionRequest:
    """What a `GenerateRequest` says, as the fields of a completion: what it leaves out comes from the checkpoint's
    generation_config.json.

    Raises:
        RequestError: a field is wrong, named in `param`.
        HTTPError: media, which this door does not take.
    """
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        raise HTTPError(
            501, "media do not come through gRPC; send this request to POST /v1/chat/completions", code="unsupported"
        )
    given = request.sampling_params
    fields: dict[str, Any] = {name: value for name in _NUMBERS if (value := getattr(given, name))}
    fields |= {name: getattr(given, name) for name in _OPTIONAL if given.HasField(name)}
    fields |= {name: True for name in _SWITCHES if getattr(given, name)}
    fields["max_tokens"] = given.max_tokens if given.HasField("max_tokens") else None
    fields |= {name: list(value) for name in ("stop", "stop_token_ids") if (value := getattr(given, name))}
    if given.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in given.logit_bias.items()}
    constraint = given.WhichOneof("constraint")
    if constraint == "choice":
        fields["structured_outputs"] = {"choice": list(given.choice.choices)}
    elif constraint == "json_object":
        fields["structured_outputs"] = {"json_object": True} if given.json_object else None
    elif constraint is not None:
        fields["structured_outputs"] = {_CONSTRAINTS[constraint]: getattr(given, constraint)}
    if request.HasField("kv_transfer_params_json"):
        fields["kv_transfer_params"] = _transfer_params(request.kv_transfer_params_json)
    elif request.HasField("kv_transfer_params"):
        raise RequestError(
            "kv_transfer_params is Mooncake's old form; send kv_transfer_params_json", param="kv_transfer_params"
        )
    if request.HasField("data_parallel_rank"):
        fields["data_parallel_rank"] = request.data_parallel_rank
    return check_fields(fields, CompletionRequest)


def _transfer_params(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"kv_transfer_params_json is not JSON: {error}", param="kv_transfer_params_json") from None


def token_params(params: SamplingParams) -> SamplingParams:
    """The parameters of a request whose answer has token ids alone: text is made only to find strings that stop it."""
    return params if params.stop else dataclasses.replace(params, detokenize=False)


class GeneratedMessages:
    """The messages of one answer, in order.

    Args:
        prompt_token_ids: What was read.
        streams: Whether there is a message for each step; else one for each completion, at its end.
    """

    def __init__(self, prompt_token_ids: Sequence[int], *, streams: bool) -> None:
        self._prompt, self._streams = prompt_token_ids, streams
        self._made: dict[int, list[int]] = {}
        self._prompt_logprobs: Any = None
        self._has_told_prompt: set[int] = set()

    def of(self, output: RequestOutput) -> list[Any]:
        """What an output, which must not have failed, adds to the answer."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = _prompt_logprobs(self._prompt, output.prompt_logprobs)
        messages = []
        for each in output.outputs:
            made = self._made.setdefault(each.index, [])
            made += each.token_ids
            if self._streams and each.token_ids:
                messages.append(pb.GenerateResponse(chunk=self._chunk(output, each, len(made))))
            if each.finished:
                messages.append(pb.GenerateResponse(complete=self._complete(output, each, made)))
        return messages

    def _chunk(self, output: RequestOutput, each: CompletionOutput, num_made: int) -> Any:
        is_first = each.index not in self._has_told_prompt
        self._has_told_prompt.add(each.index)
        return pb.GenerateStreamChunk(
            token_ids=each.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=num_made,
            cached_tokens=output.num_cached_tokens,
            output_logprobs=_output_logprobs(each),
            input_logprobs=self._prompt_logprobs if is_first else None,
            index=each.index,
        )

    def _complete(self, output: RequestOutput, each: CompletionOutput, made: list[int]) -> Any:
        message = pb.GenerateComplete(
            output_ids=made,
            finish_reason=str(each.finish_reason),
            prompt_tokens=len(self._prompt),
            completion_tokens=len(made),
            cached_tokens=output.num_cached_tokens,
            output_logprobs=None if self._streams else _output_logprobs(each),
            input_logprobs=None if self._streams else self._prompt_logprobs,
            index=each.index,
        )
        if isinstance(each.stop_reason, int):
            message.matched_token_id = each.stop_reason
        elif each.stop_reason is not None:
            message.matched_stop_str = each.stop_reason
        if output.kv_transfer_params is not None:
            message.kv_transfer_params_json = json.dumps(output.kv_transfer_params)
        return message


def _output_logprobs(output: CompletionOutput) -> Any:
    if output.logprobs is None:
        return None
    chosen = [tokens[0] for tokens in output.logprobs]
    return pb.OutputLogProbs(
        token_logprobs=[_finite(each) for each in chosen],
        token_ids=[each.token_id for each in chosen],
        top_logprobs=[_top(tokens[1:]) for tokens in output.logprobs],
    )


def _prompt_logprobs(token_ids: Sequence[int], logprobs: Sequence[list[Logprob] | None]) -> Any:
    """The first token of a prompt has none."""
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=None if each is None else _finite(each[0])) for each in logprobs],
        token_ids=token_ids,
        top_logprobs=[_top([] if each is None else each[1:]) for each in logprobs],
    )


def _top(tokens: Sequence[Logprob]) -> Any:
    return pb.TopLogProbs(values=[_finite(each) for each in tokens], token_ids=[each.token_id for each in tokens])


def _finite(token: Logprob) -> float:
    return max(token.logprob, LOWEST)
