"""`LLM`: offline batches in this process. The same scheduler, KV cache and runner as behind the server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.assemble import build_parts, build_renderer, model_folder
from quire.async_llm import make_detokenizer_factory, read_generation_defaults
from quire.config import QuireConfig
from quire_engine import EngineInfo, LLMEngine, RequestOutput
from quire_interfaces import (
    LogitsProcessor,
    OverloadedError,
    RenderedPrompt,
    RequestError,
    SamplingParams,
    SchedulerStats,
    Tokenizer,
)
from quire_models.config import ModelConfig
from quire_renderers import ParsedMessage, fold_events

__all__ = ["LLM"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""
Messages = Sequence[dict[str, Any]]


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
        self.model_config = ModelConfig.from_path(self.model_folder)
        self.renderer = build_renderer(config, self.model_folder, self.model_config)
        self._defaults = read_generation_defaults(self.model_folder)
        tokenizer = self.renderer.tokenizer
        parts = build_parts(config, logits_processors=logits_processors, tokenizer=tokenizer)
        self.engine = LLMEngine(
            parts,
            config.engine,
            tokenizer=tokenizer,
            make_detokenizer=make_detokenizer_factory(tokenizer),
            eos_token_ids=dict.fromkeys((*self.model_config.eos_token_ids, *tokenizer.eos_token_ids)),
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
        """What the checkpoint's generation_config.json asks for."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once.

        Args:
            prompts: One prompt or many.
            sampling_params: One for all, or one each; None takes `default_sampling_params`.
            use_tqdm: Show a progress bar on standard error.
            priority: Lower runs first, under the priority policy.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing runs then.
        """
        many: Sequence[Prompt] = [prompts] if _is_one_prompt(prompts) else prompts  # type: ignore[list-item,assignment]
        return self._run([self._render(prompt) for prompt in many], sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
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
        return self._run(rendered, sampling_params, use_tqdm, 0)

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
            messages.append(fold_events([*parser.feed(text), *parser.finish()]))
        return messages

    def stats(self) -> SchedulerStats:
        return self.engine.stats()

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

    def _render(self, prompt: Prompt) -> RenderedPrompt:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return self.renderer.render_prompt(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise RequestError(
                    f"a prompt dictionary must have 'prompt' or 'prompt_token_ids', got {sorted(prompt)}",
                    param="prompt",
                )
            return self.renderer.render_prompt(prompt["prompt"])
        return self.renderer.render_prompt(prompt)

    def _run(
        self,
        prompts: list[RenderedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        params = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else sampling_params
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(params)} sampling parameters; give one for all or one each",
                param="sampling_params",
            )
        for each in params:
            self._check_logprobs(each)
        with _progress(len(prompts), use_tqdm) as advance:
            return self._drive(prompts, params, priority, advance)

    def _check_logprobs(self, params: SamplingParams) -> None:
        bound = self.config.model.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > bound:
                raise RequestError(
                    f"{name} is {asked}, but at most {bound} are given; ask for less, or set max_logprobs", param=name
                )

    def _drive(
        self,
        prompts: list[RenderedPrompt],
        params: Sequence[SamplingParams],
        priority: int,
        advance: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        places: dict[str, int] = {}
        results: list[RequestOutput | None] = [None] * len(prompts)
        upcoming = 0
        try:
            while upcoming < len(prompts) or self.engine.has_unfinished_requests():
                try:
                    while upcoming < len(prompts):
                        name = self.engine.add_request(prompts[upcoming], params[upcoming], priority=priority)
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
