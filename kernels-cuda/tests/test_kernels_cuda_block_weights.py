"""GGUF files on a GPU's kernels: kept in blocks, embedding and experts too, with the logits of Transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_cuda_support import DEVICE
from models_gguf_writer import write_gguf
from models_quantized import logits_of
from test_models_gguf import bytes_of, random_model

from quire_kernels_cuda.ops import backends
from quire_models import DecoderLM, ModelConfig, load_model, resolve_model
from quire_models.gguf.header import read_header
from quire_models.ledger import weight_ledger
from quire_models.quantization_config import BLOCK_BYTES, GRID_TYPES
from quire_ops import builtin_table
from quire_ops.block_formats import format_in_planes

TOKENS = [5, 9, 200, 31, 7, 7, 100]
SERVED = ("block_linear", "quantized_embedding", "fused_moe")
PLACES = ("quire_ops.backends", "quire_models.layers.scope", "quire_quantization.kernels")


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops that read blocks, on Triton, which is not the first choice where it is interpreted."""
    table = builtin_table()
    for backend in backends():
        if backend.op.name in SERVED:
            table.add(dataclasses.replace(backend, priority=20))
    for place in PLACES:
        monkeypatch.setattr(f"{place}.op_table", lambda: table)


def load(folder: Path, family: str, kind_of: Any, **sizes: Any) -> tuple[DecoderLM, Any, int]:
    """(the network, Transformers' with what the file says, bytes of the file's tensors)."""
    sizes = {"vocab_size": 256, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 1, **sizes}
    oracle = random_model(family, **sizes)
    file = folder / "model.gguf"
    write_gguf(file, oracle, family, kind_of)
    made = resolve_model(file)
    network = load_model(ModelConfig.from_path(made), made, dtype="float32", device=DEVICE)
    assert isinstance(network, DecoderLM)
    return network, oracle, sum(tensor.num_bytes for tensor in read_header(file).tensors.values())


def check_logits(network: DecoderLM, oracle: Any) -> None:
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    got = logits_of(network, TOKENS).cpu()
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()


def formats_of(network: DecoderLM) -> set[str | None]:
    weights = [layer.stack_weights() for layer in network.linears]
    return {format_in_planes(one.scale) for one in weights if one is not None and one.scale is not None}


def test_a_network_stays_in_blocks(tmp_path: Path) -> None:
    kinds = {"attn_k": "Q6_K", "ffn_up": "IQ4_XS"}

    def kind_of(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "Q4_K")

    network, oracle, stored = load(tmp_path, "qwen3", kind_of, intermediate_size=256)
    assert {"Q4_K", "Q6_K", "IQ4_XS"} <= formats_of(network)
    kept = bytes_of([network.embedding, network.layers, network._lm_head])
    assert kept <= 1.1 * stored
    ledger = weight_ledger(network.config, "float32", in_blocks=frozenset(BLOCK_BYTES) - GRID_TYPES)
    assert sum(ledger.values()) == pytest.approx(kept, rel=0.02)
    check_logits(network, oracle)


def test_experts_stay_in_blocks(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}

    def kind_of(name: str) -> str:
        return "MXFP4" if "ffn_down_exps" in name else "Q4_K"

    network, oracle, _ = load(tmp_path, "qwen3moe", kind_of, **sizes)
    assert network.expert_methods == "fused_moe for 1"
    check_logits(network, oracle)


def test_gate_and_up_of_two_formats_run_expert_by_expert(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 256, "num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 256}
    network, _, _ = load(tmp_path, "qwen3moe", lambda name: "Q6_K" if "ffn_up_exps" in name else "Q4_K", **sizes)
    assert network.expert_methods.startswith("each_expert (fused_moe: takes gate and up in blocks of one format, not")


def test_grids_are_widened(tmp_path: Path) -> None:
    network, oracle, _ = load(
        tmp_path, "qwen3", lambda name: "IQ2_XS" if "ffn" in name else "Q4_K", intermediate_size=256
    )
    assert "linear for" in network.linear_kernels
    assert formats_of(network) == {"Q4_K"}
    check_logits(network, oracle)
