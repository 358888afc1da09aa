"""What one call for all layers saves over calling op by op: decode steps at the shapes of some families.

Run:  python packages/models/benchmarks/one_call.py [--like gemma-3-1b] [--linear-method int4] [--layers 8] [--rounds 7]

Random weights, a vocabulary of 4,096, a context of 128. Both ways take steps by turns in one process; figures are
medians. Beside them: how long the weights that one token needs would take to be read, measured between the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from models_paged_driver import PagedDriver

from quire_models import ModelConfig, build_model
from quire_models.weights import load_dummy_weights

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-v2-small": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 1024,
        "intermediate_size": 2816, "moe_intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
        "q_lora_rank": None, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 0,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
        "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 512,
    },
    "granite-4-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 768,
        "intermediate_size": 2048, "shared_intermediate_size": 2048, "num_local_experts": 0, "num_experts_per_tok": 0,
        "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 32,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "position_embedding_type": "nope",
        "layer_types": ["mamba", "mamba", "mamba", "attention", "mamba", "mamba"], "residual_multiplier": 0.25,
    },
    "granite-3-2b": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0, "logits_scaling": 8.0, "attention_multiplier": 0.015625,
    },
    "lfm2-350m": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 1024, "intermediate_size": 4608,
        "block_auto_adjust_ff_dim": False, "num_attention_heads": 16, "num_key_value_heads": 8,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    },
    "pythia-410m": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 1024,
        "intermediate_size": 4096, "num_attention_heads": 16,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 1024,
        "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
BITS = {"plain": 16.0, "int8": 8.0, "int4": 4.0 + 16 / 128}
CONTEXT, VOCAB = 128, 4096
COMMON = {
    "vocab_size": VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip


def needed_weights(config: ModelConfig, model: Any) -> float:
    """Of the layers, for one token."""
    total = 0.0
    for linear in model.linears:
        share = 1.0
        if ".experts." in linear.name:
            moe = model.config.network.layers[0].feed_forward
            share = moe.routing.top_k / moe.num_experts
        total += share * linear.shape[0] * linear.shape[1]
    return total


def measure(name: str, method: str, layers: int, rounds: int, sequences: int) -> None:
    fields = {**FAMILIES[name], **COMMON, "num_hidden_layers": layers}
    config = ModelConfig.from_dict(fields)
    model: Any = build_model(config, dtype="bfloat16", linear_method=method)
    load_dummy_weights(model)
    stack = model._stack
    if stack is None:
        raise SystemExit(f"{name}: no backend takes the whole stack of layers here (quire ops says why)")
    driver = PagedDriver(model, block_size=16, shuffle=True, num_tokens=sequences * (CONTEXT + 16 * rounds))
    steps = 8 * rounds
    rows = [driver.add([(7 * i + row) % VOCAB for i in range(CONTEXT + 2 * steps + 2)]) for row in range(sequences)]
    for row in rows:
        driver.step((row, CONTEXT))
    memory = torch.ones(512 << 20, dtype=torch.uint8)
    times: dict[str, list[float]] = {"one call": [], "op by op": []}
    reads = []
    for turn in range(rounds):
        for way in ("one call", "op by op") if turn % 2 else ("op by op", "one call"):
            model._stack = stack if way == "one call" else None
            driver.step(*((row, 1) for row in rows))
            for _ in range(7):
                start = time.perf_counter()
                driver.step(*((row, 1) for row in rows))
                times[way].append(time.perf_counter() - start)
        start = time.perf_counter()
        memory.view(torch.int64).sum()
        reads.append(memory.nbytes / (time.perf_counter() - start))
    one, other = (statistics.median(times[way]) * 1e3 for way in ("one call", "op by op"))
    line = f"{name:14s} {method:5s} {sequences} at once, {layers} layers: one call {one:.2f} ms, op by op {other:.2f}"
    line += f" ({other / one:.2f} times)"
    if sequences == 1:
        read = statistics.median(reads)
        limit = needed_weights(config, model) * BITS[method] / 8 / read * 1e3
        line += f"; reading the layers' weights {limit:.2f} ms at {read / 1e9:.1f} GB/s: {limit / one:.0%} of one call"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", choices=FAMILIES, action="append", help="default: all")
    parser.add_argument("--linear-method", choices=BITS, action="append", help="default: int4 and plain")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for name in args.like or FAMILIES:
        for method in args.linear_method or ("int4", "plain"):
            measure(name, method, args.layers, args.rounds, args.sequences)


if __name__ == "__main__":
    main()
