"""The ops of recurrent layers, declared, and where a step's tokens find and leave their states.

A recurrent layer keeps, per block of a sequence, one state: the state after the last computed token of the block. A
sequence's new tokens go on from the block of the token before the first of them (from nothing at position 0). The state
is stored wherever the sequence reaches the end of a block that it has (not the null block), and after its last token;
what is stored in the null block then is nobody's, and a backend may leave it out.

Shape legend: T tokens, C channels, K taps of a convolution, H heads, P channels of a head, N numbers of state per
channel, G groups of heads that share what is projected, Hk and Hv key and value heads (Hv is a multiple of Hk), Dk and
Dv their sizes.
"""

from __future__ import annotations

from typing import NamedTuple

from quire_ops.layout import PagedLayout
from quire_ops.table import Op

__all__ = ["RECURRENT_OPS", "StateRun", "state_runs"]

RECURRENT_OPS: tuple[Op, ...] = (
    Op(
        name="causal_conv1d",
        signature="(x [T, C], weight [C, K], bias [C] | None, state [num_blocks, K - 1, C] float32, layout: "
        "PagedLayout, *, activation: 'silu' | None) -> [T, C]; weights of x's dtype; rows of x may be apart",
        description=(
            "Depthwise convolution over the last K tokens of the own sequence: out[t] = act(bias + sum over k of "
            "weight[:, k] * x[t - K + 1 + k]), zeros before the beginning. The state is the last K - 1 inputs"
        ),
    ),
    Op(
        name="mamba2_scan",
        signature="(x [T, H, P], dt [T, H], a [H] float32, b [T, G, N], c [T, G, N], d [H] float32, "
        "dt_bias [H] float32, state [num_blocks, H, P, N] float32, layout: PagedLayout, *, dt_limit: (float, float)) "
        "-> [T, H, P], dtype of x; rows of x, dt, b and c may be apart",
        description=(
            "State space with a scalar decay per head (Dao & Gu 2024, arXiv:2405.21060, sec. 2): with "
            "s = clamp(softplus(dt + dt_bias)): h = exp(s * a) * h + s * x b^T; out = h c + d * x. Head i reads group "
            "i // (H / G)"
        ),
    ),
    Op(
        name="selective_scan",
        signature="(x [T, C], dt [T, C], a [C, N] float32, b [T, N], c [T, N], d [C] float32, dt_bias [C] float32, "
        "state [num_blocks, C, N] float32, layout: PagedLayout) -> [T, C], dtype of x; rows of b and c may be apart",
        description=(
            "State space with a decay per channel and state (Gu & Dao 2023, arXiv:2312.00752, sec. 3.2): with "
            "s = softplus(dt + dt_bias): h = exp(s * a) * h + s * x b^T; out = h c + d * x"
        ),
    ),
    Op(
        name="gated_delta_rule",
        signature="(query [T, Hk, Dk], key [T, Hk, Dk], value [T, Hv, Dv], a [T, Hv], b [T, Hv], a_log [Hv] float32, "
        "dt_bias [Hv] float32, state [num_blocks, Hv, Dk, Dv] float32, layout: PagedLayout) -> [T, Hv, Dv], dtype of "
        "value; rows of query, key, value, a and b may be apart",
        description=(
            "Linear attention with a decay and the delta rule (Yang et al. 2024, arXiv:2412.06464, eq. 10): with query "
            "and key brought to length 1 (eps 1e-6 under the root), query divided by sqrt(Dk), and "
            "g = -exp(a_log) * softplus(a + dt_bias): S = exp(g) * S; S = S + key (sigmoid(b) * (value - S^T key))^T; "
            "out = S^T query. Value head i reads key head i // (Hv / Hk)"
        ),
    ),
    Op(
        name="wkv",
        signature="(key [T, C], value [T, C], decay [C] float32, first [C] float32, state [num_blocks, 3, C] float32, "
        "layout: PagedLayout) -> [T, C], dtype of value",
        description=(
            "Average of the values so far, weighted by exp(key), all but the newest by exp(decay) less for each token "
            "since, the newest by exp(first) more (Peng et al. 2023, RWKV, arXiv:2305.13048, eq. 16). The state is "
            "the sum of weighted values, the sum of weights, both divided by exp(m), and m"
        ),
    ),
    Op(
        name="sigmoid_and_mul",
        signature="(gate [N, I] or [N, 1], up [N, I]) -> like up; may write over gate",
        description="sigmoid(gate) * up; a gate of one number for each row is for all of it",
    ),
)


class StateRun(NamedTuple):
    """Tokens of one sequence between two places where its state is stored."""

    begin: int
    """First token, among the step's."""
    end: int
    read: int
    """Block of the state to go on from; 0 for none, at the beginning of a sequence."""
    write: int
    """Block that gets the state after the last token."""


def state_runs(layout: PagedLayout) -> list[StateRun]:
    """The step's tokens, cut where states are stored, each sequence's in order. Worked out once per step."""
    runs: list[StateRun] | None = layout.derived.get("state_runs")
    if runs is None:
        runs = layout.derived["state_runs"] = []
        token = 0
        tables = layout.block_table.tolist()
        for table, query_len, kv_len in zip(tables, layout.query_lens, layout.kv_lens, strict=True):
            runs += _sequence_runs(table, layout.block_size, token, kv_len - query_len, kv_len)
            token += query_len
    return runs


def _sequence_runs(table: list[int], size: int, token: int, start: int, end: int) -> list[StateRun]:
    runs = []
    read = table[(start - 1) // size] if start else 0
    begin = start
    for block in range(start // size, (end - 1) // size + 1):
        stop = min((block + 1) * size, end)
        if table[block] or stop == end:
            runs.append(StateRun(token + begin - start, token + stop - start, read, table[block]))
            begin, read = stop, table[block]
    return runs
