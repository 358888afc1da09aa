"""Every op, declared once: arguments, shapes, dtypes and meaning. No code of any op is here; those of recurrent layers
are in `recurrent.py`.

Shape legend: T tokens, S sequences, N any number of rows, I inputs, O outputs, Hq query heads, Hkv key-value heads
(Hq is a multiple of Hkv), D head dimension, B blocks in the widest block table.

The paged cache of one layer is one tensor [num_blocks, 2, Hkv, block_size, D]: of each block the keys of a head, token
after token, then the next head's, then the values. Blocks come first, so layers of different shapes can share memory by
block id; a head's tokens of a block are one piece of memory, which kernels read in one run.
"""

from __future__ import annotations

from quire_ops.layout import PagedLayout
from quire_ops.recurrent import RECURRENT_OPS
from quire_ops.table import Op

__all__ = ["OPS", "PagedLayout", "kv_cache_shape"]


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of the paged cache of one layer."""
    return (num_blocks, 2, num_kv_heads, block_size, head_dim)


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
        name="int8_linear",
        signature="(x [N, I], weight [O, I] int8, scale [O] of x's dtype, bias [O] | None, *, wide: bool) -> [N, O], "
        "dtype of x, or float32 if wide",
        description="x @ (weight * scale[:, None]).T + bias: weight-only, symmetric, one scale per output",
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
        name="write_kv_cache",
        signature="(key [T, Hkv, D], value [T, Hkv, D], kv_cache [num_blocks, 2, Hkv, block_size, D], "
        "slot_mapping [T] int64) -> None",
        description="Write key and value of token t into slot `slot_mapping[t]`, cast to the dtype of the cache",
    ),
    Op(
        name="paged_attention",
        signature="(query [T, Hq, D], kv_cache [num_blocks, 2, Hkv, block_size, D], layout: PagedLayout, *, "
        "scale: float, sliding_window: int | None, soft_cap: float | None, sinks [Hq] | None) "
        "-> [T, Hq, D], dtype of query",
        description=(
            "Causal softmax attention of this step's tokens (prefill chunks and decodes mixed) over the paged keys and "
            "values of their own sequence. Query head h reads key-value head h // (Hq / Hkv). sliding_window W: a "
            "token sees itself and the W - 1 before it. soft_cap c: scores become c * tanh(score / c). sinks: each "
            "head has one more score to attend to, which has no value (gpt-oss). Slots that no token of the step may "
            "see are never read"
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
        name="decoder_stack",
        signature="(stack: DecoderStack) -> RunDecoder",
        description=(
            "A whole stack of pre-norm decoder layers in one call: what the ops above do in turn (`decoder_stack.py`). "
            "An option of a backend: without one, networks call the other ops layer by layer"
        ),
    ),
    *RECURRENT_OPS,
)
