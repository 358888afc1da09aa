"""What `LLM.embed`, `classify`, `score` and their kin do: prompts in, outputs in vLLM's types back.

A call of many prompts renders them as the engine takes them, so that its memory does not grow with their number.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, overload

from quire.lora_request import LoRAChoice, LoRARequest
from quire.pooling.batch import num_in_flight
from quire.pooling.outputs import PoolingRequestOutput
from quire.pooling.prompts import PoolingPrompts, PromptOptions
from quire.progress import ProgressChoice, progress
from quire.shared_engine import OfflineRequest, SharedEngine
from quire_engine import EngineInfo, PooledRequestOutput
from quire_interfaces import PooledOutput, PoolingParams, PoolingTask, RequestError, RequestOptions

__all__ = [
    "CallOptions",
    "Errors",
    "LazyRequests",
    "PoolingCalls",
    "check_errors",
    "paired_prompts",
    "similarity_outputs",
]

Errors = Literal["raise", "per_item"]
"""What a prompt that cannot run is to a call of many: its end, or an output with an `error`."""


class CallOptions(TypedDict, total=False):
    """How a call of many prompts runs; none is needed."""

    use_tqdm: ProgressChoice
    """Show a progress bar on standard error, as it does where this is left out; a callable makes one of its own, as
    tqdm does."""
    lora_request: LoRAChoice | Sequence[LoRAChoice]
    """The adapter to run with; one for all, or one each."""
    priority: int | Sequence[int]
    """Lower runs first, under the priority policy; one for all, or one each."""
    errors: Errors
    """"raise", the default, ends the call with the first prompt that cannot run, which the message names by its index;
    "per_item" gives such a prompt an output with an `error`, and answers the others."""


MAXSIM_PAIRS = 256
"""Pairs whose vectors are laid side by side at a time."""

Output = TypeVar("Output", bound=PoolingRequestOutput[Any])


class LazyRequests(Sequence[OfflineRequest]):
    """Requests that are rendered when they are read.

    Args:
        prompts: In any form.
        params: One each.
        adapters: One each.
        priorities: One each.
        renderer: Makes prompts of them.
        prompt_options: How to write texts.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        params: Sequence[PoolingParams],
        adapters: Sequence[LoRARequest | str | None],
        priorities: Sequence[int],
        renderer: PoolingPrompts,
        prompt_options: PromptOptions,
    ) -> None:
        self._prompts = prompts
        self._params = params
        self._adapters = adapters
        self._priorities = priorities
        self._renderer = renderer
        self._prompt_options = prompt_options

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> OfflineRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[OfflineRequest]: ...
    def __getitem__(self, index: int | slice) -> OfflineRequest | list[OfflineRequest]:
        """Raises RequestError where the prompt or its parameters are wrong."""
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        given, renderer = self._prompts[index], self._renderer
        prompt = renderer.render(given, self._params[index], renderer.prepare_now(given), **self._prompt_options)
        adapter = self._adapters[index]
        return OfflineRequest(
            prompt=prompt.rendered,
            params=prompt.params,
            options=prompt.salted(
                RequestOptions(
                    priority=self._priorities[index],
                    adapter=adapter.lora_name if isinstance(adapter, LoRARequest) else adapter,
                )
            ),
            lora_request=adapter if isinstance(adapter, LoRARequest) else None,
            media=prompt.media,
        )


class PoolingCalls:
    """Runs pooling requests of a call.

    Args:
        shared: Runs requests.
        prompts: Renders them.
        info: Facts about the engine.
    """

    def __init__(self, shared: SharedEngine, prompts: PoolingPrompts, info: EngineInfo) -> None:
        self.prompts = prompts
        self._shared = shared
        self._info = info
        self._window = num_in_flight(info)

    def task_of_scores(self) -> PoolingTask:
        """What scores are made of: pairs of texts that are read together, or else embeddings of texts or of tokens."""
        tasks: tuple[PoolingTask, ...] = ("score", "embed", "token_embed")
        return next((task for task in tasks if task in self._info.pooling_tasks), "score")

    def run(self, requests: LazyRequests, kind: type[Output], options: CallOptions) -> list[Output]:
        """Outputs of all requests, in their order, as `kind`.

        Raises:
            RequestError: one of them cannot run, unless errors are asked for per item; the message says which.
        """
        errors = options.get("errors", "raise")
        check_errors(errors)
        with progress(len(requests), options.get("use_tqdm", True), "pooling") as advance:
            outputs = self._shared.run_pooling(
                requests, window=self._window, keeps_errors=errors == "per_item", advance=advance
            )
        return [kind(output) for output in outputs]


def check_errors(errors: str) -> None:
    """Raises RequestError for what is no choice of errors."""
    if errors not in ("raise", "per_item"):
        raise RequestError(f"errors must be 'raise' or 'per_item', got {errors!r}", param="errors")


def paired_prompts(queries: Sequence[Any], documents: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each document with its query: one for all, or one each.

    Raises:
        RequestError: there are neither, or their numbers do not fit.
    """
    if not documents or not queries:
        raise RequestError("give at least one query and one document", param="queries" if documents else "documents")
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"{len(queries)} queries came with {len(documents)} documents; give one query for all, or one each",
            param="queries",
        )
    return list(zip(list(queries) * (len(documents) if len(queries) == 1 else 1), documents, strict=True))


def similarity_outputs(
    queries: Sequence[PooledRequestOutput], documents: Sequence[PooledRequestOutput]
) -> list[PooledRequestOutput]:
    """Cosine similarity of the embeddings of pairs, or MaxSim (op `maxsim`) where there is one per token, as outputs
    with one number each; a failed one fails its pair."""
    pairs = list(zip(queries, documents, strict=True))
    complete = [
        (query.pooled, document.pooled)
        for query, document in pairs
        if query.pooled is not None and document.pooled is not None
    ]
    scores = iter(_similarities(complete))
    results = []
    for query, document in pairs:
        pooled = None
        if query.pooled is not None and document.pooled is not None:
            pooled = PooledOutput(struct.pack("<f", next(scores)), (1,))
        results.append(
            PooledRequestOutput(
                request_id=f"{query.request_id}_{document.request_id}",
                packed_token_ids=query.packed_token_ids + document.packed_token_ids,
                pooled=pooled,
                error=query.error or document.error,
                num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
            )
        )
    return results


def _similarities(pairs: Sequence[tuple[PooledOutput, PooledOutput]]) -> list[float]:
    """The score of each pair of a query and a document."""
    import torch

    if not pairs or len(pairs[0][0].shape) > 1:
        return _maxsim_scores(pairs)

    def cosine(first: PooledOutput, second: PooledOutput) -> float:
        vectors = (torch.frombuffer(bytearray(each.data), dtype=torch.float32) for each in (first, second))
        return float(torch.nn.functional.cosine_similarity(next(vectors), next(vectors), dim=0))

    return [cosine(*pair) for pair in pairs]


def _maxsim_scores(pairs: Sequence[tuple[PooledOutput, PooledOutput]]) -> list[float]:
    """MaxSim of each pair of outputs [tokens, dimensions]; 0 where one of them has no tokens."""
    import torch

    from quire_ops import OpRequest, bind, ops

    def packed(outputs: Sequence[PooledOutput]) -> torch.Tensor:
        """[tokens, dimensions] float32 of some outputs, one behind the other."""
        data = bytearray().join(each.data for each in outputs)
        return torch.frombuffer(data, dtype=torch.float32).view(-1, outputs[0].shape[1])

    maxsim, scores = bind(ops.maxsim, OpRequest(dtype=torch.float32)), [0.0] * len(pairs)
    places = [place for place, (query, document) in enumerate(pairs) if query.shape[0] and document.shape[0]]
    for begin in range(0, len(places), MAXSIM_PAIRS):
        part = places[begin : begin + MAXSIM_PAIRS]
        queries, documents = ([pairs[place][side] for place in part] for side in (0, 1))
        if all(query is queries[0] for query in queries):
            del queries[1:]
        lens = ([each.shape[0] for each in side] for side in (queries, documents))
        for place, score in zip(part, maxsim(packed(queries), packed(documents), *lens).tolist(), strict=True):
            scores[place] = score
    return scores
