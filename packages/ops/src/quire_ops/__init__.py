"""Every tensor op, declared by its reference, and a table of backends. `ops` has the ops by name."""

from quire_ops import ops
from quire_ops.activation_quant import ActivationScheme, QuantizedTokens
from quire_ops.activations import GATED_ACTIVATIONS
from quire_ops.backends import ENTRY_POINT_GROUP, bind, builtin_table, kernel_builders, op_report, op_table
from quire_ops.decode_step import DecodeNetwork, DecodeRows, RunDecode
from quire_ops.decoder_stack import DecoderStack, RankGroup, RunDecoder
from quire_ops.devices import torch_device
from quire_ops.encoder_stack import EncoderAttentionWeights, EncoderLayerWeights, EncoderStack, RunEncoder
from quire_ops.expert_outputs import RunExpertOutputs
from quire_ops.fused_moe import EXPERT_ACTIVATIONS, Experts, RunExperts, swigluoai_and_mul
from quire_ops.kernel_builds import KernelBuilder
from quire_ops.kv_cache_ops import kv_cache_shape
from quire_ops.kv_format import CACHE_TORCH_DTYPES
from quire_ops.latent_format import latent_width, split_latent_cache
from quire_ops.layer_weights import (
    AttentionWeights,
    CrossAttentionWeights,
    DecoderLayerWeights,
    FeedForwardWeights,
    GatedDeltaWeights,
    GatedNormWeights,
    LatentAttentionWeights,
    Mamba2Weights,
    MixerWeights,
    MLPWeights,
    NormWeights,
    RoutedExperts,
    ShortConvWeights,
)
from quire_ops.layout import PagedLayout
from quire_ops.linear_weights import GatedWeights, LinearWeights, is_in_blocks
from quire_ops.logit_edits import EDIT_ALWAYS, EditLogits, LogitEditTable
from quire_ops.lora import NO_SLOT, LoraTokens, LoraWeights
from quire_ops.op import Op, OpFunction, implements, op
from quire_ops.penalties import Penalize, PenaltyTable
from quire_ops.replay import StateReplay, replayable
from quire_ops.rng import uniform
from quire_ops.routing import EXPERT_SCORINGS, RoutingRule
from quire_ops.sampling import Sample, SampleMasked, SampleTable
from quire_ops.staging import copy_to_host, fill_on_device, to_device
from quire_ops.step_inputs import GroupInputs, RowTable, StepInputs
from quire_ops.table import BackendSet, OpBackend, OpReport, OpRequest, OpTable, SizeRule

__version__ = "0.1.0"

__all__ = [
    "CACHE_TORCH_DTYPES",
    "EDIT_ALWAYS",
    "ENTRY_POINT_GROUP",
    "EXPERT_ACTIVATIONS",
    "EXPERT_SCORINGS",
    "GATED_ACTIVATIONS",
    "NO_SLOT",
    "ActivationScheme",
    "AttentionWeights",
    "BackendSet",
    "CrossAttentionWeights",
    "DecodeNetwork",
    "DecodeRows",
    "DecoderLayerWeights",
    "DecoderStack",
    "EditLogits",
    "EncoderAttentionWeights",
    "EncoderLayerWeights",
    "EncoderStack",
    "Experts",
    "FeedForwardWeights",
    "GatedDeltaWeights",
    "GatedNormWeights",
    "GatedWeights",
    "GroupInputs",
    "KernelBuilder",
    "LatentAttentionWeights",
    "LinearWeights",
    "LogitEditTable",
    "LoraTokens",
    "LoraWeights",
    "MLPWeights",
    "Mamba2Weights",
    "MixerWeights",
    "NormWeights",
    "Op",
    "OpBackend",
    "OpFunction",
    "OpReport",
    "OpRequest",
    "OpTable",
    "PagedLayout",
    "Penalize",
    "PenaltyTable",
    "QuantizedTokens",
    "RankGroup",
    "RoutedExperts",
    "RoutingRule",
    "RowTable",
    "RunDecode",
    "RunDecoder",
    "RunEncoder",
    "RunExpertOutputs",
    "RunExperts",
    "Sample",
    "SampleMasked",
    "SampleTable",
    "ShortConvWeights",
    "SizeRule",
    "StateReplay",
    "StepInputs",
    "bind",
    "builtin_table",
    "copy_to_host",
    "fill_on_device",
    "implements",
    "is_in_blocks",
    "kernel_builders",
    "kv_cache_shape",
    "latent_width",
    "op",
    "op_report",
    "op_table",
    "ops",
    "replayable",
    "split_latent_cache",
    "swigluoai_and_mul",
    "to_device",
    "torch_device",
    "uniform",
]
