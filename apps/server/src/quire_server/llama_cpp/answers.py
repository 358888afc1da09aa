"""The answers of llama.cpp's server: a completion with its timings and settings, and log probabilities. Knows no
engine but its outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire_engine import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire_interfaces import FinishReason, SamplingParams
from quire_server.llama_cpp.protocol import SAMPLERS
from quire_server.logprobs import LOWEST

__all__ = ["LlamaCompletion", "Timings", "generation_settings", "selected", "stop_of", "token_probs"]


class Timings(msgspec.Struct, kw_only=True):
    """Tokens of the prompt and of the output, and how fast they were."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float

    @classmethod
    def of(cls, output: RequestOutput, index: int) -> Timings:
        """Of one completion, as far as it is computed."""
        metrics = output.metrics[index] if index < len(output.metrics) else RequestMetrics()
        first_s = metrics.first_token_time_s or metrics.finished_time_s
        last_s = metrics.finished_time_s or metrics.last_token_time_s
        prompt_ms = max(0.0, (first_s - metrics.scheduled_time_s) * 1e3) if metrics.scheduled_time_s else 0.0
        output_ms = max(0.0, (last_s - first_s) * 1e3) if metrics.first_token_time_s else 0.0
        num_prompt = len(output.prompt_token_ids) - output.num_cached_tokens
        num_output = metrics.num_generation_tokens
        return cls(
            cache_n=output.num_cached_tokens,
            prompt_n=num_prompt,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_ratio(prompt_ms, num_prompt),
            prompt_per_second=_ratio(num_prompt * 1e3, prompt_ms),
            predicted_n=num_output,
            predicted_ms=output_ms,
            predicted_per_token_ms=_ratio(output_ms, num_output),
            predicted_per_second=_ratio(num_output * 1e3, output_ms),
        )


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0


class LlamaCompletion(msgspec.Struct, kw_only=True):
    """A whole completion, or an event of a stream, which tells the first fields only until the end."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int = -1
    """There are no slots: requests share one batch."""
    tokens_predicted: int
    tokens_evaluated: int
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET


def stop_of(output: CompletionOutput) -> tuple[str, str]:
    """Why a completion ended, and the stop string where it was one."""
    if isinstance(output.stop_reason, str):
        return "word", output.stop_reason
    kinds = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit"}
    return ("none" if output.finish_reason is None else kinds.get(output.finish_reason, "none")), ""


def token_probs(output: CompletionOutput) -> list[dict[str, Any]] | UnsetType:
    """Log probabilities of an output's tokens, where they were asked for."""
    if output.logprobs is None:
        return UNSET
    return [{**_token(chosen), "top_logprobs": [_token(each) for each in top]} for chosen, *top in output.logprobs]


def _token(token: Logprob) -> dict[str, Any]:
    logprob = token.logprob if math.isfinite(token.logprob) else LOWEST
    return {
        "id": token.token_id, "token": token.decoded_token, "bytes": list(token.token_bytes), "logprob": logprob
    }  # fmt: skip


def generation_settings(params: SamplingParams, *, n_ctx: int, model: str, stream: bool) -> dict[str, Any]:
    """What a request was computed with, in llama.cpp's words."""
    constraint = params.structured_outputs
    return {
        "n_ctx": n_ctx,
        "model": model,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "max_tokens": -1 if params.max_tokens is None else params.max_tokens,
        "n_keep": 0,
        "n_discard": 0,
        "seed": 2**32 - 1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "dynatemp_range": params.dynatemp_range,
        "dynatemp_exponent": params.dynatemp_exponent,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": params.top_n_sigma or -1.0,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "typical_p": params.typical_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_range or -1,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "mirostat": params.mirostat_mode,
        "mirostat_tau": params.mirostat_tau,
        "mirostat_eta": params.mirostat_eta,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "logit_bias": [[token, bias] for token, bias in (params.logit_bias or {}).items()],
        "n_probs": params.logprobs or 0,
        "min_keep": 0,
        "grammar": (constraint.grammar or "") if constraint is not None else "",
        "samplers": [name for name in SAMPLERS if name != "infill"],
        "post_sampling_probs": False,
        "lora": [],
    }


def selected(answer: LlamaCompletion, fields: Sequence[str]) -> dict[str, Any]:
    """Fields of an answer by their names; "generation_settings/seed" gives `seed` a place of its own."""
    values = msgspec.to_builtins(answer)
    result = {}
    for path in fields:
        value: Any = values
        for step in path.split("/"):
            value = value.get(step, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            result[path.rsplit("/", 1)[-1]] = value
    return result
