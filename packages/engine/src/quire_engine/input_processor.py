"""From a prompt and sampling parameters to messages for the core: everything resolved, everything checked.

Knows the model's limits (context, vocabulary, end tokens), and the tokenizer for the texts in sampling parameters;
knows no transport.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from quire_engine.messages import AddRequest, EngineInfo, pack_token_ids
from quire_interfaces import (
    ALL_LOGPROBS,
    ContextLengthError,
    ModelNotFoundError,
    RenderedPrompt,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    Tokenizer,
)
from quire_interfaces.sampling_bounds import MAX_BAD_WORD_TOKENS

__all__ = ["InputProcessor"]


class InputProcessor:
    """Makes the core's requests.

    Args:
        info: The engine's limits.
        eos_token_ids: Tokens that end an output unless `ignore_eos`.
        tokenizer: For `bad_words` and `dry_sequence_breakers`; None takes token ids only.
        seed: Of the seeds that requests without one get; None for other ones each time.
    """

    def __init__(
        self,
        info: EngineInfo,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
    ) -> None:
        self._seeds = None if seed is None else random.Random(seed)
        self._info = info
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequence = itertools.count()
        self._last_resolved = (SamplingParams(), SamplingParams())
        """Parameters, and the same with token ids in place of texts."""

    def process(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: str | None = None,
        decoder_token_ids: Sequence[int] | None = None,
    ) -> list[AddRequest]:
        """One message per completion to compute. Completion i draws with seed + i; only the first computes prompt
        logprobs.

        Args:
            decoder_token_ids: Where an encoder reads the prompt: what the decoder begins with; None as the checkpoint
                says.

        Raises:
            ContextLengthError: prompt and output do not fit the context.
            RequestError: a token id is outside the vocabulary, or the prompt is empty.
        """
        self._check_length(len(prompt_token_ids), params)  # before any look at the tokens, which may be millions
        packed = pack_token_ids(prompt_token_ids)  # which says what is no token id
        params, begin, max_tokens = self._checked(prompt_token_ids, params, adapter, decoder_token_ids)
        has_encoder = bool(self._info.max_encoder_len)
        prompt = packed if begin is prompt_token_ids else pack_token_ids(begin)
        encoder_prompt = packed if has_encoder else b""
        seed = self._new_seed() if params.seed is None else params.seed
        stop_token_ids = frozenset(params.stop_token_ids)
        # A constraint says itself where the output may end, and says it with the end tokens.
        if not params.ignore_eos or params.structured_outputs is not None:
            stop_token_ids |= self._eos_token_ids
        others = params
        if params.prompt_logprobs is not None:
            others = dataclasses.replace(params, prompt_logprobs=None)
        arrival_time_s = time.monotonic()
        # Internal ids never repeat, whatever callers name their requests: late news of an aborted request then
        # cannot be taken for news of its namesake.
        sequence = next(self._sequence)
        num_completions = params.best_of or params.n
        is_shared = len(begin) > self._info.block_size or has_encoder
        shares_prompt = num_completions > 1 and is_shared
        if params.best_of is not None and params.logprobs is None:
            others = dataclasses.replace(others, logprobs=0)  # by which the best ones are found
            params = dataclasses.replace(params, logprobs=0)
        return [
            AddRequest(
                request_id=f"{request_id}/{sequence}.{index}",
                prompt=prompt,
                encoder_prompt=encoder_prompt,
                sampling_params=params if index == 0 else others,
                seed=_wrap(seed + index),
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                priority=priority,
                cache_salt=cache_salt,
                adapter=adapter,
                tenant=tenant,
                prompt_group=f"{request_id}/{sequence}" if shares_prompt else None,
                arrival_time_s=arrival_time_s,
            )
            for index in range(num_completions)
        ]

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        decoder_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Whether `process` would take the request. Raises what it raises; draws no seed."""
        self._checked(prompt_token_ids, params, adapter, decoder_token_ids)

    def _checked(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        decoder_token_ids: Sequence[int] | None,
    ) -> tuple[SamplingParams, Sequence[int], int]:
        """Resolved parameters, the tokens that the output follows, and how many tokens it may have."""
        self._check_length(len(prompt_token_ids), params)
        self._check_prompt(prompt_token_ids)
        if self._info.max_encoder_len or decoder_token_ids is not None:
            self._check_encoder_prompt(params)
            self._check_ids("decoder_prompt", decoder_token_ids or ())
            prompt_token_ids = self._info.decoder_prompt(decoder_token_ids)
        params = self._resolved(params)
        if params.deterministic and not self._info.batch_invariant:
            raise RequestError(
                "this engine cannot promise the same tokens again: its operators round differently with what else is "
                "in a step; leave deterministic out, or serve where the CPU kernels can (`quire ops` says why not)",
                param="deterministic",
                code="unsupported",
            )
        if params.deterministic and adapter is not None and self._info.merges_adapters:
            raise RequestError(
                "this engine puts an adapter into the network's weights when it runs alone, which rounds differently; "
                "leave deterministic out, or serve with lora_merge_after at 0",
                param="deterministic",
                code="unsupported",
            )
        if adapter is not None and not self._info.takes_adapters:
            raise ModelNotFoundError(
                f"the adapter {adapter!r} was asked for, but this engine serves none; start it with --enable-lora"
            )
        if params.max_tokens == 0:
            params, prompt_token_ids = self._scoring(prompt_token_ids, params)
        return params, prompt_token_ids, self._max_tokens(len(prompt_token_ids), params)

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """With token ids in place of texts, checked against the vocabulary. The prompts of one request share their
        parameters, and long lists are looked at once for all of them."""
        given, resolved = self._last_resolved
        if given is params:
            return resolved
        given = params
        params = self._with_counts(params)
        if params.structured_outputs is not None:
            params = dataclasses.replace(params, structured_outputs=self._constraint(params.structured_outputs))
        if params.bad_words:
            sequences = dict.fromkeys((*params.bad_words_token_ids, *self._bad_words_token_ids(params.bad_words)))
            params = dataclasses.replace(params, bad_words=(), bad_words_token_ids=tuple(sequences))
        if params.dry_multiplier > 0:
            breakers = self._breaker_ids(params.dry_sequence_breakers)
            params = dataclasses.replace(params, dry_sequence_breakers=breakers)
        self._check_params(params)
        self._last_resolved = given, params
        return params

    def _scoring(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[SamplingParams, Sequence[int]]:
        """Parameters and prompt of a request that generates nothing: the prompt's last token is what comes of the ones
        before it, so that a prompt that fills the context needs no room beyond. See `RequestProcessor`, which puts it
        back."""
        if self._info.max_encoder_len:
            raise RequestError(
                "an encoder reads this model's prompts, and predicts nothing of them: ask for at least 1 token",
                param="max_tokens",
                code="unsupported",
            )
        *begin, last = token_ids
        scoring = SamplingParams(
            n=params.n,
            temperature=0.0,
            ignore_eos=True,
            max_tokens=1,
            prompt_logprobs=params.prompt_logprobs,
            deterministic=params.deterministic,
            detokenize=False,
        )
        if not begin:
            return scoring, token_ids
        return dataclasses.replace(scoring, logprobs=params.prompt_logprobs, allowed_token_ids=(last,)), begin

    def _with_counts(self, params: SamplingParams) -> SamplingParams:
        """The whole vocabulary's log probabilities as a number of them."""
        counts: dict[str, Any] = {
            name: self._info.vocab_size
            for name in ("logprobs", "prompt_logprobs")
            if getattr(params, name) == ALL_LOGPROBS
        }
        return dataclasses.replace(params, **counts) if counts else params

    def _new_seed(self) -> int:
        bits = os.urandom(8) if self._seeds is None else self._seeds.randbytes(8)
        return int.from_bytes(bits, "little", signed=True)

    def follows(self, prompt: RenderedPrompt) -> list[int]:
        """The tokens that an output follows, for making text of it."""
        return (prompt.decoder_token_ids or []) if self._info.max_encoder_len else prompt.token_ids

    def _check_length(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Raises ContextLengthError when no request can have so long a prompt."""
        longest = self._info.max_encoder_len
        if longest and num_prompt_tokens > longest:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, and this model's encoder reads at most {longest}, all at "
                "once: shorten the prompt",
                num_prompt_tokens=num_prompt_tokens,
                max_model_len=longest,
            )
        if longest or num_prompt_tokens <= self._info.max_model_len:
            return
        if params.max_tokens != 0:
            self._max_tokens(num_prompt_tokens, params)
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens, but this model's context is {self._info.max_model_len} "
            "tokens: shorten the prompt",
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=self._info.max_model_len,
            max_tokens=0,
        )

    def _check_encoder_prompt(self, params: SamplingParams) -> None:
        if not self._info.max_encoder_len:
            raise RequestError(
                "this model has no encoder, so that it takes one prompt: leave the decoder's out",
                param="decoder_prompt",
                code="unsupported",
            )
        if params.prompt_logprobs is not None:
            raise RequestError(
                "an encoder reads this model's prompts, and predicts nothing of them: leave prompt_logprobs out",
                param="prompt_logprobs",
                code="unsupported",
            )

    def _constraint(self, wanted: StructuredOutputsParams) -> StructuredOutputsParams:
        """Checked as far as this side can, and cheap to send."""
        if not self._info.structured_output_backend:
            raise RequestError(
                "this engine takes no structured outputs: its model has no tokenizer, or no end token",
                param="structured_outputs",
                code="unsupported",
            )
        wanted = _as_text(wanted)
        size, limit = wanted.num_characters, self._info.max_grammar_bytes
        if size > limit:
            raise RequestError(
                f"structured_outputs.{wanted.kind} has {size} characters, at most {limit} are taken "
                "(--structured-output-max-bytes); make it smaller",
                param=f"structured_outputs.{wanted.kind}",
                code="grammar_too_large",
            )
        if wanted.reasoning is not None:
            self._check_ids("structured_outputs.reasoning", wanted.reasoning.start_token_ids)
            self._check_ids("structured_outputs.reasoning", wanted.reasoning.end_token_ids)
        return wanted if _is_json_object(wanted) else wanted.normalized()

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

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        context = self._info.max_model_len
        room = context - num_prompt_tokens
        too_long = functools.partial(
            ContextLengthError,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=context,
            max_tokens=params.max_tokens,
        )
        if room < 1:
            raise too_long(
                f"the prompt has {num_prompt_tokens} tokens, but this model's context is {context} tokens and at "
                "least one must be left for the output: shorten the prompt",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise too_long(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {params.max_tokens}, together "
                f"{num_prompt_tokens + params.max_tokens}, but this model's context is {context} tokens: shorten the "
                f"prompt, or ask for at most {room} tokens",
                param="max_tokens",
            )
        if params.min_tokens > room:
            raise too_long(
                f"the prompt has {num_prompt_tokens} tokens and min_tokens is {params.min_tokens}, but this model's "
                f"context is {context} tokens: ask for at most {room} tokens",
                param="min_tokens",
            )
        return room if params.max_tokens is None else params.max_tokens

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) == 0:
            raise RequestError("the prompt has no tokens; give at least one", param="prompt")
        if max(token_ids) >= self._info.vocab_size:
            self._check_ids("prompt", token_ids)

    def _check_params(self, params: SamplingParams) -> None:
        if params.logit_bias:
            self._check_ids("logit_bias", params.logit_bias)
        if params.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", params.allowed_token_ids)
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        for words in params.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", words)

    def _check_ids(self, param: str, token_ids: Collection[int]) -> None:
        vocab_size = self._info.vocab_size
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{param} holds token id {token_id}, but this model's vocabulary has the ids 0 to {vocab_size - 1}",
                    param=param,
                    code="token_id_out_of_vocabulary",
                )


def _as_text(wanted: StructuredOutputsParams) -> StructuredOutputsParams:
    """The same with JSON written as text, quickly: every stream of this process waits meanwhile."""
    try:
        if isinstance(wanted.json, dict):
            return dataclasses.replace(wanted, json=msgspec.json.encode(wanted.json).decode())
        if isinstance(wanted.structural_tag, dict):
            return dataclasses.replace(wanted, structural_tag=msgspec.json.encode(wanted.structural_tag).decode())
    except (TypeError, ValueError, RecursionError):
        return wanted.normalized()  # which knows more, or says what is wrong
    return wanted


def _is_json_object(wanted: StructuredOutputsParams) -> bool:
    """Whether JSON given as text is an object, found without making one."""
    text = wanted.json if wanted.json is not None else wanted.structural_tag
    if not isinstance(text, str):
        return False
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return False
    return True


def _wrap(seed: int) -> int:
    """Into the signed 64-bit range."""
    return (seed + 2**63) % 2**64 - 2**63
