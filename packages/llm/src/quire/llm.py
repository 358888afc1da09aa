"""`LLM`: offline batches in this process. The same scheduler, KV cache and runner as behind the server."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from quire.assemble import build_parts, build_renderer, model_folder, read_model_config
from quire.async_llm import generation_defaults, make_detokenizer_factory
from quire.beam_search import continuations, of_beam, start_search, to_output
from quire.config import QuireConfig
from quire.logprob_bound import check_logprobs, resolved_max_logprobs
from quire_engine import BeamSearchParams, EngineInfo, LLMEngine, RequestOutput
from quire_interfaces import (
    AdapterInfo,
    AdapterStore,
    FinishReason,
    LogitsProcessor,
    OverloadedError,
    RenderedPrompt,
    RequestError,
    SamplingParams,
    SchedulerStats,
    Tokenizer,
)
from quire_renderers import ParsedMessage, fold_events

__all__ = ["LLM", "LoRARequest"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}. For models that read the prompt with an encoder
also {"encoder_prompt": any of these, "decoder_prompt": any of these or None}: what the output is to begin with."""
Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRARequest:
    """An adapter that a request runs with. The fields are vLLM's."""

    lora_name: str
    lora_path: str
    lora_int_id: int = 0
    """Not used: the name and the content tell adapters apart."""


LoRAChoice = LoRARequest | str | None


class LLM:
    """A model, ready to generate.

    Args:
        model: Checkpoint folder or hub name; None for the embedded demo model.
        config: Settings, all of them; None makes them from `settings` and, below these, QUIRE_ environment variables.
        logits_processors: Name -> processor that requests choose with
            `SamplingParams(extra_args={"logits_processors": [name]})`.
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
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        **settings: Any,
    ) -> None:
        if config is None:
            if model is not None:
                settings["model"] = str(model)
            config = QuireConfig.from_environment(**settings)
        self.config = config
        self.model_folder = model_folder(config)
        self.model_config = read_model_config(config, self.model_folder)
        self.renderer = build_renderer(config, self.model_folder, self.model_config)
        self._defaults = generation_defaults(config.model, self.model_folder)
        tokenizer = self.renderer.tokenizer
        self._eos_token_ids = tuple(dict.fromkeys((*self.model_config.eos_token_ids, *tokenizer.eos_token_ids)))
        parts = build_parts(config, logits_processors=logits_processors, tokenizer=tokenizer)
        self.engine = LLMEngine(
            parts,
            config.engine,
            tokenizer=tokenizer,
            make_detokenizer=make_detokenizer_factory(tokenizer),
            eos_token_ids=self._eos_token_ids,
        )

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

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json and the settings ask for."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once.

        Args:
            prompts: One prompt or many.
            sampling_params: One for all, or one each; None takes `default_sampling_params`.
            use_tqdm: Show a progress bar on standard error.
            priority: Lower runs first, under the priority policy.
            lora_request: The adapter to run with, by name or as a `LoRARequest`, which is loaded if it is not yet; one
                for all, or one each; None runs the network as it is.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing runs then.
        """
        return self._run(self._render_all(prompts), sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, all at once; arguments as for `generate` and `quire_interfaces.Renderer.render_chat`.

        Args:
            messages: One conversation (a list of messages) or many.
        """
        one = len(messages) > 0 and isinstance(messages[0], dict)
        conversations: Sequence[Messages] = [messages] if one else messages  # type: ignore[list-item,assignment]
        rendered = [
            self.renderer.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(rendered, sampling_params, use_tqdm, 0, lora_request)

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

    def _adapter_names(self, choice: LoRAChoice | Sequence[LoRAChoice], count: int) -> list[str | None]:
        """The name for each prompt; what is not loaded yet is loaded."""
        many = [choice] * count if choice is None or isinstance(choice, str | LoRARequest) else list(choice)
        if len(many) != count:
            raise RequestError(
                f"{count} prompts came with {len(many)} adapters; give one for all or one each", param="lora_request"
            )
        known = {info.name: info for info in self.list_adapters()} if any(many) else {}
        for each in many:
            if isinstance(each, LoRARequest) and each.lora_name not in known:
                known[each.lora_name] = self.load_adapter(each.lora_name, each.lora_path)
        return [each.lora_name if isinstance(each, LoRARequest) else each for each in many]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
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
        rendered = self._render_all(prompts)
        bound = resolved_max_logprobs(self.config.model.max_logprobs, self.engine_info.vocab_size)
        searches = [start_search(each, params, self._eos_token_ids, self.engine_info, bound) for each in rendered]
        cached = [0] * len(searches)
        adapters = self._adapter_names(lora_request, len(searches))
        while open_ones := [number for number, search in enumerate(searches) if not search.is_done]:
            prefixes = [searches[number].prompts() for number in open_ones]
            step = [
                of_beam(rendered[number], ids, self.engine_info)
                for number, each in zip(open_ones, prefixes, strict=True)
                for ids in each
            ]
            chosen = [adapters[number] for number, each in zip(open_ones, prefixes, strict=True) for _ in each]
            outputs = iter(self._run(step, params.step_params(searches[open_ones[0]].num_candidates), False, 0, chosen))
            for number, each in zip(open_ones, prefixes, strict=True):
                own = [next(outputs) for _ in each]
                cached[number] = cached[number] or own[0].num_cached_tokens
                searches[number].advance(continuations(own))
        return [
            to_output(f"beam-search-{i}", rendered[i], params, search, self.tokenizer, cached[i])
            for i, search in enumerate(searches)
        ]

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
        return self.engine.stats()

    def sleep(self, level: int = 1) -> int:
        """Take no requests until `wake_up`.

        Args:
            level: 0 keeps everything where it is; 1 forgets the KV cache and gives its memory back, on a CPU.

        Returns:
            Bytes that were given back.

        Raises:
            RequestError: a level that this engine cannot have.
        """
        return self.engine.sleep(level)

    def wake_up(self) -> None:
        """Undo `sleep`. Nothing happens when it is awake."""
        self.engine.wake_up()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render_all(self, prompts: Prompt | Sequence[Prompt]) -> list[RenderedPrompt]:
        if not isinstance(prompts, (str, Mapping, Sequence)):
            raise RequestError(
                f"prompts must be a text, token ids, a dictionary, or a list of these, got {type(prompts).__name__}",
                param="prompts",
            )
        # A string and a list of token ids are sequences themselves, which types do not tell from several prompts.
        many: Sequence[Prompt] = [prompts] if _is_one_prompt(prompts) else prompts  # type: ignore[list-item,assignment]
        return [self._render(prompt) for prompt in many]

    def _render(self, prompt: Prompt) -> RenderedPrompt:
        if isinstance(prompt, Mapping):
            if "encoder_prompt" in prompt:
                return self._render_pair(prompt["encoder_prompt"], prompt.get("decoder_prompt"))
            if "prompt_token_ids" in prompt:
                return self.renderer.render_prompt(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise RequestError(
                    "a prompt dictionary must have 'prompt', 'prompt_token_ids' or 'encoder_prompt', got "
                    f"{sorted(prompt)}",
                    param="prompt",
                )
            return self.renderer.render_prompt(prompt["prompt"])
        return self.renderer.render_prompt(prompt)

    def _render_pair(self, encoder_prompt: Prompt, decoder_prompt: Prompt | None) -> RenderedPrompt:
        rendered = self._render(encoder_prompt)
        if isinstance(decoder_prompt, Mapping):
            decoder_prompt = decoder_prompt.get("prompt_token_ids", decoder_prompt.get("prompt"))
        begun: list[int] = []
        if decoder_prompt:  # a text that is to be continued gets no end token
            text_or_ids = cast("str | Sequence[int]", decoder_prompt)
            begun = list(self.renderer.render_prompt(text_or_ids, add_special_tokens=False).token_ids)
        return dataclasses.replace(rendered, decoder_token_ids=begun)

    def _run(
        self,
        prompts: list[RenderedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int,
        lora_request: LoRAChoice | Sequence[LoRAChoice],
    ) -> list[RequestOutput]:
        if self.engine.core.sleep_level is not None:
            raise RequestError("this LLM sleeps: call wake_up() first", code="sleeping")
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        one_for_all = isinstance(sampling_params, SamplingParams) or not isinstance(sampling_params, Sequence)
        params: Any = [sampling_params] * len(prompts) if one_for_all else sampling_params
        for each in params:
            if not isinstance(each, SamplingParams):
                raise RequestError(
                    f"sampling_params must be SamplingParams, one for all or one each, got {type(each).__name__}",
                    param="sampling_params",
                )
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(params)} sampling parameters; give one for all or one each",
                param="sampling_params",
            )
        for each in params:
            self._check_logprobs(each)
        adapters = self._adapter_names(lora_request, len(prompts))
        with _progress(len(prompts), use_tqdm) as advance:
            return self._drive(prompts, params, priority, adapters, advance)

    def _check_logprobs(self, params: SamplingParams) -> None:
        remedy = "ask for less, or set max_logprobs"
        check_logprobs(params, self.config.model.max_logprobs, self.engine_info.vocab_size, remedy=remedy)

    def _drive(
        self,
        prompts: list[RenderedPrompt],
        params: Sequence[SamplingParams],
        priority: int,
        adapters: Sequence[str | None],
        advance: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        places: dict[str, int] = {}
        results: list[RequestOutput | None] = [None] * len(prompts)
        upcoming = 0
        try:
            while upcoming < len(prompts) or self.engine.has_unfinished_requests():
                try:
                    while upcoming < len(prompts):
                        name = self.engine.add_request(
                            prompts[upcoming], params[upcoming], priority=priority, adapter=adapters[upcoming]
                        )
                        places[name] = upcoming
                        upcoming += 1
                except OverloadedError:
                    if not self.engine.has_unfinished_requests():
                        raise
                for output in self.engine.step():
                    results[places.pop(output.request_id)] = output
                    advance(output)
        finally:
            self.engine.abort(places)
        return [result for result in results if result is not None]


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int)


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A progress bar over requests, with the rate of generated tokens; nothing when switched off."""
    if not shown:
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    tokens = 0
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=total, rate="")

        def advance(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += output.num_generation_tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
            bar.update(task, advance=1, rate=rate)

        yield advance
