"""`AsyncLLM`: puts a whole engine together behind an asyncio front: renderer and text in this process, the engine in
its own.

This process never imports torch. The server is built on it; so can be any asyncio program.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quire.assemble import FACTORY, build_renderer, media_folder, model_folder, read_model_config
from quire.config import QuireConfig
from quire.generation_config import generation_defaults
from quire.kv_tier import connect_media
from quire.media import MediaFront, media_front
from quire.parallel.data_parallel import has_remote_engines, pool_ranks
from quire.parallel.rank_config import rank_config
from quire.pooling.batch import pool_batch
from quire.pooling.calls import Errors, check_errors
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling.poolers import read_pooler_spec
from quire.pooling.prompts import PoolingPrompt, PoolingPrompts, PromptOptions
from quire.prompts import Prompt, name_prompt, parse_prompt_async
from quire.speech.sounds import longest_sound_s
from quire.speech.transcribers import Transcriber
from quire.speech.transcribing import SpeechFront, speech_front
from quire_engine import (
    AsyncEngine,
    EngineInfo,
    EngineListener,
    EngineOwner,
    EnginePool,
    HubClient,
    ProcessClient,
    RequestOutput,
)
from quire_interfaces import (
    EngineDeadError,
    OverloadedError,
    PoolingParams,
    QuireError,
    RequestError,
    RequestOptions,
    SamplingParams,
    Tokenizer,
)
from quire_renderers import ChatRenderer, IncrementalDetokenizer

if TYPE_CHECKING:
    from quire_models.config import ModelConfig

__all__ = ["AsyncLLM", "make_detokenizer_factory"]


class AsyncLLM:
    """The parts of a served engine. Make it with `start`, then `await ready()` before anything else.

    Requests go to `engine`, text becomes prompts by `renderer`, control calls go to `client`; `generate` does both for
    the prompts that `LLM.generate` takes:

        llm = AsyncLLM.start(config)
        await llm.ready()
        async for output in llm.generate("Once", SamplingParams()):
            ...
        await llm.shutdown()

    In conversations, images, videos and sounds are prepared first, and held until the request has ended:

        held = await llm.media.prepare(media_sources(messages))
        try:
            prompt = llm.renderer.render_chat(messages, media=held)
            ...
        finally:
            held.release()

    Args:
        config: Settings of the whole engine.
        listener: Hears of steps and requests, for metrics.
        listener_of: The listener of the engine of a rank, where there are several; None for `listener`.
        chat_template: Replaces the checkpoint's own template.
        factory: The engine as "module:function" with its plain-data configuration; None runs `config`. For engines of
            another make, and for tests without weights.
        client: Reaches engines of another process; None starts them.

    Raises:
        ConfigError: settings of data parallel that contradict each other.
    """

    def __init__(
        self,
        config: QuireConfig,
        *,
        listener: EngineListener | None = None,
        listener_of: Callable[[int], EngineListener] | None = None,
        chat_template: str | None = None,
        factory: tuple[str, dict[str, Any]] | None = None,
        client: HubClient | None = None,
    ) -> None:
        self.config = config
        self._chat_template = chat_template
        self.client = client or make_client(config, listener_of or (lambda rank: listener), factory)
        """The engine process, or processes: start and end, pauses, adapters, statistics, health."""
        self._engine: AsyncEngine | None = None
        self._renderer: ChatRenderer | None = None
        self.media: MediaFront | None = None
        """What prepares images, videos and sounds; None where the model takes text only, and before `ready`."""
        self.pooling_prompts: PoolingPrompts | None = None
        """What makes prompts of texts that are pooled; None where the model pools nothing, and before `ready`."""
        self.transcriber: Transcriber | None = None
        """What writes down recordings; None where the model does not hear, and before `ready`."""
        self.speech: SpeechFront | None = None
        """What transcribes, where the model is made for it; None for others, and before `ready`."""
        self.folder = Path()
        """Folder of the served checkpoint."""
        self.generation_defaults: dict[str, Any] = {}
        """Sampling fields that generation_config.json or the settings set."""

    @classmethod
    def start(cls, config: QuireConfig, **arguments: Any) -> AsyncLLM:
        """Start the engine process and return at once; arguments as for the class.

        Raises:
            OSError: the system has no process or no file descriptor to give.
        """
        llm = cls(config, **arguments)
        llm.client.start()
        return llm

    async def ready(self) -> EngineInfo:
        """Load tokenizer and template here while the engine loads there; wait for both.

        Raises:
            CheckpointError, ConfigError: the model or a setting is wrong.
            EngineDeadError: the engine could not start; the message carries its own cause and remedy.
        """
        if self._engine is not None:
            return self._engine.info
        try:
            self.folder = model_folder(self.config)
            model_config = read_model_config(self.config, self.folder)
            with_media = media_folder(self.config, self.folder)
            self.media = await asyncio.to_thread(media_front, self.config, with_media, model_config)
            self._renderer = build_renderer(
                self.config,
                with_media,
                model_config,
                self._chat_template,
                placeholders=None if self.media is None else self.media.placeholders,
            )
            self.speech = speech_front(self.folder, model_config, self._renderer.tokenizer, self.media)
            self.generation_defaults = generation_defaults(self.config.model, self.folder)
            info = await self.client.ready()
            await asyncio.to_thread(connect_media, self.media, info)
        except BaseException:
            await self.shutdown()
            raise
        tokenizer = self._renderer.tokenizer
        if info.pooling_tasks:
            spec = read_pooler_spec(self.config, self.folder, model_config, tokenizer)
            self.pooling_prompts = PoolingPrompts(
                self._renderer,
                spec,
                info.max_model_len,
                info.max_embed_len,
                media=self.media,
                is_prefix_lm=model_config.media is not None and model_config.media.is_prefix_lm,
            )
        self._engine = AsyncEngine(
            self.client,
            tokenizer=tokenizer,
            make_detokenizer=make_detokenizer_factory(tokenizer),
            eos_token_ids=dict.fromkeys((*model_config.eos_token_ids, *tokenizer.eos_token_ids)),
            seed=self.config.engine.seed,
        )
        self.transcriber = self._make_transcriber(info, model_config)
        return info

    def _make_transcriber(self, info: EngineInfo, model: ModelConfig) -> Transcriber | None:
        # Most servers hear nothing, and others have one of these.
        if self.speech is not None and self._engine is not None:
            from quire.speech.whisper_transcriber import WhisperTranscriber

            return WhisperTranscriber(self.speech, self._engine, self.config.model.max_logprobs)
        if "transcribe" in info.pooling_tasks:
            from quire.speech.frame_transcriber import FrameTranscriber
            from quire.speech.frames import FrameSpeech

            speech = FrameSpeech(self.folder, model, self.renderer.tokenizer, info.max_encoder_len)
            return FrameTranscriber(self.encode, info.model, speech)
        media = self.media
        if media is None or "audio" not in media.placeholders or info.runner != "generate" or info.mm_encoder_only:
            return None
        if model.num_mel_bins:  # a Whisper that lacks tokens
            return None
        from quire.speech.chat_transcriber import ChatTranscriber

        longest_s = longest_sound_s(self.folder, model, info.max_encoder_len)
        return ChatTranscriber(self.engine, self.renderer, media, self.folder, longest_s)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions = RequestOptions(),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; each output has what is new. Closing it ends the request.

        Args:
            prompt: Text, token ids, or a dictionary, which may hold media or embeddings (`LLM.generate`).
            sampling_params: None takes what generation_config.json and the settings ask for.
            options: What else is said of the request; a salt of the prompt goes before its own.

        Raises:
            RequestError: the prompt or its parameters are wrong.
        """
        parsed = await parse_prompt_async(prompt, self.renderer, self.media)
        try:
            if parsed.cache_salt is not None:
                options = dataclasses.replace(options, cache_salt=parsed.cache_salt)
            params = SamplingParams(**self.generation_defaults) if sampling_params is None else sampling_params
            async with contextlib.aclosing(self.engine.generate(parsed.rendered, params, options)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            if parsed.media is not None:
                parsed.media.release()

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        options: RequestOptions = RequestOptions(),
        *,
        request_id: str | None = None,
        **prompt_options: Unpack[PromptOptions],
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Pool one prompt: an embedding, classes, a score. Cancelling the call drops the request before it is computed.

        Args:
            prompt: Text, token ids, or a dictionary, with `text_pair` for a pair of texts (`LLM.encode`).
            pooling_params: What to pool, and how; None for the model's first task.
            options: What else is said of the request; a salt of the prompt goes before its own.
            request_id: The caller's name for it, unique among those in flight; None makes one.
            **prompt_options: How to write texts.

        Returns:
            The output; one that failed in the engine has an `error`.

        Raises:
            RequestError: the prompt or its parameters are wrong, or the model pools nothing.
            OverloadedError, EngineDeadError: by the engine.
        """
        parsed = await self._pooling_prompt(prompt, pooling_params, prompt_options)
        try:
            return PoolingRequestOutput(
                await self.engine.encode(parsed.rendered, parsed.params, parsed.salted(options), request_id=request_id)
            )
        finally:
            parsed.release()

    async def encode_batch(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        options: RequestOptions = RequestOptions(),
        *,
        errors: Errors = "raise",
        **prompt_options: Unpack[PromptOptions],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool many prompts, so many of them at a time as the engine runs in two steps. Arguments as for `encode`.

        Args:
            errors: "raise" ends the call with the first prompt that cannot run, which the message names by its index;
                "per_item" gives such a prompt an output with an `error`, and answers the others.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are wrong, or the model pools nothing.
            QuireError: the engine could not compute a prompt.
        """
        check_errors(errors)

        async def prompt_of(place: int) -> PoolingPrompt:
            return await self._pooling_prompt(prompts[place], pooling_params, prompt_options)

        def on_error(place: int, error: QuireError) -> QuireError:
            name_prompt(error, place, len(prompts))
            if errors == "raise" or isinstance(error, (OverloadedError, EngineDeadError)):
                raise error
            return error

        outputs = await pool_batch(self.engine, len(prompts), prompt_of, options, on_error)
        return [
            PoolingRequestOutput.failed(f"request[{place}]", output)
            if isinstance(output, QuireError)
            else PoolingRequestOutput(output)
            for place, output in enumerate(outputs)
        ]

    async def _pooling_prompt(
        self, prompt: Prompt, pooling_params: PoolingParams | None, options: PromptOptions
    ) -> PoolingPrompt:
        """Raises RequestError where the model pools nothing, or as `PoolingPrompts.render`."""
        if self.pooling_prompts is None:
            raise RequestError(
                f"{self.engine.info.model} generates text and pools nothing", param="task", code="unsupported"
            )
        media = await self.pooling_prompts.prepare(prompt)
        return self.pooling_prompts.render(prompt, pooling_params or PoolingParams(), media, **options)

    def kill(self) -> None:
        """End the engine process now and remove prepared media; for an end of this process that waits for nothing."""
        self.client.kill()
        if self.media is not None:
            self.media.remove_store()

    async def shutdown(self, timeout_s: float = 0.0) -> None:
        """End the engine process, which may finish its requests for `timeout_s`, and what prepares media."""
        await self.client.shutdown(timeout_s)
        if self.media is not None:
            self.media.close()

    @property
    def engine(self) -> AsyncEngine:
        """What runs requests. Raises RuntimeError before `ready`."""
        if self._engine is None:
            raise RuntimeError("the engine is not ready: await ready() first")
        return self._engine

    @property
    def renderer(self) -> ChatRenderer:
        """What makes prompts of text and of messages. Raises RuntimeError before `ready`."""
        if self._renderer is None:
            raise RuntimeError("the engine is not ready: await ready() first")
        return self._renderer


def make_client(
    config: QuireConfig,
    listener_of: Callable[[int], EngineListener | None],
    factory: tuple[str, dict[str, Any]] | None,
) -> ProcessClient | EnginePool:
    """The client of one engine, or of all of this server. Raises as `engine_ranks`."""
    ranks = pool_ranks(config.data_parallel)
    if ranks.is_alone and not config.data_parallel.enable_elastic_ep:
        name, data = factory or (FACTORY, config.to_dict())
        return ProcessClient(name, data, config.engine, listener_of(0))

    def make_engine(rank: int, owner: EngineOwner) -> ProcessClient:
        name, data = factory or (FACTORY, rank_config(config, rank).to_dict())
        return ProcessClient(name, data, config.engine, listener_of(rank), owner=owner)

    if has_remote_engines(config.data_parallel):
        from quire.parallel.engine_nodes import make_hosts_pool

        return make_hosts_pool(config, make_engine, listener_of)
    return EnginePool(make_engine, ranks.size, config.engine, first_rank=ranks.first)


def make_detokenizer_factory(tokenizer: Tokenizer) -> Callable[[Sequence[int], SamplingParams], Any]:
    """A `quire_engine.DetokenizerFactory` over a tokenizer."""

    def make(prompt_token_ids: Sequence[int], params: SamplingParams) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    return make
