"""Drafting with heads that read the target's hidden states: one token after another in chains and trees, or all of a
draft in one pass.

Knows rows and passes; does not know how networks are built, nor when drafting pays.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces.errors import ConfigError
from quire_interfaces.step import SchedulerOutput
from quire_models import Network
from quire_models.draft_heads.dflash import DFlashHead
from quire_models.draft_heads.eagle import EagleHead
from quire_models.draft_heads.eagle_config import EagleConfig
from quire_models.draft_heads.head import DraftHead
from quire_models.stages import StageSpec
from quire_ops import to_device
from quire_spec_decode.draft_cache import DraftCache, RowSpan
from quire_spec_decode.row_drafter import DraftLimits, DraftRows, DraftStep, RowDrafter
from quire_spec_decode.trees import Draft, Level, best_tree

__all__ = ["BlockDrafting", "HeadDrafting", "ParallelDrafting"]


class HeadDrafting(RowDrafter):
    """A head, such as EAGLE's. It reads the target's features of every step. Where it missed some (a prefix that was
    cached while nothing was drafted), it sees of the row what follows, from the next step on that begins with a block.

    Its drafts are chains of the most likely tokens, or the trees of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section
    4): at each depth the `draft_topk` nodes that are likely to come true, by the product of the head's probabilities,
    get as many children each; of all candidates the likeliest are proposed."""

    def __init__(
        self, head: DraftHead, target: Network, rows: DraftRows, cache: DraftCache, limits: DraftLimits
    ) -> None:
        head.join(target)
        self._topk, self._depth, self._num_nodes = limits.topk, limits.depth, limits.num_nodes
        self._head = head
        self._rows = rows
        self._cache = cache
        self.wants_hidden = head.wants_hidden
        spec = target.config.network
        num_layers = spec.num_layers if isinstance(spec, StageSpec) else len(spec.layers)
        self.feature_layers = head.feature_layers(num_layers)

    def begin(self, output: SchedulerOutput) -> None:
        """Tell the cache which blocks rows got for this step."""
        self._cache.begin(output)

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """Row -> what the network guesses to follow, at most as deep as its limit and its blocks allow."""
        entries, last, places = self._seen(step)
        if not entries:
            return {}
        assert step.features is not None
        batch = self._cache.batch(entries)
        batch.input_ids = self._following(entries)
        states = self._head.advance(batch, self._head.fuse(step.features[to_device(places, step.features.device)]))
        for entry in entries:
            self._cache.wrote(entry.row, entry.start, entry.end)
        drafts: dict[int, Draft] = {}
        for topk in {1, self._topk}:
            limits = {
                entry.row: min(step.limits[entry.row], 1 + (self._cache.num_slots(entry.row) - entry.end) // topk)
                for entry in entries
                if entry.row in step.limits and (topk == 1) == (self._topk == 1 or entry.row in step.chains)
            }
            chosen = [i for i, entry in enumerate(entries) if limits.get(entry.row, 0) > 0]
            if chosen:
                guess = self._guess if topk == 1 else self._grow
                drafts |= guess([entries[i] for i in chosen], states[[last[i] for i in chosen]], limits)
        return drafts

    def _seen(self, step: DraftStep) -> tuple[list[RowSpan], list[int], np.ndarray]:
        """Positions whose successor is known, of rows of which nothing is missing; the last one of each among them;
        and where all of them are among the step's tokens."""
        plan, rows = step.plan, self._rows
        entries: list[RowSpan] = []
        last: list[int] = []
        places: list[np.ndarray] = []
        count = 0
        for i, row in enumerate(plan.rows.tolist()):
            start, end = int(plan.start[i]), min(int(plan.ends[i]), int(rows.num_tokens[row]) - 1)
            if end <= start or row in rows.failed:
                continue
            if self._cache.num_written(row) < start and not self._cache.leave_out(row, start):
                continue
            entries.append(RowSpan(row, start, end))
            kept = np.array(plan.kept[row]) if row in plan.kept else np.arange(end - start)
            places.append(int(plan.query_start_loc[i]) + kept[: end - start])
            count += end - start
            last.append(count - 1)
        return entries, last, np.concatenate(places) if places else np.zeros(0, dtype=np.int64)

    def _following(self, entries: list[RowSpan]) -> Tensor:
        """[T] the tokens behind the positions of the entries."""
        return torch.cat([self._rows.token_ids[e.row, e.start + 1 : e.end + 1] for e in entries]).long()

    def _guess(self, entries: list[RowSpan], states: Tensor, limits: dict[int, int]) -> dict[int, Draft]:
        proposals: dict[int, list[int]] = {entry.row: [] for entry in entries}
        while entries:
            token_ids = self._head.argmax(states)[0]
            for entry, token in zip(entries, token_ids.tolist(), strict=True):
                proposals[entry.row].append(token)
            left = [i for i, entry in enumerate(entries) if len(proposals[entry.row]) < limits[entry.row]]
            if not left:
                break
            entries = [RowSpan(entries[i].row, entries[i].end, entries[i].end + 1) for i in left]
            batch = self._cache.batch(entries)
            batch.input_ids = token_ids[left]
            states = self._head.advance(batch, states[left])
        return {row: Draft(tokens) for row, tokens in proposals.items()}

    def _grow(self, entries: list[RowSpan], states: Tensor, limits: dict[int, int]) -> dict[int, Draft]:
        """A tree for each entry. What is expanded lies behind the row's tokens in the drafter's cache, depth after
        depth."""
        levels: dict[int, list[Level]] = {entry.row: [] for entry in entries}
        ends = {entry.row: entry.end for entry in entries}
        rows = list(levels)
        scores, tokens = self._head.top(states, self._topk)  # [R * expanded, K]
        expanded = np.full((len(rows), 1), -1)
        paths = np.zeros((len(rows), 1, 0), dtype=np.int64)
        for depth in itertools.count(1):
            width = scores.shape[1]
            scores, tokens = (each.view(len(rows), -1, width) for each in (scores, tokens))
            for row, nodes, ids, values in zip(rows, expanded.tolist(), tokens.tolist(), scores.tolist(), strict=True):
                levels[row].append(Level(nodes, ids, values))
            left = [i for i, row in enumerate(rows) if depth < limits[row]]
            if not left:
                break
            rows = [rows[i] for i in left]
            best = scores[left].flatten(1).topk(min(self._topk, scores[0].numel()))  # [R, E]
            above = (best.indices // width).cpu().numpy()  # which node of the depth before each follows
            states = states.view(len(scores), -1, states.shape[-1])[np.array(left)[:, None], above].flatten(0, 1)
            input_ids = tokens[left].flatten(1).gather(1, best.indices).flatten()
            expanded = best.indices.cpu().numpy()
            starts = np.array([ends[row] + (depth - 1) * self._topk for row in rows])
            own = starts[:, None] + np.arange(expanded.shape[1])
            paths = np.concatenate((np.take_along_axis(paths[left], above[..., None], 1), own[..., None]), -1)
            states = self._expand(rows, ends, paths, input_ids, states)
            scores, tokens = self._head.top(states, self._topk)
            scores = scores + best.values.flatten()[:, None]
        return {row: best_tree(found, -(-self._num_nodes * len(found) // self._depth)) for row, found in levels.items()}

    def _expand(
        self, rows: list[int], ends: dict[int, int], paths: NDArray[np.int64], input_ids: Tensor, states: Tensor
    ) -> Tensor:
        """One pass over nodes of one depth.

        Args:
            rows: [R].
            ends: Row -> its known positions, which are those before the tree.
            paths: [R, E, depth] places of the nodes that each follows, and its own.
            input_ids: [R * E] tokens of the nodes.
            states: [R * E, H] of what they follow.
        """
        num_nodes, depth = paths.shape[1:]
        first = paths[:, 0, -1]
        batch = self._cache.batch(
            [RowSpan(row, start, start + num_nodes) for row, start in zip(rows, first.tolist(), strict=True)]
        )
        roots = np.repeat([ends[row] for row in rows], num_nodes)[:, None]
        table = np.concatenate((roots + depth - 1, roots, paths.reshape(-1, depth)), axis=1)
        device = input_ids.device
        batch.input_ids = input_ids
        batch.positions = to_device(table[:, 0], device)
        places = table - np.repeat(self._cache.left_out(rows), num_nodes)[:, None]
        batch.attention[0].paths = to_device(places.astype(np.int32), device)
        return self._head.advance(batch, states)


class ParallelDrafting(HeadDrafting):
    """A P-EAGLE head: the pass that reads the target's features has mask tokens behind them, one for each further token
    of the draft, and says all of it. The keys of mask tokens are written over by what comes true."""

    def __init__(
        self, head: EagleHead, target: Network, rows: DraftRows, cache: DraftCache, limits: DraftLimits
    ) -> None:
        super().__init__(head, target, rows, cache, limits)
        assert isinstance(head.config, EagleConfig)
        assert head.config.mask_token_id is not None
        self._masked_state, self._mask_token_id = head.masked_state, head.config.mask_token_id

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """Row -> what the head guesses to follow, at most as deep as its limit and its blocks allow."""
        entries, _, places = self._seen(step)
        if not entries:
            return {}
        assert step.features is not None
        depths = [
            max(0, min(step.limits.get(entry.row, 0), 1 + self._cache.num_slots(entry.row) - entry.end))
            for entry in entries
        ]
        spans = [
            RowSpan(entry.row, entry.start, entry.end + max(0, depth - 1))
            for entry, depth in zip(entries, depths, strict=True)
        ]
        known = [entry.end - entry.start for entry in entries]
        features = step.features[to_device(places, step.features.device)]
        token_ids, states, said = list[Tensor](), list[Tensor](), list[int]()
        first = 0
        following = self._following(entries).split(known)
        for ids, fused, span, depth in zip(
            following, self._head.fuse(features).split(known), spans, depths, strict=True
        ):
            num_masked = span.end - span.start - len(ids)
            token_ids += [ids, ids.new_full((num_masked,), self._mask_token_id)]
            states += [fused, self._masked_state.expand(num_masked, -1)]
            first += span.end - span.start
            said += range(first - depth, first)
        batch = self._cache.batch(spans)
        batch.input_ids = torch.cat(token_ids)
        advanced = self._head.advance(batch, torch.cat(states))
        for entry in entries:
            self._cache.wrote(entry.row, entry.start, entry.end)
        if not said:
            return {}
        guesses = self._head.argmax(advanced[to_device(np.array(said), advanced.device)])[0]
        return _drafts(entries, depths, guesses)


class BlockDrafting(HeadDrafting):
    """A DFlash drafter: it keeps keys and values of the target's features, and fills a block behind the last known
    token in a pass of its own. The keys of a block are written over by those of the features that come in its place."""

    def __init__(
        self, head: DFlashHead, target: Network, rows: DraftRows, cache: DraftCache, limits: DraftLimits
    ) -> None:
        super().__init__(head, target, rows, cache, limits)
        assert isinstance(head.config, EagleConfig)
        assert head.config.mask_token_id is not None
        if head.tree_refusals:
            raise ConfigError(
                "the tokens of a block see one another, which cannot be had from "
                f"{', '.join(head.tree_refusals)}; choose another attention backend or speculative method",
                field="speculative_method",
            )
        self._drafter, self._mask_token_id = head, head.config.mask_token_id
        self._most = head.config.block_size - 1

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """Row -> what the network guesses to follow, at most as deep as its limit, its block and its slots allow."""
        entries, _, places = self._seen(step)
        if not entries:
            return {}
        assert step.features is not None
        features = step.features[to_device(places, step.features.device)]
        self._drafter.store(self._cache.batch(entries), self._drafter.fuse(features))
        for entry in entries:
            self._cache.wrote(entry.row, entry.start, entry.end)
        limits = {
            entry.row: min(step.limits.get(entry.row, 0), self._most, self._cache.num_slots(entry.row) - entry.end - 1)
            for entry in entries
        }
        blocks = [RowSpan(e.row, e.end, e.end + 1 + limits[e.row]) for e in entries if limits[e.row] > 0]
        return self._fill(blocks) if blocks else {}

    def _fill(self, blocks: list[RowSpan]) -> dict[int, Draft]:
        """One pass over blocks, each of which begins with the last known token of its row."""
        batch = self._cache.batch(blocks)
        device = batch.input_ids.device
        sizes = [block.end - block.start for block in blocks]
        firsts = np.cumsum([0, *sizes[:-1]])
        is_known = np.zeros(sum(sizes), dtype=bool)
        is_known[firsts] = True
        known = to_device(is_known, device)
        batch.input_ids = torch.where(known, batch.input_ids, self._mask_token_id)
        # A block is a tree in which every token follows all the others.
        roots = np.array([block.start for block in blocks]) - self._cache.left_out([block.row for block in blocks])
        steps = np.arange(max(sizes))
        table = np.where(steps < np.array(sizes)[:, None], roots[:, None] + steps, -1)
        paths = np.concatenate((np.stack((roots + sizes - 1, roots), axis=1), table), axis=1)
        batch.attention[0].paths = to_device(np.repeat(paths, sizes, axis=0).astype(np.int32), device)
        states = self._drafter.fill(batch)[~known]
        return _drafts(blocks, [size - 1 for size in sizes], self._drafter.argmax(states)[0])


def _drafts(spans: list[RowSpan], depths: list[int], guesses: Tensor) -> dict[int, Draft]:
    """Row -> its part of the guesses [sum of the depths]."""
    parts = guesses.split(depths)
    return {span.row: Draft(part.tolist()) for span, part in zip(spans, parts, strict=True) if len(part)}
