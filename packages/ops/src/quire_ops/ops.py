"""Every op of Quire by its name, as `bind(ops.rms_norm, request)` takes it. Where an op is declared, the import says.

An op whose docstring calls it optional has no backend of this package but its reference: networks do without it where
no other package brings one.
"""

from __future__ import annotations

from typing import Any

from quire_interfaces import ConfigError
from quire_ops.activation_quant import add_rms_norm_quant, gate_quant
from quire_ops.activations import activation, gelu_and_mul, sigmoid_and_mul, silu_and_mul
from quire_ops.attention_ops import (
    biased_paged_attention,
    paged_attention,
    relative_paged_attention,
    tempered_paged_attention,
)
from quire_ops.block_sparse import index_topk_blocks, sparse_attention
from quire_ops.compressed_attention import compress_windows, compressed_attention, compressed_topk
from quire_ops.decode_step import decode_step
from quire_ops.decoder_stack import decoder_stack
from quire_ops.encoder_attention import encoder_attention
from quire_ops.encoder_stack import encoder_stack
from quire_ops.expert_outputs import expert_outputs, moe_sum
from quire_ops.fused_moe import fused_moe
from quire_ops.kv_cache_ops import rope_and_write_kv, rotary_embedding, write_kv_cache
from quire_ops.latent_attention import latent_attention, write_latent_cache
from quire_ops.linear_ops import (
    embedding,
    gated_linear,
    head_linear,
    linear,
    linear_add,
    lm_head,
    lm_head_argmax,
    norm_linear,
)
from quire_ops.logit_edits import edit_logits
from quire_ops.lora import lora_linear
from quire_ops.maxsim import maxsim
from quire_ops.norms import add_rms_norm, layer_norm, rms_norm
from quire_ops.op import Op
from quire_ops.partial_attention import latent_attention_with_lse, merge_attention_states, paged_attention_with_lse
from quire_ops.penalties import penalize
from quire_ops.quantized_embedding import quantized_embedding
from quire_ops.quantized_linear import block_linear, fp8_linear, grouped_linear, int8_linear, w8a8_linear
from quire_ops.recurrent import (
    causal_conv1d,
    channel_delta_rule,
    dynamic_conv1d,
    gated_delta_rule,
    mamba2_scan,
    selective_scan,
    wkv,
)
from quire_ops.routing import route_experts
from quire_ops.sampling import sample, sample_masked
from quire_ops.sparse_attention import (
    index_topk,
    pooled_index_topk,
    position_slots,
    sparse_latent_attention,
    sparse_latent_attention_with_lse,
)
from quire_ops.step_inputs import decode_inputs, step_inputs

__all__ = [
    "activation",
    "add_rms_norm",
    "add_rms_norm_quant",
    "biased_paged_attention",
    "block_linear",
    "causal_conv1d",
    "channel_delta_rule",
    "compress_windows",
    "compressed_attention",
    "compressed_topk",
    "decode_inputs",
    "decode_step",
    "decoder_stack",
    "dynamic_conv1d",
    "edit_logits",
    "embedding",
    "encoder_attention",
    "encoder_stack",
    "expert_outputs",
    "fp8_linear",
    "fused_moe",
    "gate_quant",
    "gated_delta_rule",
    "gated_linear",
    "gelu_and_mul",
    "grouped_linear",
    "head_linear",
    "index_topk",
    "index_topk_blocks",
    "int8_linear",
    "latent_attention",
    "latent_attention_with_lse",
    "layer_norm",
    "linear",
    "linear_add",
    "lm_head",
    "lm_head_argmax",
    "lora_linear",
    "mamba2_scan",
    "maxsim",
    "merge_attention_states",
    "moe_sum",
    "norm_linear",
    "paged_attention",
    "paged_attention_with_lse",
    "penalize",
    "pooled_index_topk",
    "position_slots",
    "quantized_embedding",
    "relative_paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "rotary_embedding",
    "route_experts",
    "sample",
    "sample_masked",
    "selective_scan",
    "sigmoid_and_mul",
    "silu_and_mul",
    "sparse_attention",
    "sparse_latent_attention",
    "sparse_latent_attention_with_lse",
    "step_inputs",
    "tempered_paged_attention",
    "w8a8_linear",
    "wkv",
    "write_kv_cache",
    "write_latent_cache",
]  # fmt: skip

OPS: tuple[Op[..., Any], ...] = tuple(globals()[name] for name in __all__)
"""All of them, by name."""


def op_named(name: str) -> Op[..., Any]:
    """The op of a name that comes from data or a user.

    Raises:
        ConfigError: There is none; the message lists the names.
    """
    if name not in __all__:
        raise ConfigError(f"there is no op {name!r}; the ops are {', '.join(__all__)}")
    op: Op[..., Any] = globals()[name]
    return op
