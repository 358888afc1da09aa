"""Every op, declared once: arguments, shapes, dtypes and meaning. No code of any op is here; those of recurrent layers
are in `recurrent.py`.

Shape legend: T tokens, S sequences, N any number of rows, I inputs, O outputs, Hq query heads, Hkv key-value heads
(Hq is a multiple of Hkv), Hi heads of an index, D head dimension, B blocks in the widest block table.

The paged cache of one layer is one tensor [num_blocks, 2, Hkv, block_size, X]: of each block the keys of a head, token
after token, then the next head's, then the values. Blocks come first, so layers of different shapes can share memory by
block id; a head's tokens of a block are one piece of memory, which kernels read in one run.

A row, the X elements of one token and head, holds a key (or value) x of D numbers in the format that the dtype tells:
- a floating-point dtype: X = D, x itself.
- float8_e4m3fn, float8_e5m2: X = D, x / s rounded to nearest even, at most the largest finite number; it stands for
  stored * s. s is the layer's `kv_scale` [2, Hkv] float32, of keys and of values, per head; none means ones.
- int8: X = D + 4. With a = max |x|: x * (127 / a) rounded to nearest even, then s = a / 127 as the four bytes of a
  float32; it stands for stored * s.
- uint8 is int4: X = D / 2 + 4. As int8 with 7 for 127; byte i holds element i in its low half and element i + D/2 in
  its high half, 8 added to both.
All of it is computed in float32. Where 127 / a (7 / a) is not finite, zeros are stored. A NaN in x makes s NaN.
"""

from __future__ import annotations

from quire_ops.layout import PagedLayout
from quire_ops.recurrent import RECURRENT_OPS
from quire_ops.table import Op

__all__ = ["OPS", "PagedLayout", "kv_cache_shape"]


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, row_size: int) -> tuple[int, ...]:
    """Shape of the paged cache of one layer. row_size: elements of a row, X above."""
    return (num_blocks, 2, num_kv_heads, block_size, row_size)


OPS: tuple[Op, ...] = (
    Op(
        name="linear",
        signature="(x [N, I], weight [O, I], bias [O] | None) -> [N, O]; all of one dtype",
        description="x @ weight.T + bias",
    ),
    Op(
        name="lm_head",
        signature="(x [N, I], weight [vocab, I] of x's dtype) -> [N, vocab] float32",
        description="x @ weight.T, kept as wide as it is summed",
    ),
    Op(
        name="lm_head_argmax",
        signature="(x [N, I], weight [vocab, I] of x's dtype) -> (ids [N] int64, peaks [N] float32)",
        description=(
            "The largest logit of op `lm_head` and its token, the lowest among equals; a row with NaN has the peak NaN "
            "and any token. Logits need not be written anywhere"
        ),
    ),
    Op(
        name="int8_linear",
        signature="(x [N, I], weight [O, I] int8, scale [O] of x's dtype, bias [O] | None, *, wide: bool) -> [N, O], "
        "dtype of x, or float32 if wide",
        description="x @ (weight * scale[:, None]).T + bias: weight-only, symmetric, one scale per output",
    ),
    Op(
        name="w8a8_linear",
        signature="(x [N, I] | QuantizedTokens, weight [O, I] int8, scale [O] of x's dtype, input_scale [1] float32, "
        "bias [O] | None, *, wide: bool) -> [N, O], dtype of x, or float32 if wide",
        description=(
            "q @ weight.T * step[:, None] * scale + bias with q and step of `int8_tokens.round_tokens`: both sides in "
            "int8, their product a whole number. A row that is not finite becomes NaN. x may be rounded already "
            "(`rounding.py`) where the backend has an op that rounds"
        ),
    ),
    Op(
        name="fp8_linear",
        signature="(x [N, I] | QuantizedTokens, weight [O, I] float8_e4m3fn, scale [O, G] float32, "
        "input_scale [1] float32, bias [O] | None, *, wide: bool) -> [N, O], dtype of x, or float32 if wide",
        description=(
            "(q * step) @ (weight * scale).T + bias with q and step of `fp8_tokens.round_tokens_to_fp8`: both sides in "
            "fp8 e4m3, summed in float32. G is 1, then tokens have one step each; or ceil(I / 128), then steps and "
            "scales are those of 128 inputs each. A row that is not finite becomes NaN. x may be rounded already, as "
            "that of w8a8_linear. An option of a backend: without one, inputs stay as they are"
        ),
    ),
    Op(
        name="grouped_linear",
        signature="(x [N, I], weight [O, 64 * ceil(I / 128)] uint8 | [O, I] int8 | [O, I] float8_e4m3fn, "
        "scale [ceil(O / 16), G, 16] of x's dtype or float32, zero like scale, int16 | None, bias [O] | None, *, "
        "wide: bool) -> [N, O], dtype of x, or float32 if wide",
        description=(
            "x @ (scale * (weight - zero)).T + bias: weight-only int4, int8 or fp8 with a scale for each group of 32, "
            "64 or 128 inputs of each output (`grouped.py` says how they are packed)"
        ),
    ),
    Op(
        name="lora_linear",
        signature="(out [T, O] of x's dtype or float32, x [T, I], weights: LoraWeights, tokens: LoraTokens) -> None",
        description=(
            "Adapters on top of a linear layer's result, in place: out = out * scale + (x @ a.T) @ b + shift with the "
            "matrices of the token's slot; tokens without a slot keep theirs (`lora.py`). Rows of out may be apart"
        ),
    ),
    Op(
        name="embedding",
        signature="(ids [T] int64, weight [vocab, I]) -> [T, I], dtype of weight",
        description="Row `ids[t]` of the weight for each token",
    ),
    Op(
        name="rms_norm",
        signature="(x [..., I], weight [I], eps: float) -> like x",
        description="x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, eq. 4)",
    ),
    Op(
        name="add_rms_norm",
        signature="(x [N, I], residual [N, I], weight [I], eps: float) -> (normed [N, I], total [N, I])",
        description="total = x + residual; normed = rms_norm(total). May write total over residual",
    ),
    Op(
        name="add_rms_norm_quant",
        signature="(x [N, I], residual [N, I], weight [I], eps: float, rounding: Rounding) "
        "-> (QuantizedTokens, total [N, I])",
        description=(
            "`add_rms_norm`, whose normed rows, rounded to the compute dtype, are rounded on as the products behind "
            "them do it (`rounding.py`). May write total over residual. An option of a backend: without one, each "
            "product rounds its own inputs"
        ),
    ),
    Op(
        name="layer_norm",
        signature="(x [..., I], weight [I] | None, bias [I] | None, eps: float) -> like x",
        description="(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (Ba et al. 2016)",
    ),
    Op(
        name="rotary_embedding",
        signature="(x [T, H, D], cos [T, 1, D], sin [T, 1, D]) -> like x; cos and sin of x's dtype",
        description=(
            "Rotate the pairs (i, i + D/2) of each head (Su et al. 2021, sec. 3.4.2, half-split order). cos holds each "
            "cosine twice; sin holds the negated sines, then the sines"
        ),
    ),
    Op(
        name="silu_and_mul",
        signature="(gate [N, I], up [N, I]) -> like gate; may write over gate",
        description="gate * sigmoid(gate) * up (SwiGLU, Shazeer 2020)",
    ),
    Op(
        name="gelu_and_mul",
        signature="(gate [N, I], up [N, I]) -> like gate; may write over gate",
        description="gelu(gate) * up with the tanh approximation (GEGLU, Shazeer 2020)",
    ),
    Op(
        name="activation",
        signature="(x [...], name: str) -> like x; may write over x",
        description=(
            "A function of each number, by its name: silu, gelu (the tanh approximation), gelu_erf (Hendrycks & Gimpel "
            "2016, sec. 2), sigmoid, tanh, expm1"
        ),
    ),
    Op(
        name="sigmoid_and_mul",
        signature="(gate [N, I] or [N, 1], up [N, I]) -> like up; may write over gate",
        description="sigmoid(gate) * up; a gate of one number for each row is for all of it",
    ),
    Op(
        name="gated_linear",
        signature="(x [N, I], weight [2 * O, I], bias [2 * O] | None, activation: str) -> [N, O], dtype of x",
        description=(
            "`linear` with a weight whose first outputs are the gate's and the others up's, then `silu_and_mul` or "
            "`gelu_and_mul` (activation: silu, gelu); products are rounded to the compute dtype. An option of a "
            "backend: without one, networks call the other ops"
        ),
    ),
    Op(
        name="gate_quant",
        signature="(gate [N, I], up [N, I], activation: str, rounding: Rounding) -> QuantizedTokens",
        description=(
            "`silu_and_mul` or `gelu_and_mul` (activation: silu, gelu), rounded as add_rms_norm_quant does it. An "
            "option of a backend, as that is"
        ),
    ),
    Op(
        name="write_kv_cache",
        signature="(key [T, Hkv, D], value [T, Hkv, D], kv_cache [num_blocks, 2, Hkv, block_size, X], "
        "slot_mapping [T] int64, kv_scale [2, Hkv] float32 | None) -> None",
        description="Write key and value of token t into slot `slot_mapping[t]`, in the format of the cache",
    ),
    Op(
        name="rope_and_write_kv",
        signature="(query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D], cos [T, 1, D], sin [T, 1, D], "
        "kv_cache [num_blocks, 2, Hkv, block_size, X], slot_mapping [T] int64, *, kv_scale [2, Hkv] float32 | None, "
        "query_norm [D] | None, key_norm [D] | None, eps: float) -> [T, Hq, D], dtype of query",
        description=(
            "What stands between projections and attention, in one: `rms_norm` of the heads where there are weights, "
            "`rotary_embedding` of queries and keys, `write_kv_cache`; each result is rounded to the compute dtype. "
            "Gives the queries. An option of a backend: without one, networks call the other ops"
        ),
    ),
    Op(
        name="paged_attention",
        signature="(query [T, Hq, D], kv_cache [num_blocks, 2, Hkv, block_size, X], layout: PagedLayout, *, "
        "scale: float, sliding_window: int | None, soft_cap: float | None, sinks [Hq] | None, "
        "kv_scale [2, Hkv] float32 | None, alibi_slopes [Hq] | None) "
        "-> [T, Hq, D], dtype of query",
        description=(
            "Causal softmax attention of this step's tokens (prefill chunks and decodes mixed) over the paged keys and "
            "values of their own sequence. Query head h reads key-value head h // (Hq / Hkv). sliding_window W: a "
            "token sees itself and the W - 1 before it. soft_cap c: scores become c * tanh(score / c). sinks: each "
            "head has one more score to attend to, which has no value (gpt-oss). alibi_slopes: of a head's scores its "
            "slope is taken once for each token of distance (Press et al. 2022, sec. 3). Slots that no token of the "
            "step may see are never read"
        ),
    ),
    Op(
        name="biased_paged_attention",
        signature="(query [T, Hq, D], kv_cache [num_blocks, 2, Hkv, block_size, X], layout: PagedLayout, *, "
        "scale: float, bias [Hq, M + 1], kv_scale [2, Hkv] float32 | None) -> [T, Hq, D], dtype of query",
        description=(
            "As paged_attention, where each head adds bias[d] to the score of a key d tokens before the query, "
            "bias[M] from M tokens on (T5's relative position bias, Raffel et al. 2020, sec. 2.1)"
        ),
    ),
    Op(
        name="encoder_attention",
        signature="(query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D], lens: list[int], *, scale: float, "
        "window: int | None, bias [Hq, 2 * M + 1] | None) -> [T, Hq, D], dtype of query",
        description=(
            "Softmax attention of every token over all tokens of its own sequence, in both directions; sequences of "
            "`lens` tokens follow each other. window W: only over those at most W tokens away. bias: bias[M + d] is "
            "added to the score of a key d tokens behind the query (before it if d is negative), and that of M from "
            "M tokens on"
        ),
    ),
    Op(
        name="head_linear",
        signature="(x [T, H, I], weight [H, O, I]) -> [T, H, O]; all of one dtype",
        description=(
            "x[t, h] @ weight[h].T: each head has a matrix of its own. Rows of a weight are fastest to read where the "
            "numbers of a head lie without gaps; heads may be apart"
        ),
    ),
    Op(
        name="write_latent_cache",
        signature="(row [T, W], latent_cache [num_blocks, block_size, W], slot_mapping [T] int64) -> None",
        description="Write the row of token t into slot `slot_mapping[t]`; all of one dtype",
    ),
    Op(
        name="latent_attention",
        signature="(query [T, Hq, W], latent_cache [num_blocks, block_size, W], layout: PagedLayout, *, scale: float, "
        "rank: int) -> [T, Hq, rank], dtype of query",
        description=(
            "Causal softmax attention of this step's tokens over the rows of their own sequence, which all heads "
            "share: a row is the key, and its first `rank` numbers, the latent, are the value (multi-head latent "
            "attention with the projections absorbed, DeepSeek-AI 2024, sec. 2.1.2). Slots that no token of "
            "the step may see are never read. Rows may be the beginnings of longer ones"
        ),
    ),
    Op(
        name="index_topk",
        signature="(query [T, Hi, D], weights [T, Hi] float32, key_cache [num_blocks, block_size, D], layout: "
        "PagedLayout, *, k: int) -> [T, K] int64, K = min(k, tokens of the longest sequence)",
        description=(
            "Positions of the k tokens of its own sequence, up to itself, that a token has the largest scores for: "
            "sum over h of weights[h] * relu(query[h] . key) (lightning indexer, DeepSeek-AI 2025, DeepSeek-V3.2-Exp, "
            "eq. 1). Their order, and which of equals, is left open; -1 behind them where there are fewer. Rows of the "
            "cache may be parts of longer ones"
        ),
    ),
    Op(
        name="position_slots",
        signature="(positions [T, K] int64, layout: PagedLayout) -> [T, K] int64",
        description="The slot of each position in the sequence of the token, block id * block_size + offset; -1 for -1",
    ),
    Op(
        name="sparse_latent_attention",
        signature="(query [T, Hq, W], latent_cache [num_blocks, block_size, W], slots [T, K] int64, *, scale: float, "
        "rank: int) -> [T, Hq, rank], dtype of query",
        description=(
            "As `latent_attention`, each token over the rows in its own slots alone; those of -1, which the first of a "
            "token is not, count for nothing. Other slots are never read"
        ),
    ),
    Op(
        name="decode_step",
        signature="(network: DecodeNetwork, rows: DecodeRows) -> RunDecode",
        description=(
            "A whole decode step in one call, from embedding to tokens (`decode_step.py`). An option of "
            "a backend, as decoder_stack is"
        ),
    ),
    Op(
        name="draw",
        signature="(logits [N, V] float32, rows [N] int64, positions [N] int64, table: DrawTable) "
        "-> (tokens [N] int64, peaks [N] float32)",
        description=(
            "One token per row of logits, the most likely or a drawn one, and the largest logit (`drawing.py`). An "
            "option of a backend: without one, quire_sampling draws with torch, the same tokens"
        ),
    ),
    Op(
        name="draw_masked",
        signature="(logits [N, V] float32, rows [N] int64, positions [N] int64, table: DrawTable, mask_of [N] int64, "
        "bitmask [M, ceil(V / 32)] int32) -> (tokens [N] int64, peaks [N] float32); may write over logits",
        description=(
            "What `draw` gives when row i takes only the tokens whose bit is 1 in mask `mask_of[i]`, all of them where "
            "that is -1. An option of a backend, as draw is: one look at the logits serves both"
        ),
    ),
    Op(
        name="penalize",
        signature="(logits [N, V] float32, rows [N] int64, positions [N] int64, token_ids [R, L] int32, "
        "table: PenaltyTable); writes over logits",
        description=(
            "Repetition, presence and frequency penalties from the rows' histories (`penalties.py`). An option of a "
            "backend: without one, quire_sampling does it with torch, for the same logits"
        ),
    ),
    Op(
        name="route_experts",
        signature="(logits [T, E] float32, bias [E] float32 | None, rule: RoutingRule) "
        "-> (topk_ids [T, K] int64, topk_weights [T, K] float32)",
        description=(
            "The K best experts of each token, best first, the first of equals, and how much each counts: experts are "
            "scored by the rule's scoring of the logits; the bias is added to the scores for choosing alone; where the "
            "rule has groups, only those of the best groups can be chosen (`routing.py`). An option of a backend: "
            "without one, networks choose by torch's operators"
        ),
    ),
    Op(
        name="fused_moe",
        signature="(experts: Experts) -> RunExperts",
        description=(
            "The experts of a mixture-of-experts layer, each with the tokens that are routed to it, and the weighted "
            "sum of their results (`fused_moe.py`)"
        ),
    ),
    Op(
        name="step_inputs",
        signature="(token_ids [R, L] int32, tables: tuple[RowTable, ...], rows [S], starts [S], ends [S]: int64 on the "
        "host) -> StepInputs",
        description=(
            "Gather the inputs of a step from what is kept of each row: sequence s computes the tokens at positions "
            "starts[s] to ends[s] - 1 of row rows[s], at least one. Any dtype of the network"
        ),
    ),
    Op(
        name="decode_inputs",
        signature="(token_ids [R, L] int32, tables: tuple[RowTable, ...], spans [4, S] int64 on the device) "
        "-> StepInputs",
        description=(
            "What `step_inputs` gives for sequences of one token each, from numbers on the device, so that a captured "
            "graph can do it again with others. spans: rows, starts, ends, which are starts + 1, and 0 to S - 1. Block "
            "tables are as wide as those of the rows"
        ),
    ),
    Op(
        name="decoder_stack",
        signature="(stack: DecoderStack) -> RunDecoder",
        description=(
            "A whole stack of pre-norm decoder layers in one call: what the ops above do in turn (`decoder_stack.py`). "
            "An option of a backend: without one, networks call the other ops layer by layer"
        ),
    ),
    *RECURRENT_OPS,
)
