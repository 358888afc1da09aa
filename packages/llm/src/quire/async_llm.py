"""`AsyncLLM`: a whole engine behind an asyncio front. Renderer and text in this process, the engine in its own.

This process never imports torch. The server is built on it; so can be any asyncio program.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.assemble import FACTORY, build_renderer, model_folder, read_model_config
from quire.beam_search import continuations, of_beam, start_search, to_output
from quire.config import QuireConfig
from quire.generation_config import generation_defaults
from quire.logprob_bound import resolved_max_logprobs
from quire_engine import (
    AsyncEngine,
    BeamSearchParams,
    EngineInfo,
    EngineListener,
    OutputKind,
    PauseMode,
    ProcessClient,
    RequestOutput,
)
from quire_interfaces import (
    AdapterInfo,
    RenderedPrompt,
    SamplingParams,
    SchedulerStats,
    Tokenizer,
)
from quire_models.config import ModelConfig
from quire_renderers import ChatRenderer, IncrementalDetokenizer

__all__ = ["AsyncLLM", "make_detokenizer_factory"]


class AsyncLLM:
    """Make it with `start`, then `await ready()` before anything else.

    Args:
        config: Settings of the whole engine.
        listener: Hears of steps and requests, for metrics.
        chat_template: Replaces the checkpoint's own template.
        factory: The engine as "module:function" with its plain-data configuration; None runs `config`. For engines of
            another make, and for tests without weights.
    """

    def __init__(
        self,
        config: QuireConfig,
        *,
        listener: EngineListener | None = None,
        chat_template: str | None = None,
        factory: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        self.config = config
        self._chat_template = chat_template
        name, data = factory or (FACTORY, config.to_dict())
        self._client = ProcessClient(name, data, config.engine, listener)
        self._engine: AsyncEngine | None = None
        self._renderer: ChatRenderer | None = None
        self._model_config: ModelConfig | None = None
        self._eos_token_ids: tuple[int, ...] = ()
        self._beam_search_ids = itertools.count()
        self.folder = Path()
        """Folder of the served checkpoint."""
        self.generation_defaults: dict[str, Any] = {}
        """Sampling fields that generation_config.json or the settings set."""

    @classmethod
    def start(cls, config: QuireConfig, **arguments: Any) -> AsyncLLM:
        """Start the engine process and return at once; arguments as for the class."""
        llm = cls(config, **arguments)
        llm.begin()
        return llm

    def begin(self) -> None:
        """Start the engine process and return at once.

        Raises:
            OSError: the system has no process or no file descriptor to give.
        """
        self._client.start()

    def on_progress(self, listener: Callable[[str, float], None]) -> None:
        """`listener` is called with (stage, fraction) while the engine starts."""
        self._client.on_progress = listener

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
            self._model_config = read_model_config(self.config, self.folder)
            self._renderer = build_renderer(self.config, self.folder, self._model_config, self._chat_template)
            self.generation_defaults = generation_defaults(self.config.model, self.folder)
            info = await self._client.ready()
        except BaseException:
            await self._client.shutdown(0.0)
            raise
        tokenizer = self._renderer.tokenizer
        own = self._model_config.eos_token_ids
        self._eos_token_ids = tuple(dict.fromkeys((*own, *tokenizer.eos_token_ids)))
        self._engine = AsyncEngine(
            self._client,
            tokenizer=tokenizer,
            make_detokenizer=make_detokenizer_factory(tokenizer),
            eos_token_ids=self._eos_token_ids,
            seed=self.config.engine.seed,
        )
        return info

    @property
    def engine(self) -> AsyncEngine:
        """The front that `generate` uses."""
        if self._engine is None:
            raise RuntimeError("the engine is not ready: await ready() first")
        return self._engine

    @property
    def engine_info(self) -> EngineInfo:
        return self.engine.info

    @property
    def model_config(self) -> ModelConfig:
        if self._model_config is None:
            raise RuntimeError("the engine is not ready: await ready() first")
        return self._model_config

    @property
    def renderer(self) -> ChatRenderer:
        if self._renderer is None:
            raise RuntimeError("the engine is not ready: await ready() first")
        return self._renderer

    @property
    def tokenizer(self) -> Tokenizer:
        return self.renderer.tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output, the model's and the tokenizer's."""
        return self._eos_token_ids

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine."""
        return self._client.pid

    def generate(
        self,
        prompt: str | Sequence[int] | RenderedPrompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: str | None = None,
        kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        """Check the request now, run it when iterated; closing the iterator early aborts it. See
        `quire_engine.AsyncEngine.generate` for arguments and errors; text is tokenized here."""
        if not isinstance(prompt, RenderedPrompt):
            prompt = self.renderer.render_prompt(prompt)
        return self.engine.generate(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            tenant=tenant,
            kind=kind,
        )

    async def beam_search(
        self,
        prompt: str | Sequence[int] | RenderedPrompt,
        params: BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: str | None = None,
    ) -> RequestOutput:
        """The most likely continuations; see `LLM.beam_search`. Cancelling it aborts the beams."""
        if not isinstance(prompt, RenderedPrompt):
            prompt = self.renderer.render_prompt(prompt)
        bound = resolved_max_logprobs(self.config.model.max_logprobs, self.engine_info.vocab_size)
        search = start_search(prompt, params, self._eos_token_ids, self.engine_info, bound)
        step_params = params.step_params(search.num_candidates)

        async def step(token_ids: list[int]) -> RequestOutput:
            outputs = self.generate(
                of_beam(prompt, token_ids, self.engine_info),
                step_params,
                priority=priority,
                cache_salt=cache_salt,
                adapter=adapter,
                tenant=tenant,
                kind=OutputKind.FINAL_ONLY,
            )
            async with contextlib.aclosing(outputs) as one:  # type: ignore[type-var]
                return await anext(one)

        num_cached_tokens = 0
        while not search.is_done:
            steps = [asyncio.ensure_future(step(token_ids)) for token_ids in search.prompts()]
            try:
                outputs = await asyncio.gather(*steps)
            finally:  # when one fails, the others have nobody to run for
                for each in steps:
                    each.cancel()
                await asyncio.gather(*steps, return_exceptions=True)
            num_cached_tokens = num_cached_tokens or outputs[0].num_cached_tokens
            search.advance(continuations(outputs))
        name = f"beam-search-{next(self._beam_search_ids)}"
        return to_output(name, prompt, params, search, self.tokenizer, num_cached_tokens)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        self.engine.abort(request_ids)

    async def stats(self) -> SchedulerStats:
        return await self.engine.stats()

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> folder of each adapter that requests may choose; after a restart of the engine the same again."""
        return self._client.adapters

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Read an adapter and serve it under a name from now on.

        Args:
            path: Its folder, or its hub name.
            replace: Another adapter of this name gives way; requests that run with that one keep it.

        Raises:
            RequestError: the name is taken, or the files cannot be used.
        """
        return AdapterInfo(**await self._client.load_adapter(name, path, replace=replace))

    async def unload_adapter(self, name: str) -> None:
        """Serve it no longer; requests that run with it keep it.

        Raises:
            ModelNotFoundError: there is none of this name.
        """
        await self._client.unload_adapter(name)

    def abort_all(self) -> int:
        """End every request with what it has and `FinishReason.ABORT`; how many there were."""
        return self.engine.abort_all()

    def num_requests(self) -> int:
        """Requests being answered."""
        return self.engine.num_requests()

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        """See `AsyncEngine.pause`."""
        await self.engine.pause(mode, clear_cache=clear_cache)

    async def is_paused(self) -> bool:
        """Whether new requests are held, by `pause` or by `sleep`."""
        return await self.engine.is_paused()

    async def resume(self) -> None:
        """Go on with requests that `pause` held."""
        await self.engine.resume()

    async def sleep(self, level: int = 1) -> int:
        """Hold all requests until `wake_up`: 0 keeps everything where it is, 1 forgets the KV cache and gives its
        memory back. Returns bytes.

        Raises:
            RequestError: a level that this engine cannot have.
        """
        return await self._client.sleep(level)

    async def wake_up(self) -> None:
        """Undo `sleep`."""
        await self._client.wake_up()

    async def sleep_level(self) -> int | None:
        """How deep the engine sleeps; None while it is awake."""
        return await self._client.sleep_level()

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        return await self.engine.reset_prefix_cache(preempt_running=preempt_running)

    async def check_integrity(self) -> str | None:
        return await self.engine.check_integrity()

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone."""
        self._client.check_health()

    @property
    def is_loading(self) -> bool:
        """Whether the engine's process starts, or starts again; requests wait for it."""
        return self._client.is_loading

    @property
    def is_resting(self) -> bool:
        """Whether new requests are held, by `pause` or by `sleep`."""
        return self._client.is_resting

    @property
    def stalled_s(self) -> float | None:
        """For how long the engine has taken no step though it has requests; None while that is less than
        `stall_timeout_s`."""
        return self._client.stalled_s if self._client.is_stalled else None

    def kill(self) -> None:
        """End the engine's process now, without a word to its requests."""
        self._client.kill()

    async def shutdown(self, drain_s: float | None = None) -> None:
        """Let requests in flight finish within `drain_s` seconds (None: as configured), then stop. Idempotent."""
        await self._client.shutdown(drain_s)


def make_detokenizer_factory(tokenizer: Tokenizer) -> Callable[[Sequence[int], SamplingParams], Any]:
    """What the engine's output side makes its detokenizers with."""

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
