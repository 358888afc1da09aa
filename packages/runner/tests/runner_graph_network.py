"""A network that can be captured, and the sampler's ops in torch alone, which a recorder of operations sees."""

from __future__ import annotations

import pytest
import torch
from runner_harness import TinyNetwork
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_ops import (
    NO_SLOT,
    LogitEditTable,
    LoraTokens,
    LoraWeights,
    OpBackend,
    OpRequest,
    OpTable,
    PagedLayout,
    PenaltyTable,
    SampleTable,
    builtin_table,
    ops,
    uniform,
)
from quire_ops.sampling import integer_weights, log2_weights, share_of, target_of
from quire_runner import runner


class DeviceNetwork(TinyNetwork):
    """`TinyNetwork` that reads the lengths of decode steps where a step's numbers are: on the device."""

    host_lengths: tuple[str, ...] = ()

    def forward(self, batch: ForwardBatch) -> Tensor:
        if self.num_forwards == 0 or max(batch.attention[0].query_lens) > 1:
            return super().forward(batch)
        self.num_forwards += 1
        x = self._embed(batch.input_ids, batch.positions)
        if batch.media is not None:
            x[batch.media.token_index] = batch.media.embeds.double()
        for layer, window in enumerate(self.windows):
            cache, metadata = batch.of_layer(layer)
            query, key, value = self._project(layer, x)
            size = metadata.block_size
            cache[metadata.slot_mapping // size, 0, metadata.slot_mapping % size] = key
            cache[metadata.slot_mapping // size, 1, metadata.slot_mapping % size] = value
            x = x + attend(query, cache, metadata, window).flatten(1) @ self.out[layer].T
        return x


def attend(query: Tensor, cache: Tensor, metadata: PagedLayout, window: int | None) -> Tensor:
    """Over the whole width of the block tables, as far as the lengths say: [S, H, D]."""
    found = cache[metadata.block_table.long()].double()  # [S, B, 2, block_size, H, D]
    place, ends = torch.arange(found.shape[1] * found.shape[3]), metadata.seq_lens.long()[:, None]
    seen = place < ends
    if window is not None:
        seen = seen & (place >= ends - window)
    keys, values = (torch.where(seen[:, :, None, None], part.flatten(1, 2), 0.0) for part in found.unbind(2))
    scores = torch.einsum("shd,skhd->shk", query, keys) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("shk,skhd->shd", weights, values)


def sample(logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
    """Op `sample` with a whole sort, without a question to the device."""
    max_logits, greedy = logits.amax(-1), logits.max(-1).indices
    log2 = log2_weights(logits, max_logits, table.inv_temperature[rows])
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(logits.shape[1], device=logits.device)
    passes = (log2.gather(1, order) >= table.min_log2[rows, None]) & (rank < table.top_k[rows, None])
    weights = torch.where(passes, integer_weights(log2).gather(1, order), 0)
    before = weights.cumsum(1) - weights
    kept = torch.where(before < share_of(table.top_p[rows], weights.sum(1))[:, None], weights, 0)
    cumulative = torch.zeros_like(kept).scatter_(1, order, kept).cumsum(1)
    u = uniform(table.seeds[rows], positions + 1 - table.num_prompt_tokens[rows])
    found = (cumulative > target_of(u, cumulative[:, -1])[:, None]).to(torch.int8).argmax(1)
    return torch.where(table.do_sample[rows], found, greedy), max_logits


def sample_masked(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable, mask_of: Tensor, bitmask: Tensor
) -> tuple[Tensor, Tensor]:
    """Op `sample_masked`, with a table of bits."""
    bits = (bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device)) & 1
    excluded = (bits.flatten(1)[mask_of, : logits.shape[1]] == 0) & (mask_of >= 0)[:, None]
    return sample(logits.masked_fill(excluded, -torch.inf), rows, positions, table)


def penalize(logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, table: PenaltyTable) -> None:
    """Op `penalize`, with tables over the vocabulary."""
    history, place = token_ids[rows].long(), torch.arange(token_ids.shape[1], device=token_ids.device)
    known = place <= positions[:, None]
    seen = torch.zeros_like(logits).scatter_add_(1, history, known.float()) > 0
    output = known & (place >= table.num_prompt_tokens[rows, None])
    count = torch.zeros_like(logits).scatter_add_(1, history, output.float())
    factor = table.repetition[rows, None]
    value = torch.where(logits > 0, logits / factor, logits * factor) - table.presence[rows, None] * (count > 0)
    logits.copy_(torch.where(seen, value - table.frequency[rows, None] * count, logits))


def edit_logits(logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, table: LogitEditTable) -> None:
    """Op `edit_logits`, with tables over the vocabulary."""
    num_before, device = table.prefixes.shape[2], logits.device
    places = positions[:, None] + torch.arange(1 - num_before, 1, device=device)
    window = token_ids[rows].gather(1, places.clamp(min=0)).masked_fill(places < 0, -2)
    prefixes = table.prefixes[rows]
    acts = ((prefixes == window[:, None]) | (prefixes == -1)).all(-1)
    acts &= torch.arange(table.ids.shape[1], device=device) < table.num_entries[rows, None]
    acts &= (positions + 1 - table.num_prompt_tokens[rows])[:, None] < table.until[rows]
    ids, values = table.ids[rows].long(), table.values[rows]
    logits.scatter_add_(1, ids, torch.where(acts & values.isfinite(), values, 0.0))
    out = torch.zeros_like(logits).scatter_add_(1, ids, (acts & (values == -torch.inf)).float()) > 0
    bits = (table.allowed[rows][:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    out |= (bits.flatten(1)[:, : logits.shape[1]] == 0) & (table.is_restricted[rows, None] != 0)
    logits.masked_fill_(out, -torch.inf)


def paged_attention(
    query: Tensor, kv_cache: Tensor, layout: PagedLayout, *, scale: float, sliding_window: int | None = None, **no: None
) -> Tensor:
    """Op `paged_attention` over the whole width of the block tables, in float64, with lengths read on the device."""
    assert all(value is None or value is False for value in no.values())
    ends, token = layout.query_start_loc[1:].long(), torch.arange(query.shape[0], device=query.device)
    entry = torch.searchsorted(ends, token, right=True)
    position = layout.seq_lens.long()[entry] - ends[entry] + token
    found = kv_cache[layout.block_table.long()[entry]].transpose(3, 4)  # [T, B, 2, block_size, Hkv, D]
    place = torch.arange(found.shape[1] * found.shape[3], device=query.device)
    seen = place <= position[:, None]
    if sliding_window is not None:
        seen = seen & (place > position[:, None] - sliding_window)
    group = query.shape[1] // kv_cache.shape[2]
    keys, values = (
        torch.where(seen[:, :, None, None], part.flatten(1, 2).double(), 0.0).repeat_interleave(group, 2)
        for part in found.unbind(2)
    )
    scores = (query.double()[:, None] * keys).sum(-1) * scale  # [T, L, Hq]
    weights = scores.masked_fill(~seen[..., None], -torch.inf).softmax(1)
    return (weights[..., None] * values).sum(1).to(query.dtype)


def lora_linear(out: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    """Op `lora_linear` with a gather of each token's matrices; of tokens in order, as kernels take them."""
    if not tokens.is_fixed:
        builtin_table().bind(ops.lora_linear, OpRequest(), backend="torch")(out, x, weights, tokens)
        return
    order = tokens.order.long()
    slots = tokens.slots.long()[order]
    which = torch.where(slots == NO_SLOT, 0, slots)
    inner = torch.einsum("ti,tri->tr", x[order].double(), weights.a[which].double())
    added = torch.einsum("tr,tro->to", inner, weights.b[which].double())
    assert weights.device_adjusted is not None
    is_adjusted = (weights.device_adjusted[which] != 0)[:, None]
    base = out[order].double()
    base = torch.where(is_adjusted, base * weights.scale[which] + weights.shift[which], base)
    out.index_copy_(0, order, torch.where((slots == NO_SLOT)[:, None], out[order], (base + added).to(out.dtype)))


def torch_table() -> OpTable:
    """The recorder sees what torch does; the compiled kernels for CPUs do without torch."""
    table = builtin_table()
    table.add(OpBackend(op=ops.sample, name="sorted", function=sample))
    table.add(OpBackend(op=ops.sample_masked, name="sorted", function=sample_masked))
    table.add(OpBackend(op=ops.penalize, name="tables", function=penalize))
    table.add(OpBackend(op=ops.edit_logits, name="tables", function=edit_logits))
    return table


def add_torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling with torch alone, in one call."""
    table = torch_table()
    monkeypatch.setattr(runner, "op_table", lambda: table)


def add_torch_networks(monkeypatch: pytest.MonkeyPatch, *, with_prompts: bool = False) -> None:
    """The same, and networks of `quire_models` that can be captured, steps with prompts too if `with_prompts`."""
    table = torch_table()
    table.add(
        OpBackend(
            op=ops.paged_attention,
            name="whole tables",
            function=paged_attention,
            priority=10,
            device_lengths=True,
            device_query_lens=with_prompts,
        )
    )
    table.add(OpBackend(op=ops.lora_linear, name="gathered", function=lora_linear, priority=10, device_lengths=True))
    for place in (
        "quire_lora.slots",
        "quire_ops.backends",
        "quire_models.layers.scope",
        "quire_attention.backend",
        "quire_runner.runner",
    ):
        monkeypatch.setattr(f"{place}.op_table", lambda: table)
