"""What `LLM` offers of pooling: embeddings, classes, rewards and scores of prompts.

Knows arguments and outputs; `PoolingCalls` runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from quire.lora_request import LoRAChoice, LoRARequest
from quire.per_prompt import one_each
from quire.pooling_calls import Errors, LazyRequests, PoolingCalls, paired_prompts, similarity_outputs
from quire.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_prompts import as_prompts
from quire.progress import ProgressChoice
from quire.prompts import Prompt
from quire.shared_engine import SharedEngine
from quire_engine import EngineInfo
from quire_interfaces import PoolingParams, PoolingTask, RequestError

__all__ = ["PoolingMethods"]

PoolingOutputKind = TypeVar("PoolingOutputKind", bound=PoolingRequestOutput[Any])


class PoolingMethods(ABC):
    """The methods of `LLM` that pool."""

    _pooling: PoolingCalls | None
    """None where the model pools nothing."""
    _shared: SharedEngine

    @property
    @abstractmethod
    def engine_info(self) -> EngineInfo:
        """What runs, and what was chosen."""

    @abstractmethod
    def _check_adapters(self, adapters: Sequence[LoRAChoice]) -> None:
        """Raises RequestError where an adapter cannot be had."""

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: ProgressChoice = True,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        priority: int | Sequence[int] = 0,
        prompt_name: str | None = None,
        errors: Errors = "raise",
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts: one vector each. Arguments and errors as for `encode`."""
        return self._pool(
            EmbeddingRequestOutput, "embed", prompts, pooling_params, use_tqdm, lora_request, priority, prompt_name,
            errors,
        )  # fmt: skip

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: ProgressChoice = True,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        pooling_task: PoolingTask | None = None,
        priority: int | Sequence[int] = 0,
        prompt_name: str | None = None,
        errors: Errors = "raise",
    ) -> list[PoolingRequestOutput[Any]]:
        """Pool the hidden states of prompts, for any task.

        Args:
            prompts: One prompt or many: text, token ids, or a dictionary, with `text_pair` for a pair of texts.
            pooling_params: One for all, or one each; None for the model's own.
            use_tqdm: Show a progress bar on standard error; a callable makes one of its own, as tqdm does.
            lora_request: The adapter to run with; one for all, or one each.
            pooling_task: What to compute; None for what `pooling_params` say, or the model's first task.
            priority: Lower runs first, under the priority policy; one for all, or one each.
            prompt_name: Which of the checkpoint's prompts goes before texts; None for its default, if it has one.
            errors: "raise" ends the call with the first prompt that cannot run, which the message names by its index;
                "per_item" gives such a prompt an output with an `error`, and answers the others.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are wrong, or the model has no such task.
        """
        return self._pool(
            PoolingRequestOutput, pooling_task, prompts, pooling_params, use_tqdm, lora_request, priority, prompt_name,
            errors,
        )  # fmt: skip

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: ProgressChoice = True,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        priority: int | Sequence[int] = 0,
        errors: Errors = "raise",
    ) -> list[ClassificationRequestOutput]:
        """Class probabilities of prompts. Arguments and errors as for `encode`."""
        return self._pool(
            ClassificationRequestOutput, "classify", prompts, pooling_params, use_tqdm, lora_request, priority, None,
            errors,
        )  # fmt: skip

    def reward(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: ProgressChoice = True,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        priority: int | Sequence[int] = 0,
        errors: Errors = "raise",
    ) -> list[PoolingRequestOutput[Any]]:
        """Rewards of the tokens of prompts (task token_classify). Arguments and errors as for `encode`."""
        return self._pool(
            PoolingRequestOutput, "token_classify", prompts, pooling_params, use_tqdm, lora_request, priority, None,
            errors,
        )  # fmt: skip

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: ProgressChoice = True,
        lora_request: LoRAChoice = None,
        priority: int = 0,
        chat_template: str | None = None,
        errors: Errors = "raise",
    ) -> list[ScoringRequestOutput]:
        """How well documents answer queries: by a cross-encoder, which reads each pair, by the cosine of embeddings, or
        by MaxSim of embeddings of tokens (ColBERT).

        Args:
            queries: One for all documents, or one each.
            documents: One or many.
            pooling_params: For all pairs; None for the model's own.
            use_tqdm: As for `encode`.
            lora_request: As for `encode`.
            priority: As for `encode`.
            chat_template: Writes a pair as messages with roles "query" and "document"; None for the checkpoint's, where
                it speaks of these roles, or else for the tokenizer's own way to write pairs.
            errors: As for `encode`.

        Returns:
            One output per document, in order.

        Raises:
            RequestError: a text or the parameters are wrong, the numbers of texts do not fit, or the model neither
                scores nor embeds.
        """
        query_texts, document_texts = as_prompts(queries, "queries"), as_prompts(documents, "documents")
        pairs = paired_prompts(query_texts, document_texts)
        calls = self._pooling_calls()
        task = calls.task_of_scores()
        if task != "score":
            sides = []
            for texts, name in ((query_texts, "query"), (document_texts, "document")):
                role = name if task == "token_embed" else None
                requests = self._pooling_requests(task, texts, pooling_params, lora_request, priority, role)
                outputs = [each.output for each in calls.run(requests, PoolingRequestOutput, use_tqdm, errors)]
                sides.append(outputs * (len(pairs) // len(outputs)))
            return [ScoringRequestOutput(each) for each in similarity_outputs(*sides)]
        prompts = [{"prompt": query, "text_pair": document} for query, document in pairs]
        requests = self._pooling_requests("score", prompts, pooling_params, lora_request, priority, None, chat_template)
        return calls.run(requests, ScoringRequestOutput, use_tqdm, errors)

    def _pool(
        self,
        kind: type[PoolingOutputKind],
        task: PoolingTask | None,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        use_tqdm: ProgressChoice,
        lora_request: LoRAChoice | Sequence[LoRAChoice],
        priority: int | Sequence[int],
        prompt_name: str | None,
        errors: Errors,
    ) -> list[PoolingOutputKind]:
        """Pool prompts, and give the outputs as `kind`; other arguments as of `encode`."""
        requests = self._pooling_requests(
            task, as_prompts(prompts), pooling_params, lora_request, priority, prompt_name
        )
        return self._pooling_calls().run(requests, kind, use_tqdm, errors)

    def _pooling_requests(
        self,
        task: PoolingTask | None,
        prompts: Sequence[Any],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        lora_request: LoRAChoice | Sequence[LoRAChoice],
        priority: int | Sequence[int],
        prompt_name: str | None,
        chat_template: str | None = None,
    ) -> LazyRequests:
        """
        Raises:
            RequestError: the parameters are wrong, or are not as many as the prompts.
        """
        calls = self._pooling_calls()
        given = PoolingParams() if pooling_params is None else pooling_params
        params = one_each("pooling_params", given, len(prompts), PoolingParams)
        if task is not None:
            with_task = {id(each): each.with_task(task) for each in {id(each): each for each in params}.values()}
            params = [with_task[id(each)] for each in params]
        adapters: list[LoRAChoice] = one_each("lora_request", lora_request, len(prompts), LoRARequest, str, type(None))
        if any(each is not None for each in adapters):
            with self._shared.turn():
                self._check_adapters(adapters)
        priorities = one_each("priority", priority, len(prompts), int)
        return LazyRequests(prompts, params, adapters, priorities, calls.prompts, prompt_name, chat_template)

    def _pooling_calls(self) -> PoolingCalls:
        """Raises RequestError where the model pools nothing."""
        if self._pooling is None:
            raise RequestError(
                f"{self.engine_info.model} generates text and pools nothing; take an embedding model, "
                "or convert this one (convert='embed')",
                param="task",
                code="unsupported",
            )
        return self._pooling
