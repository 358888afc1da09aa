"""A pooler with its weights: hidden states of texts, whole or in chunks, to what their requests want.

Shape legend: T tokens of all texts, one behind the other; N texts; H width of the hidden states. A text's result is the
same bits in any batch, order and chunking on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quire_interfaces import PoolingParams
from quire_pooling.activations import activate_with, normalize
from quire_pooling.heads import PoolingHead
from quire_pooling.methods import BLOCK, TextPooling, pool_texts
from quire_pooling.spec import TOKEN_TASKS, Activation, ActivationSpec, DenseSpec, PoolerSpec, PoolingHeadSpec

__all__ = ["Pooler", "PoolingState"]


class PoolingState:
    """What pooling keeps of a request whose prompt comes in chunks; `Pooler.begin` makes one."""

    __slots__ = ("methods", "params", "pieces", "token_ids")

    def __init__(self, params: PoolingParams, methods: tuple[TextPooling, ...]) -> None:
        """Args:
        params: What the request wants, as `PoolerSpec.resolve` gives it.
        methods: Those of its text; none for a request that needs all tokens at the end.
        """
        self.params = params
        self.methods = methods
        self.pieces: list[Tensor] = []
        """[n, H] each: hidden states of the chunks, where all tokens are needed."""
        self.token_ids: list[Tensor] = []
        """[n] each: their ids."""

    def add(self, hidden: Tensor, token_ids: Tensor, place: int = 0) -> None:
        """Take the next tokens of the prompt; what is needed of them is copied.

        Args:
            hidden: [n, H].
            token_ids: [n].
            place: Of the first of them in the step, which does not matter here.
        """
        if not self.methods:
            self.pieces.append(hidden.clone())
            self.token_ids.append(token_ids.clone())
        for method in self.methods:
            method.add(hidden)


class Pooler:
    """A pooler with its weights."""

    def __init__(
        self, spec: PoolerSpec, weights: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """Args:
        spec: What it does.
        weights: Tensors of its heads, by name; others are let be.
        device: Where the hidden states are.

        Raises:
            CheckpointError: A tensor is missing or has another shape.
        """
        self.spec = spec
        self._device = torch.device(device)
        weights = weights or {}
        token_head, self._behind_max = _without_growing_activation(spec)
        self._token_head = PoolingHead(token_head, weights, self._device)
        self._head = PoolingHead(spec.head, weights, self._device)
        self._task_heads = {
            task: PoolingHead(each.head, weights, self._device) for task, each in spec.token_tasks.items()
        }
        self._activate = activate_with(self._device)

    def reads_prefix_cache(self, params: PoolingParams) -> bool:
        """Whether a request can leave out tokens at its start whose keys and values are cached: only the last token's
        vector is pooled."""
        return self.spec.resolve(params).task not in TOKEN_TASKS and self.spec.methods == ("LAST",)

    @torch.inference_mode()
    def pool(
        self, hidden: Tensor, lens: Sequence[int], params: Sequence[PoolingParams], token_ids: Tensor
    ) -> list[Tensor]:
        """Results of whole texts.

        Args:
            hidden: [T, H], any floating dtype.
            lens: Tokens of each text, at least 1.
            params: What each request wants.
            token_ids: [T], int64.

        Returns:
            For each text, [dimensions] float32, [tokens, dimensions] of the tasks per token, or [parts, dimensions]
            where the text's parts are embedded.

        Raises:
            RequestError: The pooler cannot do what a request wants; `PoolerSpec.resolve` tells before.
        """
        resolved = [self.spec.resolve(each) for each in params]
        whole = [number for number, each in enumerate(resolved) if _is_whole(each)]
        if len(whole) == len(resolved):
            return self._finish_texts(self._pool(hidden, lens, resolved), resolved)
        texts, ids = hidden.split(list(lens)), token_ids.split(list(lens))
        results: dict[int, Tensor] = {}
        if whole:
            pooled = self._pool(
                torch.cat([texts[number] for number in whole]),
                [lens[number] for number in whole],
                [resolved[number] for number in whole],
            )
            finished = self._finish_texts(pooled, [resolved[number] for number in whole])
            results.update(zip(whole, finished, strict=True))
        for number, each in enumerate(resolved):
            if number not in results:
                results[number] = self._finish_parts(texts[number], ids[number], each)
        return [results[number] for number in range(len(resolved))]

    @torch.inference_mode()
    def finish_vectors(self, vectors: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
        """Results of embeddings that come without hidden states and heads, those of images: dimensions and
        normalization.

        Args:
            vectors: [N, embedding_size], any floating dtype.
            params: What each request wants.

        Raises:
            RequestError: The pooler cannot do what a request wants.
        """
        resolved = [self.spec.resolve(each) for each in params]
        return [
            self._activated(vector, each)[0] for vector, each in zip(vectors.float().split(1), resolved, strict=True)
        ]

    def begin(self, params: PoolingParams) -> PoolingState:
        """The state of a request whose hidden states come in chunks, for `PoolingState.add` and then `finish`.

        Raises:
            RequestError: The pooler cannot do what the request wants.
        """
        params = self.spec.resolve(params)
        if not _is_whole(params) or self.spec.token_head.steps:
            return PoolingState(params, ())
        return PoolingState(params, tuple(TextPooling(each, self._skip(params)) for each in self.spec.methods))

    @torch.inference_mode()
    def finish(self, states: Sequence[PoolingState]) -> list[Tensor]:
        """Results of requests whose last chunk was added, as `pool` gives them."""
        results: list[Tensor | None] = [None] * len(states)
        whole = [number for number, state in enumerate(states) if _is_whole(state.params)]
        if whole:
            vectors = torch.stack([self._pooled(states[number]) for number in whole])
            finished = self._finish_texts(vectors, [states[number].params for number in whole])
            for number, result in zip(whole, finished, strict=True):
                results[number] = result
        return [
            self._finish_parts(torch.cat(state.pieces), torch.cat(state.token_ids), state.params)
            if result is None
            else result
            for state, result in zip(states, results, strict=True)
        ]

    def _pooled(self, state: PoolingState) -> Tensor:
        if not state.methods:
            hidden = torch.cat(state.pieces)
            return self._pool(hidden, [len(hidden)], [state.params])[0]
        width = self.spec.hidden_size
        return torch.cat([method.result(width, self._device) for method in state.methods])

    def _skip(self, params: PoolingParams) -> int:
        return 0 if self.spec.include_prompt else params.prompt_length

    def _pool(self, hidden: Tensor, lens: Sequence[int], params: Sequence[PoolingParams]) -> Tensor:
        """[N, width times methods]: the pooled vector of each text, before its head."""
        skips = [self._skip(each) for each in params]
        if not self.spec.token_head.steps:
            vectors = [pool_texts(hidden, lens, method, skips) for method in self.spec.methods]
            return torch.cat(vectors, dim=1) if len(vectors) > 1 else vectors[0]
        width = self.spec.token_head.out_features(self.spec.hidden_size)
        vectors = []
        for text, skip in zip(hidden.split(list(lens)), skips, strict=True):
            methods = [TextPooling(method, skip) for method in self.spec.methods]
            for block in text.split(BLOCK):
                tokens = self._token_head(block.float())
                for method in methods:
                    method.add(tokens)
            vectors.append(torch.cat([method.result(width, self._device) for method in methods]))
        return self._activate(torch.stack(vectors), self._behind_max)

    def _finish_texts(self, pooled: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
        """Head, dimensions and activation of pooled vectors [N, ...], those of like requests together."""
        if self._head.is_invariant:
            outputs = self._head(pooled)
        else:
            outputs = torch.cat([self._head(vector) for vector in pooled.split(1)])
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, each in enumerate(params):
            groups.setdefault((each.task, each.dimensions, each.use_activation), []).append(number)
        if len(groups) == 1:
            return list(self._activated(outputs, params[0]))
        results: dict[int, Tensor] = {}
        for numbers in groups.values():
            results.update(zip(numbers, self._activated(outputs[numbers], params[numbers[0]]), strict=True))
        return [results[number] for number in range(len(params))]

    def _finish_parts(self, hidden: Tensor, token_ids: Tensor, params: PoolingParams) -> Tensor:
        """Results of one text's tokens [n, H] with ids [n], or of its parts (late chunking): the pooling method goes
        over the tokens of each part."""
        if (edges := params.late_chunk_edges) is None:
            return self._finish_tokens(hidden, token_ids, params)
        lens = [end - start for start, end in pairwise(edges)]
        pooled = pool_texts(hidden[edges[0] : edges[-1]], lens, self.spec.methods[0])
        return torch.stack(self._finish_texts(pooled, [params] * len(lens)))

    def _finish_tokens(self, hidden: Tensor, token_ids: Tensor, params: PoolingParams) -> Tensor:
        """[tokens, dimensions]: the result of one text's tokens, [n, H] with ids [n]."""
        assert params.task is not None
        if params.task == "plugin":
            return hidden.float()
        task = self.spec.token_tasks.get(params.task)
        chosen = torch.ones_like(token_ids, dtype=torch.bool)
        chosen[: self._skip(params)] = False
        if params.step_tag_id is not None:
            chosen &= token_ids == params.step_tag_id
        skipped = params.skip_token_ids or (() if task is None else sorted(task.skip_token_ids))
        if skipped:
            chosen &= ~torch.isin(token_ids, torch.tensor(skipped, device=token_ids.device))
        head = self._task_heads.get(params.task, self._head)
        tokens = hidden[chosen].float()
        if task is None and self.spec.token_head.steps:
            tokens = self._activate(self._token_head(tokens), self._behind_max)
        outputs = head(tokens, params.returned_token_ids)
        if task is None:
            return self._activated(outputs, params)
        if params.dimensions is not None:
            outputs = outputs[:, : params.dimensions]
        if params.use_activation is False:
            return outputs
        outputs = self._activate(outputs, task.activation)
        return normalize(outputs) if task.normalize else outputs

    def _activated(self, outputs: Tensor, params: PoolingParams) -> Tensor:
        """Dimensions and normalization of embeddings, or scaling and activation of logits; [N, ...] each."""
        spec = self.spec
        if params.task in ("embed", "token_embed"):
            outputs = outputs[:, : params.dimensions]
            is_normal = spec.normalize if params.use_activation is None else params.use_activation
            return normalize(outputs) if is_normal else outputs
        if spec.logit_mean is not None:
            outputs = outputs - spec.logit_mean
        if spec.logit_sigma is not None:
            outputs = outputs / torch.tensor(spec.logit_sigma, device=outputs.device)
        is_active = spec.use_activation if params.use_activation is None else params.use_activation
        return self._activate(outputs, spec.activation) if is_active else outputs


def _is_whole(params: PoolingParams) -> bool:
    """Whether a request wants one result of its text."""
    return params.task not in TOKEN_TASKS and params.late_chunk_edges is None


def _without_growing_activation(spec: PoolerSpec) -> tuple[PoolingHeadSpec, Activation]:
    """The head per token, without the function at its end where that grows with its argument and the largest of all
    tokens is taken: it may as well go behind, to one vector instead of one per token. And that function."""
    steps = spec.token_head.steps
    last = steps[-1] if steps else None
    if spec.methods != ("MAX",) or not isinstance(last, DenseSpec | ActivationSpec) or last.activation not in _GROWING:
        return spec.token_head, "identity"
    if isinstance(last, ActivationSpec):
        return PoolingHeadSpec(steps=steps[:-1]), last.activation
    if last.use_residual:
        return spec.token_head, "identity"
    return PoolingHeadSpec(steps=(*steps[:-1], dataclasses.replace(last, activation="identity"))), last.activation


_GROWING: frozenset[Activation] = frozenset({"relu", "sigmoid", "tanh", "log1p_relu", "log1p_log1p_relu"})
