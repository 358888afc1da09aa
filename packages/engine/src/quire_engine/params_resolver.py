"""Sampling parameters as the core takes them: token ids in place of texts, counts in place of "all", checked against
the vocabulary.

Knows the model's vocabulary and the tokenizer; knows no prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import msgspec

from quire_engine.messages import EngineInfo
from quire_interfaces import ALL_LOGPROBS, RequestError, SamplingParams, StructuredOutputsParams, Tokenizer
from quire_interfaces.sampling_bounds import MAX_BAD_WORD_TOKENS

__all__ = ["ParamsResolver", "check_token_ids"]


class ParamsResolver:
    """Resolves sampling parameters.

    Args:
        info: The engine's limits.
        tokenizer: For `bad_words` and `dry_sequence_breakers`; None takes token ids only.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._last = (SamplingParams(), SamplingParams())
        """Parameters, and these resolved: the prompts of one request share them, and long lists are looked at once.
        One tuple, for threads may resolve at the same time."""

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """The parameters with token ids in place of texts.

        Raises:
            RequestError: a token id is outside the vocabulary, or a text needs a tokenizer and there is none.
        """
        last_params, last_resolved = self._last
        if params is last_params:
            return last_resolved
        resolved = self._with_counts(params)
        if resolved.structured_outputs is not None:
            constraint = self._constraint(resolved.structured_outputs)
            resolved = dataclasses.replace(resolved, structured_outputs=constraint)
        if resolved.bad_words:
            sequences = dict.fromkeys((*resolved.bad_words_token_ids, *self._bad_words_token_ids(resolved.bad_words)))
            resolved = dataclasses.replace(resolved, bad_words=(), bad_words_token_ids=tuple(sequences))
        if resolved.dry_multiplier > 0:
            breakers = self._breaker_ids(resolved.dry_sequence_breakers)
            resolved = dataclasses.replace(resolved, dry_sequence_breakers=breakers)
        self._check_ids_of(resolved)
        self._last = (params, resolved)
        return resolved

    def _with_counts(self, params: SamplingParams) -> SamplingParams:
        """The whole vocabulary's log probabilities as a number of them."""
        counts: dict[str, Any] = {
            name: self._info.vocab_size
            for name in ("logprobs", "prompt_logprobs")
            if getattr(params, name) == ALL_LOGPROBS
        }
        return dataclasses.replace(params, **counts) if counts else params

    def _constraint(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        """The constraint, checked as far as this side can, and cheap to send."""
        if not self._info.structured_output_backend:
            raise RequestError(
                "this engine takes no structured outputs: its model has no tokenizer, or no end token",
                param="structured_outputs",
                code="unsupported",
            )
        constraint = _as_text(constraint)
        size, limit = constraint.num_characters, self._info.max_grammar_bytes
        if size > limit:
            raise RequestError(
                f"structured_outputs.{constraint.kind} has {size} characters, at most {limit} are taken "
                "(--structured-output-max-bytes); make it smaller",
                param=f"structured_outputs.{constraint.kind}",
                code="grammar_too_large",
            )
        if constraint.reasoning is not None:
            self._check_ids("structured_outputs.reasoning", constraint.reasoning.start_token_ids)
            self._check_ids("structured_outputs.reasoning", constraint.reasoning.end_token_ids)
        return constraint if _is_json_object(constraint) else constraint.normalized()

    def _breaker_ids(self, breakers: tuple[str | int, ...]) -> tuple[int, ...]:
        """Each text as the token that a text ends with when it ends with it; the same text alone may be another one."""
        ids: dict[int, None] = {}
        for breaker in breakers:
            if isinstance(breaker, str):
                if self._tokenizer is None:
                    raise RequestError(
                        f"dry_sequence_breakers holds the text {breaker!r}, and this engine has no tokenizer: give "
                        "token ids",
                        param="dry_sequence_breakers",
                    )
                ids[self._tokenizer.encode(f"a{breaker}", add_special_tokens=False)[-1]] = None
            else:
                ids[breaker] = None
        self._check_ids("dry_sequence_breakers", ids)
        return tuple(ids)

    def _bad_words_token_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer: give bad_words_token_ids", param="bad_words")
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            # A word at the start of a line and one after a space are different tokens.
            for text in (word, " " + word.lstrip()):
                token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if len(token_ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words holds a text of {len(token_ids)} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed",
                        param="bad_words",
                    )
                if token_ids:  # a tokenizer may make nothing of a text
                    sequences[token_ids] = None
        return tuple(sequences)

    def _check_ids_of(self, params: SamplingParams) -> None:
        if params.logit_bias:
            self._check_ids("logit_bias", params.logit_bias)
        if params.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", params.allowed_token_ids)
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        for words in params.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", words)

    def _check_ids(self, param: str, token_ids: Collection[int]) -> None:
        check_token_ids(param, token_ids, self._info.vocab_size)


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises RequestError, naming the field `param`, when a token id is outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds token id {token_id}, but this model's vocabulary has {vocab_size} ids, from 0 on",
                param=param,
                code="token_id_out_of_vocabulary",
            )


def _as_text(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """The constraint with its JSON written as text, quickly: every stream of this process waits meanwhile."""
    try:
        if isinstance(constraint.json, dict):
            return dataclasses.replace(constraint, json=msgspec.json.encode(constraint.json).decode())
        if isinstance(constraint.structural_tag, dict):
            return dataclasses.replace(
                constraint, structural_tag=msgspec.json.encode(constraint.structural_tag).decode()
            )
    except (TypeError, ValueError, RecursionError):
        return constraint.normalized()  # which knows more, or says what is wrong
    return constraint


def _is_json_object(constraint: StructuredOutputsParams) -> bool:
    """Whether JSON given as text is an object, found without making one."""
    text = constraint.json if constraint.json is not None else constraint.structural_tag
    if not isinstance(text, str):
        return False
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return False
    return True
