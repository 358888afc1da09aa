"""From a prompt, sampling parameters and options to messages for the core: everything resolved, everything checked.

Knows the model's limits (context, vocabulary, end tokens); knows no transport.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from quire_engine.alignment import check_alignment, with_decoder_prompt
from quire_engine.length_limits import check_prompt_length, check_whole_prompt, resolve_max_tokens
from quire_engine.messages import AddRequest, EngineInfo, pack_token_ids
from quire_engine.params_resolver import ParamsResolver, check_token_ids
from quire_engine.pooling import pooling_request, resolve_pooling_params
from quire_interfaces import (
    Modality,
    ModelNotFoundError,
    PoolingParams,
    PromptMedia,
    RenderedPrompt,
    RequestError,
    RequestOptions,
    SamplingParams,
    Tokenizer,
)

__all__ = ["InputProcessor"]


class _Checked(NamedTuple):
    """A request that can run."""

    params: SamplingParams
    """Resolved."""
    continued_ids: Sequence[int]
    """The tokens that the output continues."""
    max_tokens: int
    """Number of tokens that the output may have."""


class InputProcessor:
    """Makes the core's requests.

    Args:
        info: The engine's limits.
        eos_token_ids: Tokens that end an output unless `ignore_eos`.
        tokenizer: For `bad_words` and `dry_sequence_breakers`; None takes token ids only.
        seed: Seed of the seeds that requests without one get; None for other ones each time.
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
        self._resolver = ParamsResolver(info, tokenizer)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequence = itertools.count()

    def process(
        self,
        request_id: str,
        prompt: RenderedPrompt,
        params: SamplingParams,
        options: RequestOptions = RequestOptions(),
    ) -> list[AddRequest]:
        """One message per completion to compute. Completion i draws with seed + i; only the first computes prompt
        logprobs.

        Raises:
            ContextLengthError: prompt and output do not fit the context.
            RequestError: a token id is outside the vocabulary, or the prompt is empty.
        """
        options = self._with_default_adapter(prompt.media, options)
        # The length comes before any look at the tokens, which may be millions.
        check_prompt_length(self._info, len(prompt.token_ids), params)
        packed = pack_token_ids(prompt.token_ids)  # which says what is no token id
        params, continued_ids, max_tokens = self._checked(prompt, params, options)
        has_encoder = bool(self._info.max_encoder_len)
        seed = self._new_seed() if params.seed is None else params.seed
        # Internal ids never repeat, whatever callers name their requests: late outputs of an aborted request then
        # cannot be taken for those of its namesake.
        group = f"{request_id}/{next(self._sequence)}"
        first, others = _params_of_completions(params)
        num_completions = params.best_of or params.n
        shares_prompt = num_completions > 1 and (len(continued_ids) > self._info.block_size or has_encoder)
        message = AddRequest(
            request_id=f"{group}.0",
            prompt=packed if continued_ids is prompt.token_ids else pack_token_ids(continued_ids),
            media=prompt.media if prompt.media is not None and prompt.media.spans else None,
            encoder_prompt=packed if has_encoder else b"",
            sampling_params=first,
            seed=_wrap(seed),
            max_tokens=max_tokens,
            stop_token_ids=self._stop_token_ids(params),
            options=options,
            prompt_group=group if shares_prompt else None,
            arrival_time_s=time.monotonic(),
        )
        return [message] + [
            msgspec.structs.replace(
                message, request_id=f"{group}.{index}", sampling_params=others, seed=_wrap(seed + index)
            )
            for index in range(1, num_completions)
        ]

    def process_pooling(
        self,
        request_id: str,
        prompt: RenderedPrompt,
        params: PoolingParams,
        options: RequestOptions = RequestOptions(),
    ) -> AddRequest:
        """The message of a request whose prompt is pooled.

        Raises:
            ContextLengthError: the prompt is longer than the model reads.
            RequestError: a token id is outside the vocabulary, the prompt is empty, or the engine cannot pool so.
        """
        options = self._with_default_adapter(prompt.media, options)
        packed, params = self._checked_pooling(prompt, params, options)
        core_id = f"{request_id}/{next(self._sequence)}.0"
        message = pooling_request(core_id, prompt, packed, params, options, self._info)
        return message if prompt.decoder_token_ids is None else with_decoder_prompt(message, prompt)

    def check(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams | PoolingParams,
        options: RequestOptions = RequestOptions(),
    ) -> None:
        """Whether `process`, or `process_pooling`, would take the request. Raises what they raise; draws no seed."""
        options = self._with_default_adapter(prompt.media, options)
        if isinstance(params, PoolingParams):
            self._checked_pooling(prompt, params, options)
        else:
            self._checked(prompt, params, options)

    def _checked_pooling(
        self, prompt: RenderedPrompt, params: PoolingParams, options: RequestOptions
    ) -> tuple[bytes, PoolingParams]:
        """The packed prompt and the resolved parameters of a request that can be pooled."""
        if self._info.aligns_words or prompt.decoder_token_ids is not None:
            check_alignment(self._info, prompt, params)
        else:
            params = resolve_pooling_params(params, self._info)
            longest = self._info.max_embed_len if params.task == "embed" else 0
            check_whole_prompt(self._info, len(prompt.token_ids), longest)
        packed = pack_token_ids(prompt.token_ids)
        self._check_prompt(prompt.token_ids)
        if prompt.media is not None:
            self._check_media(prompt.media)
        self._check_adapter(options)
        return packed, params

    def _with_default_adapter(self, media: PromptMedia | None, options: RequestOptions) -> RequestOptions:
        """The options with the adapter of the first medium of a prompt that has one, unless the request chooses one."""
        if media is None or options.adapter is not None or not self._info.default_mm_adapters:
            return options
        defaults = (self._info.default_mm_adapters.get(span.item.modality) for span in media.spans)
        adapter = next((name for name in defaults if name is not None), None)
        return options if adapter is None else dataclasses.replace(options, adapter=adapter)

    def _checked(self, prompt: RenderedPrompt, params: SamplingParams, options: RequestOptions) -> _Checked:
        check_prompt_length(self._info, len(prompt.token_ids), params)
        self._check_prompt(prompt.token_ids)
        continued_ids: Sequence[int] = prompt.token_ids
        if self._info.max_encoder_len or prompt.decoder_token_ids is not None:
            self._check_encoder_prompt(prompt, params)
            self._check_ids("decoder_prompt", prompt.decoder_token_ids or ())
            continued_ids = self._info.decoder_prompt(prompt.decoder_token_ids)
        if prompt.media is not None:
            params = self._within_sound(prompt.media, len(continued_ids), params)
        elif self._info.needs_audio:
            raise RequestError(
                f"{self._info.model} writes what it hears: the prompt has no sound; transcribe one "
                "(/v1/audio/transcriptions, LLM.transcribe)",
                param="prompt",
                code="unsupported",
            )
        if self._info.mm_encoder_only:
            params = self._encoding(prompt, params)
        params = self._resolver.resolve(params)
        if prompt.media is not None and any(span.item.modality == Modality.EMBEDS for span in prompt.media.spans):
            _check_prompt_embeds(params)
        self._check_abilities(params, options)
        if params.max_tokens == 0:
            params, continued_ids = self._scoring(continued_ids, params)
        return _Checked(params, continued_ids, resolve_max_tokens(self._info, len(continued_ids), params))

    def _check_abilities(self, params: SamplingParams, options: RequestOptions) -> None:
        """Raises RequestError when the request asks for what this engine does not do."""
        if self._info.runner == "pooling":
            raise self._pools_alone()
        if params.deterministic:
            self._check_determinism(options)
        self._check_adapter(options)

    def _pools_alone(self) -> RequestError:
        tasks = ", ".join(self._info.pooling_tasks)
        return RequestError(
            f"{self._info.model} generates no text, it pools: {tasks}", param="model", code="unsupported"
        )

    def _check_determinism(self, options: RequestOptions) -> None:
        """Raises RequestError when the engine cannot promise a request the same tokens again."""
        if not self._info.batch_invariant:
            raise RequestError(
                "this engine cannot promise the same tokens again: its operators round differently with what else is "
                "in a step; leave deterministic out, or serve where the CPU kernels can (`quire ops` says why not)",
                param="deterministic",
                code="unsupported",
            )
        if options.adapter is not None and self._info.merges_adapters:
            raise RequestError(
                "this engine puts an adapter into the network's weights when it runs alone, which rounds differently; "
                "leave deterministic out, or serve with lora_merge_after at 0",
                param="deterministic",
                code="unsupported",
            )

    def _check_adapter(self, options: RequestOptions) -> None:
        """Raises ModelNotFoundError where an adapter is asked for and none are served."""
        if options.adapter is not None and not self._info.takes_adapters:
            raise ModelNotFoundError(
                f"the adapter {options.adapter!r} was asked for, but this engine serves none; start it with "
                "--enable-lora"
            )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """All token ids that end the output."""
        # A constraint says itself where the output may end, and says it with the end tokens.
        if params.ignore_eos and params.structured_outputs is None:
            return frozenset(params.stop_token_ids)
        return self._eos_token_ids.union(params.stop_token_ids)

    def _encoding(self, prompt: RenderedPrompt, params: SamplingParams) -> SamplingParams:
        """Parameters of a request whose media are encoded, and nothing else: whatever it asks, its output is one end
        token. Raises RequestError for what only a language model has an answer to."""
        built = "this server encodes media only (--mm-encoder-only): it has no language model"
        if prompt.media is None or not prompt.media.spans:
            message = f"{built}, and the prompt has no image, video or sound"
            raise RequestError(message, param="prompt", code="unsupported")
        for field in ("logprobs", "prompt_logprobs", "structured_outputs"):
            if getattr(params, field) is not None:
                raise RequestError(f"{built}; leave {field} out", param=field, code="unsupported")
        ends = () if self._eos_token_ids else (0,)
        return SamplingParams(
            n=params.n, temperature=0.0, max_tokens=1, stop_token_ids=ends, detokenize=params.detokenize
        )

    def _scoring(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[SamplingParams, Sequence[int]]:
        """Parameters and prompt of a request that generates nothing: the prompt's last token is what comes of the ones
        before it, so that a prompt that fills the context needs no room beyond. `RequestProcessor` puts it back."""
        if self._info.max_encoder_len:
            raise RequestError(
                "an encoder reads this model's prompts, and predicts nothing of them: ask for at least 1 token",
                param="max_tokens",
                code="unsupported",
            )
        *context, last = token_ids
        scoring = SamplingParams(
            n=params.n,
            temperature=0.0,
            ignore_eos=True,
            max_tokens=1,
            prompt_logprobs=params.prompt_logprobs,
            deterministic=params.deterministic,
            detokenize=False,
        )
        if not context:
            return scoring, token_ids
        return dataclasses.replace(scoring, logprobs=params.prompt_logprobs, allowed_token_ids=(last,)), context

    def _new_seed(self) -> int:
        bits = os.urandom(8) if self._seeds is None else self._seeds.randbytes(8)
        return int.from_bytes(bits, "little", signed=True)

    def _check_encoder_prompt(self, prompt: RenderedPrompt, params: SamplingParams) -> None:
        if self._info.runner == "pooling":
            raise self._pools_alone()
        if not self._info.max_encoder_len:
            raise RequestError(
                "this model has no encoder, so that it takes one prompt: leave the decoder's out",
                param="decoder_prompt",
                code="unsupported",
            )
        if self._info.modalities and prompt.media is None:
            raise RequestError(
                f"this model's encoder reads {', '.join(self._info.modalities)}, and the prompt has none: give it as "
                "multi_modal_data, and what the output begins with as decoder_prompt",
                param="prompt",
                code="unsupported",
            )
        if params.prompt_logprobs is not None:
            raise RequestError(
                "an encoder reads this model's prompts, and predicts nothing of them: leave prompt_logprobs out",
                param="prompt_logprobs",
                code="unsupported",
            )

    def _within_sound(self, media: PromptMedia, num_prompt_tokens: int, params: SamplingParams) -> SamplingParams:
        """Parameters with which the output ends where a sound does that is added to it. Raises RequestError for media
        that this engine does not take."""
        self._check_media(media)
        most = media.num_output_tokens(num_prompt_tokens)
        if most is None or (params.max_tokens is not None and params.max_tokens <= most):
            return params
        return dataclasses.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    def _check_media(self, media: PromptMedia) -> None:
        for span in media.spans:
            modality = span.item.modality
            if modality not in self._info.modalities:
                takes = ", ".join(self._info.modalities) or "text alone"
                raise RequestError(
                    f"the prompt has a medium of kind {modality}, and this engine takes {takes}",
                    param="prompt",
                    code="unsupported_media",
                )

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) == 0:
            raise RequestError("the prompt has no tokens; give at least one", param="prompt")
        if max(token_ids) >= self._info.vocab_size:
            self._check_ids("prompt", token_ids)

    def _check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        check_token_ids(param, token_ids, self._info.vocab_size)


def _check_prompt_embeds(params: SamplingParams) -> None:
    """Raises RequestError where log probabilities are asked for of tokens that are not known."""
    if params.prompt_logprobs is not None or params.max_tokens == 0:
        raise RequestError(
            "a prompt of embeddings has no tokens whose log probabilities could be told: leave prompt_logprobs out, "
            "and ask for at least 1 token",
            param="max_tokens" if params.prompt_logprobs is None else "prompt_logprobs",
            code="unsupported",
        )


def _params_of_completions(params: SamplingParams) -> tuple[SamplingParams, SamplingParams]:
    """Parameters of the first completion, and of the others, which leave the prompt's log probabilities to it."""
    if params.best_of is not None and params.logprobs is None:
        params = dataclasses.replace(params, logprobs=0)  # by which the best ones are found
    others = params if params.prompt_logprobs is None else dataclasses.replace(params, prompt_logprobs=None)
    return params, others


def _wrap(seed: int) -> int:
    """Into the signed 64-bit range."""
    return (seed + 2**63) % 2**64 - 2**63
