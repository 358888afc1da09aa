"""What `LLM` offers of pooling: embeddings, classes, rewards and scores of prompts.

Knows arguments and outputs; `PoolingCalls` runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from quire.lora_request import LoRAChoice, LoRARequest
from quire.per_prompt import one_each
from quire.pooling.calls import CallOptions, LazyRequests, PoolingCalls, paired_prompts, similarity_outputs
from quire.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.pooling.prompts import PromptOptions, as_prompts
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
        prompt_name: str | None = None,
        **options: Unpack[CallOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts: one vector each. Arguments and errors as for `encode`."""
        return self._pool(EmbeddingRequestOutput, "embed", prompts, pooling_params, prompt_name, options)

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        prompt_name: str | None = None,
        **options: Unpack[CallOptions],
    ) -> list[PoolingRequestOutput[Any]]:
        """Pool the hidden states of prompts, for any task.

        Args:
            prompts: One prompt or many: text, token ids, or a dictionary, with `text_pair` for a pair of texts.
            pooling_params: One for all, or one each; None for the model's own.
            pooling_task: What to compute; None for what `pooling_params` say, or the model's first task.
            prompt_name: Which of the checkpoint's prompts goes before texts; None for its default, if it has one.
            **options: How to run the call.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are wrong, or the model has no such task.
        """
        return self._pool(PoolingRequestOutput, pooling_task, prompts, pooling_params, prompt_name, options)

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[ClassificationRequestOutput]:
        """Class probabilities of prompts. Arguments and errors as for `encode`."""
        return self._pool(ClassificationRequestOutput, "classify", prompts, pooling_params, None, options)

    def reward(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[PoolingRequestOutput[Any]]:
        """Rewards of the tokens of prompts (task token_classify). Arguments and errors as for `encode`."""
        return self._pool(PoolingRequestOutput, "token_classify", prompts, pooling_params, None, options)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[ScoringRequestOutput]:
        """How well documents answer queries: by a cross-encoder, which reads each pair, by the cosine of embeddings, or
        by MaxSim of embeddings of tokens (ColBERT).

        Args:
            queries: One for all documents, or one each.
            documents: One or many.
            pooling_params: For all pairs; None for the model's own.
            chat_template: Writes a pair as messages with roles "query" and "document"; None for the checkpoint's, where
                it speaks of these roles, or else for the tokenizer's own way to write pairs.
            chat_template_kwargs: Further variables of that template, such as `instruction`.
            **options: How to run the call.

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
                role: PromptOptions = {"prompt_name": name} if task == "token_embed" else {}
                requests = self._pooling_requests(task, texts, pooling_params, role, options)
                outputs = [each.output for each in calls.run(requests, PoolingRequestOutput, options)]
                sides.append(outputs * (len(pairs) // len(outputs)))
            return [ScoringRequestOutput(each) for each in similarity_outputs(*sides)]
        prompts = [{"prompt": query, "text_pair": document} for query, document in pairs]
        written: PromptOptions = {"chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs}
        requests = self._pooling_requests("score", prompts, pooling_params, written, options)
        return calls.run(requests, ScoringRequestOutput, options)

    def _pool(
        self,
        kind: type[PoolingOutputKind],
        task: PoolingTask | None,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        prompt_name: str | None,
        options: CallOptions,
    ) -> list[PoolingOutputKind]:
        """Pool prompts, and give the outputs as `kind`; other arguments as of `encode`."""
        written: PromptOptions = {"prompt_name": prompt_name}
        requests = self._pooling_requests(task, as_prompts(prompts), pooling_params, written, options)
        return self._pooling_calls().run(requests, kind, options)

    def _pooling_requests(
        self,
        task: PoolingTask | None,
        prompts: Sequence[Any],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        prompt_options: PromptOptions,
        options: CallOptions,
    ) -> LazyRequests:
        """
        Raises:
            RequestError: the parameters are wrong, or are not as many as the prompts.
        """
        calls, count = self._pooling_calls(), len(prompts)
        params = one_each(
            "pooling_params", PoolingParams() if pooling_params is None else pooling_params, count, PoolingParams
        )
        if task is not None:
            with_task = {id(each): each.with_task(task) for each in {id(each): each for each in params}.values()}
            params = [with_task[id(each)] for each in params]
        adapters: list[LoRAChoice] = one_each(
            "lora_request", options.get("lora_request"), count, LoRARequest, str, type(None)
        )
        if any(each is not None for each in adapters):
            with self._shared.turn():
                self._check_adapters(adapters)
        priorities = one_each("priority", options.get("priority", 0), count, int)
        return LazyRequests(prompts, params, adapters, priorities, calls.prompts, prompt_options)

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
