"""`LLM`: offline batches in this process, with the scheduler, KV cache and runner of a server."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.assemble import build_parts, build_renderer, media_folder, model_folder, read_model_config
from quire.async_llm import make_detokenizer_factory
from quire.checkpoint_notes import checkpoint_notes
from quire.config import QuireConfig
from quire.control_methods import ControlMethods
from quire.generation_config import generation_defaults
from quire.kv_tier import connect_media
from quire.logprob_bound import check_logprobs, resolved_max_logprobs
from quire.lora_request import LoRAChoice, LoRARequest
from quire.media import media_front, media_sources
from quire.outputs import RequestOutput, to_request_output
from quire.parallel.data_parallel import engine_ranks
from quire.per_prompt import one_each
from quire.pooling.calls import PoolingCalls
from quire.pooling.methods import PoolingMethods
from quire.pooling.poolers import read_pooler_spec
from quire.pooling.prompts import PoolingPrompts
from quire.progress import ProgressChoice, progress
from quire.prompts import ParsedPrompt, Prompt, naming_prompt, parse_prompts, release_media
from quire.queue_methods import Messages, QueueMethods
from quire.shared_engine import OfflineRequest, SharedEngine
from quire.sleep_tags import checked_tags
from quire.speech.methods import SpeechMethods
from quire.transfer_params import check_transfer
from quire_engine import BeamSearchParams, EngineInfo, LLMEngine
from quire_engine.beam_requests import beam_prompt, beams_output, continuations, start_search
from quire_interfaces import (
    AdapterInfo,
    AdapterStore,
    ConfigError,
    FinishReason,
    LogitsProcessor,
    RequestError,
    RequestOptions,
    SamplingParams,
    SchedulerStats,
    Tokenizer,
)
from quire_renderers import ParsedMessage, fold_events

__all__ = ["LLM"]

logger = logging.getLogger(__name__)


class LLM(ControlMethods, QueueMethods, PoolingMethods, SpeechMethods):
    """A model, ready to generate. Thread-safe: the calls of several threads share every step.

    Args:
        model: Checkpoint folder or hub name; None for the embedded demo model.
        config: Settings, all of them; None makes them from `settings` and, below these, QUIRE_ environment variables.
        logits_processors: Name -> processor that requests choose with
            `SamplingParams(extra_args={"logits_processors": [name]})`; or names of plug-ins (docs/plugins.md).
        **settings: Any setting by name, e.g. `max_model_len=4096, max_num_seqs=64, dtype="float32"`.

    Raises:
        ConfigError: unknown or impossible settings, too little memory.
        CheckpointError: a model that is missing or not understood.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: QuireConfig | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        if logits_processors is not None and not isinstance(logits_processors, Mapping):
            settings["logits_processors"], logits_processors = tuple(logits_processors), None
        if config is None:
            if model is not None:
                settings["model"] = str(model)
            config = QuireConfig.from_environment(**settings)
        if not engine_ranks(config.data_parallel).is_alone or config.data_parallel.data_parallel_size_local:
            raise ConfigError(
                "LLM runs its model in this process, with one engine: use AsyncLLM for data_parallel_size above 1, or "
                "an LLM in each of several processes",
                field="data_parallel_size",
            )
        self.config = config
        self.model_folder = model_folder(config)
        self.model_config = read_model_config(config, self.model_folder)
        with_media = media_folder(config, self.model_folder)
        self.media = media_front(config, with_media, self.model_config)
        """What prepares images, videos and sounds; None where the model takes text only."""
        placeholders = None if self.media is None else self.media.placeholders
        self.renderer = build_renderer(config, with_media, self.model_config, placeholders=placeholders)
        self._defaults = generation_defaults(config.model, self.model_folder)
        for note in checkpoint_notes(config.model, self.model_folder):  # servers have them in their report
            logger.warning("%s: %s", config.model.model or self.model_folder, note)
        tokenizer = self.renderer.tokenizer
        self._eos_token_ids = tuple(dict.fromkeys((*self.model_config.eos_token_ids, *tokenizer.eos_token_ids)))
        try:
            parts = build_parts(config, logits_processors=logits_processors, tokenizer=tokenizer)
        except BaseException:
            if self.media is not None:
                self.media.close()
            raise
        connect_media(self.media, parts.info)
        self.engine = LLMEngine(
            parts,
            config.engine,
            tokenizer=tokenizer,
            make_detokenizer=make_detokenizer_factory(tokenizer),
            eos_token_ids=self._eos_token_ids,
        )
        self._shared = SharedEngine(self.engine, self._load_requested)
        self._pooling = self._pooling_calls() if self.engine_info.pooling_tasks else None
        self._loaded_requests: dict[str, LoRARequest] = {}
        """What each adapter that a request brought was loaded for."""

    def _pooling_calls(self) -> PoolingCalls:
        """What embeds, classifies and scores."""
        spec = read_pooler_spec(self.config, self.model_folder, self.model_config, self.renderer.tokenizer)
        prompts = PoolingPrompts(
            self.renderer,
            spec,
            self.engine_info.max_model_len,
            self.engine_info.max_embed_len,
            media=self.media,
            is_prefix_lm=self.model_config.media is not None and self.model_config.media.is_prefix_lm,
        )
        return PoolingCalls(self._shared, prompts, self.engine_info)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.renderer.tokenizer

    @property
    def engine_info(self) -> EngineInfo:
        """What runs, and what was chosen."""
        return self.engine.info

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV cache."""
        return self.engine.info.dtype

    def get_tokenizer(self) -> Tokenizer:
        """`tokenizer`, by vLLM's name."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json and the settings ask for."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressChoice = True,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once.

        Args:
            prompts: One prompt or many.
            sampling_params: One for all, or one each; None takes `get_default_sampling_params`.
            use_tqdm: Show a progress bar on standard error; a callable makes one of its own, as tqdm does.
            lora_request: The adapter to run with, by name or as a `LoRARequest`, which is loaded if it is not yet; one
                for all, or one each; None runs the network as it is.
            priority: Lower runs first, under the priority policy; one for all, or one each.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are wrong; the message says which one, and none goes on.
        """
        parsed = parse_prompts(prompts, self.renderer, self.media)
        return self._run(parsed, sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressChoice = True,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, all at once; arguments as for `generate` and `quire_interfaces.Renderer.render_chat`.

        Args:
            messages: One conversation (a list of messages) or many. Parts of contents may be images, videos and sounds,
                by URL or as Python has them: `{"type": "image_pil", "image_pil": image}`.
            chat_template_content_format: Only "auto": the chat template says which form of content it takes.
            mm_processor_kwargs: Arguments of the model's processor.

        Raises:
            RequestError: a conversation or its parameters are wrong; the message says which one, and none goes on.
        """
        prompts = self._conversations(
            messages,
            chat_template_content_format,
            mm_processor_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(prompts, sampling_params, use_tqdm, 0, lora_request)

    def _conversations(
        self,
        messages: Messages | Sequence[Messages],
        content_format: str,
        mm_processor_kwargs: Any,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        **options: Any,
    ) -> list[ParsedPrompt]:
        """See `QueueMethods._conversations`."""
        if content_format != "auto":
            raise RequestError(
                f"chat_template_content_format must be 'auto', got {content_format!r}: the chat template says which "
                "form of content it takes",
                param="chat_template_content_format",
            )
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(
                f"messages must be a conversation or a list of conversations, got {type(messages).__name__}",
                param="messages",
            )
        options["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        options["continue_final_message"] = continue_final_message
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Sequence[Messages] = [messages] if one else messages  # type: ignore[list-item,assignment]  # told apart by `one`
        prompts = []
        for index, conversation in enumerate(conversations):
            with naming_prompt(index, len(conversations)):
                held = None
                if self.media is not None:
                    held = self.media.prepare_now(media_sources(conversation), mm_processor_kwargs)
                rendered = self.renderer.render_chat(conversation, media=held, **options)
            prompts.append(ParsedPrompt(rendered, media=held))
        return prompts

    def _parsed(self, prompts: Prompt | Iterable[Prompt]) -> list[ParsedPrompt]:
        return parse_prompts(prompts, self.renderer, self.media)

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Read an adapter and offer it under a name.

        Args:
            path: Its folder, or its hub name.
            replace: Another adapter of this name gives way.

        Raises:
            RequestError: the name is taken, or this engine serves no adapters.
            CheckpointError: the files cannot be used.
        """
        return self._adapters.load(name, str(path), replace=replace).result()

    def unload_adapter(self, name: str) -> None:
        """Offer it no longer. Raises ModelNotFoundError when there is none of this name."""
        self._adapters.unload(name)

    def list_adapters(self) -> list[AdapterInfo]:
        """Every adapter that is offered."""
        return self._adapters.loaded()

    @property
    def _adapters(self) -> AdapterStore:
        store = self.engine.core.parts.adapters
        if store is None:
            raise RequestError("this engine serves no adapters; set enable_lora", param="lora_request")
        return store

    def _check_adapters(self, adapters: Sequence[LoRAChoice]) -> None:
        """Load what is new already, so that what cannot be read is told before anything runs.

        Raises:
            RequestError, CheckpointError: an adapter is not there or cannot be used.
        """
        for each in dict.fromkeys(adapters):
            if isinstance(each, LoRARequest):
                self._load_requested(each)
            elif each is not None:
                self._adapters.resolve(each)

    def _load_requested(self, request: LoRARequest) -> None:
        """Have the adapter under its name: read where the name is new or stands for another one now."""
        loaded_info = {info.name: info for info in self.list_adapters()}.get(request.lora_name)
        last = self._loaded_requests.get(request.lora_name)
        is_same = loaded_info is not None and loaded_info.path == request.lora_path
        is_same = is_same and (last is None or last.lora_int_id == request.lora_int_id)
        if request.load_inplace or not is_same:
            self.load_adapter(request.lora_name, request.lora_path, replace=True)
        self._loaded_requests[request.lora_name] = request

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
    ) -> list[RequestOutput]:
        """The most likely continuations, by beam search; the beams of all prompts run together.

        Args:
            prompts: One prompt or many, as for `generate`.
            params: How wide and how far.
            lora_request: As for `generate`.

        Returns:
            One output per prompt, in order, each with up to `beam_width` completions, the best one first.

        Raises:
            RequestError: a prompt or the parameters are wrong; nothing runs then.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {type(params).__name__}", param="params")
        parsed = parse_prompts(prompts, self.renderer, self.media)
        try:
            return self._beam_search(parsed, params, lora_request)
        finally:
            release_media(parsed)

    def _beam_search(
        self, parsed: list[ParsedPrompt], params: BeamSearchParams, lora_request: LoRAChoice | Sequence[LoRAChoice]
    ) -> list[RequestOutput]:
        """Arguments, result and errors as of `beam_search`, of prompts that were rendered."""
        bound = resolved_max_logprobs(self.config.model.max_logprobs, self.engine_info.vocab_size)
        searches = []
        for index, each in enumerate(parsed):
            with naming_prompt(index, len(parsed)):
                searches.append(start_search(each.rendered, params, self._eos_token_ids, self.engine_info, bound))
        if not searches:
            return []
        step_params = params.step_params(searches[0].num_candidates)
        requests = self._requests(parsed, step_params, 0, lora_request)
        cached = [0] * len(searches)
        while open_ones := [number for number, search in enumerate(searches) if not search.is_done]:
            prefixes = [searches[number].prompts() for number in open_ones]
            step = [
                self._beam_request(requests[number], ids)
                for number, own_prefixes in zip(open_ones, prefixes, strict=True)
                for ids in own_prefixes
            ]
            outputs = iter(self._shared.run(step))
            for number, own_prefixes in zip(open_ones, prefixes, strict=True):
                own = [next(outputs) for _ in own_prefixes]
                cached[number] = cached[number] or own[0].num_cached_tokens
                searches[number].advance(continuations(own))
        return [
            to_request_output(
                beams_output(f"beam-search-{i}", parsed[i].rendered, params, search, self.tokenizer, cached[i]),
                requests[i].lora_request,
            )
            for i, search in enumerate(searches)
        ]

    def _beam_request(self, request: OfflineRequest, token_ids: list[int]) -> OfflineRequest:
        return dataclasses.replace(request, prompt=beam_prompt(request.prompt, token_ids, self.engine_info))

    def parse(
        self,
        output: RequestOutput,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[ParsedMessage]:
        """What `chat` answered, as messages: text, reasoning and tool calls told apart in the model's own format.

        Args:
            output: An output of `chat`.
            tools: The tools that were offered; None parses no calls.
            chat_template_kwargs: As given to `chat`.

        Returns:
            One message per completion.
        """
        form = self.renderer.chat_format
        messages = []
        for completion in output.outputs:
            parser = form.parser(tools, prompt=output.prompt, chat_template_kwargs=chat_template_kwargs)
            text = completion.text
            if form.keeps_special_tokens(tools=bool(tools)):  # the markers, which the text leaves out
                text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
            stopped = completion.finish_reason is FinishReason.STOP and not isinstance(completion.stop_reason, str)
            messages.append(fold_events([*parser.feed(text), *parser.finish(stopped=stopped)]))
        return messages

    def stats(self) -> SchedulerStats:
        with self._shared.turn() as engine:
            return engine.stats()

    def sleep(self, level: int = 1) -> int:
        """Take no requests until `wake_up`.

        Args:
            level: 0 keeps everything where it is; 1 forgets the KV cache and gives its memory back; 2 discards the
                weights as well, and `wake_up` loads the checkpoint again as it is then. So does 1 on an accelerator.

        Returns:
            Bytes that were given back.

        Raises:
            RequestError: a level that this engine cannot have, or another thread's call has requests that run.
        """
        with self._shared.turn() as engine:
            if engine.has_unfinished_requests():
                raise RequestError("requests of another call run: sleep when it has ended", code="busy")
            return engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`. Nothing happens when it is awake.

        Args:
            tags: Of vLLM, what to wake ("weights", "kv_cache", "scheduling"); None for all. "weights" alone are loaded,
                if level 2 has discarded them; it takes no requests yet.

        Raises:
            RequestError: there is no such tag, or the weights were discarded and are not among them.
            CheckpointError: they cannot be loaded; it sleeps on.
        """
        checked = checked_tags(tags)
        with self._shared.turn() as engine:
            engine.wake_up(checked)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests of another call hold some."""
        with self._shared.turn() as engine:
            return engine.reset_prefix_cache()

    def reset_encoder_cache(self) -> bool:
        """Forget the embeddings that towers have made of media; False while requests of another call need some."""
        with self._shared.turn() as engine:
            return engine.reset_encoder_cache()

    def reset_mm_cache(self) -> None:
        """Forget prepared media that no request holds."""
        if self.media is not None:
            self.media.reset()

    def close(self) -> None:
        """Give everything back, between two steps; calls of other threads raise EngineDeadError. Idempotent."""
        self._shared.close()
        if self.media is not None:
            self.media.close()

    def shutdown(self) -> None:
        """`close`, by vLLM's name."""
        self.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: list[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: ProgressChoice,
        priority: int | Sequence[int],
        lora_request: LoRAChoice | Sequence[LoRAChoice],
    ) -> list[RequestOutput]:
        try:
            requests = self._requests(prompts, sampling_params, priority, lora_request)
            with progress(len(requests), use_tqdm) as advance:
                outputs = self._shared.run(requests, advance)
        finally:
            release_media(prompts)
        return [to_request_output(out, each.lora_request) for out, each in zip(outputs, requests, strict=True)]

    def _requests(
        self,
        prompts: list[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        lora_request: LoRAChoice | Sequence[LoRAChoice],
    ) -> list[OfflineRequest]:
        """
        Raises:
            RequestError: the parameters are wrong, or are not as many as the prompts.
        """
        if self.engine.core.sleep_level is not None:
            raise RequestError("this LLM sleeps: call wake_up() first", code="sleeping")
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params: list[SamplingParams] = one_each("sampling_params", sampling_params, len(prompts), SamplingParams)
        priorities = one_each("priority", priority, len(prompts), int)
        adapters: list[LoRAChoice] = one_each("lora_request", lora_request, len(prompts), LoRARequest, str, type(None))
        if any(each is not None for each in adapters):
            with self._shared.turn():
                self._check_adapters(adapters)
        for index, each in enumerate(params):
            with naming_prompt(index, len(params)):
                self._check_logprobs(each)
        return [
            OfflineRequest(
                prompt=prompt.rendered,
                params=each,
                options=RequestOptions(
                    priority=prior,
                    cache_salt=prompt.cache_salt,
                    adapter=adapter.lora_name if isinstance(adapter, LoRARequest) else adapter,
                ),
                lora_request=dataclasses.replace(adapter, load_inplace=False)
                if isinstance(adapter, LoRARequest)
                else None,
            )
            for prompt, each, prior, adapter in zip(prompts, params, priorities, adapters, strict=True)
        ]

    def _check_logprobs(self, params: SamplingParams) -> None:
        check_transfer(params, self.engine_info)
        remedy = "ask for less, or set max_logprobs"
        check_logprobs(params, self.config.model.max_logprobs, self.engine_info.vocab_size, remedy=remedy)
