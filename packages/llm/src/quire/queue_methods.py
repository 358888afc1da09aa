"""What `LLM` offers of requests that are gathered first and run later, by vLLM's names: `enqueue` and
`wait_for_completion`."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from quire.lora_request import LoRAChoice
from quire.outputs import RequestOutput, to_request_output
from quire.progress import ProgressChoice, progress
from quire.prompts import ParsedPrompt, Prompt, release_media
from quire.shared_engine import OfflineRequest, SharedEngine
from quire_interfaces import RequestError, SamplingParams

__all__ = ["Messages", "QueueMethods"]

Messages = Sequence[dict[str, Any]]
"""A conversation in the chat API's form."""


class _Queued(NamedTuple):
    """A request that waits for `wait_for_completion`."""

    name: str
    request: OfflineRequest
    prompt: ParsedPrompt


class QueueMethods(ABC):
    """The methods of `LLM` that gather requests."""

    _shared: SharedEngine

    _queue: Sequence[_Queued] = ()
    """What waits; of each LLM its own once there is something."""
    _queue_lock = threading.Lock()
    """Held for moments, by whichever LLM."""
    _queue_numbers = itertools.count()

    @abstractmethod
    def _parsed(self, prompts: Prompt | Iterable[Prompt]) -> list[ParsedPrompt]:
        """Prompts with their media prepared."""

    @abstractmethod
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
        """One conversation or many as prompts, with their media prepared; arguments and errors as those of `chat`,
        `options` of `quire_interfaces.Renderer.render_chat`."""

    @abstractmethod
    def _requests(
        self,
        prompts: list[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        lora_request: LoRAChoice | Sequence[LoRAChoice],
    ) -> list[OfflineRequest]:
        """Checked requests. Raises RequestError."""

    def enqueue(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        priority: int | Sequence[int] = 0,
    ) -> list[str]:
        """Check prompts and keep them for `wait_for_completion`, which runs them with all others that were kept.

        Args:
            prompts: One prompt or many, and the rest as for `generate`.

        Returns:
            The ids that the outputs will have.

        Raises:
            RequestError: a prompt or its parameters are wrong; the message says which one, and none is kept.
        """
        return self._keep(self._parsed(prompts), sampling_params, priority, lora_request)

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        priority: int | Sequence[int] = 0,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Check conversations and keep them for `wait_for_completion`.

        Args:
            messages: One conversation (a list of messages) or many, and the rest as for `chat` and `generate`.

        Returns:
            The ids that the outputs will have.

        Raises:
            RequestError: a conversation or its parameters are wrong; the message says which one, and none is kept.
        """
        parsed = self._conversations(
            messages,
            chat_template_content_format,
            mm_processor_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._keep(parsed, sampling_params, priority, lora_request)

    def _keep(
        self,
        parsed: list[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        lora_request: LoRAChoice | Sequence[LoRAChoice],
    ) -> list[str]:
        """Check the requests of these prompts and keep them; their ids."""
        try:
            requests = self._requests(parsed, sampling_params, priority, lora_request)
        except BaseException:
            release_media(parsed)
            raise
        with self._queue_lock:
            queued = [
                _Queued(f"queued-{next(self._queue_numbers)}", request, prompt)
                for request, prompt in zip(requests, parsed, strict=True)
            ]
            self._queue = [*self._queue, *queued]
        return [each.name for each in queued]

    def wait_for_completion(self, *, use_tqdm: ProgressChoice = True) -> list[RequestOutput]:
        """Run all requests that were kept, at once.

        Args:
            use_tqdm: As for `generate`.

        Returns:
            Their outputs, in the order in which they were kept; none where there were none.

        Raises:
            RequestError: one of them cannot run, or this LLM sleeps; all are dropped then, but for the sleep.
        """
        with self._queue_lock:
            with self._shared.turn() as engine:
                if self._queue and engine.core.sleep_level is not None:
                    raise RequestError("this LLM sleeps: call wake_up() first", code="sleeping")
            queued, self._queue = self._queue, ()
        try:
            with progress(len(queued), use_tqdm) as advance:
                outputs = self._shared.run([each.request for each in queued], advance)
        finally:
            release_media(each.prompt for each in queued)
        results = []
        for each, output in zip(queued, outputs, strict=True):
            result = to_request_output(output, each.request.lora_request)
            result.request_id = each.name
            results.append(result)
        return results
