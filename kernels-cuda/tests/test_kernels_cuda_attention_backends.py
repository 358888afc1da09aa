"""Attention by other libraries: torch's on steps; FlashInfer's and FlashAttention's arguments, read as documented."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from kernels_cuda_attention_cases import check

from quire_attention import select_attention_backend
from quire_interfaces import ConfigError
from quire_kernels_cuda import flash_attention, flashinfer_attention
from quire_kernels_cuda.attention_backends import attention_backends
from quire_kernels_cuda.sdpa import paged_attention
from quire_ops import OpRequest, ops

DECODES = [(1, 5), (1, 40), (1, 1)]
PROMPTS = [(17, 17), (12, 25)]
MIXED = [(1, 17), (12, 25), (3, 40), (20, 20), (1, 33)]
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 7},
    "everything": {"sliding_window": 19, "soft_cap": 4.0, "sinks": torch.linspace(-2, 2, 4),
                   "alibi_slopes": torch.logspace(-1, -3, 4)},
}  # fmt: skip


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("lens", [DECODES, PROMPTS, MIXED], ids=["decodes", "prompts", "mixed"])
def test_torch_for_prompts_and_our_kernel_for_decodes(lens: list[tuple[int, int]], features: str) -> None:
    check(paged_attention, lens, heads=(4, 2), **FEATURES[features])


def test_torch_reads_other_dtypes_and_caches() -> None:
    check(paged_attention, MIXED, dtype=torch.bfloat16, heads=(4, 1))
    scale = torch.tensor([[0.02, 0.5], [0.03, 0.01]])
    check(paged_attention, MIXED, cache_dtype="fp8_e4m3", kv_scale=scale)
    check(paged_attention, MIXED, cache_dtype="int8")


def softmax_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """query [q, Hq, D], the last tokens of keys and values [L, Hkv, D]. What both libraries document: a causal mask
    that ends at the lower right corner, `left` tokens seen before a token (-1 for all), a cap of scaled scores, slopes
    times the distance."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * options["scale"]
    if options["cap"]:
        scores = options["cap"] * torch.tanh(scores / options["cap"])
    distance = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
    if options["slopes"] is not None:
        scores -= options["slopes"].double()[:, None, None] * distance.abs()
    hidden = distance < 0
    if options["left"] >= 0:
        hidden |= distance > options["left"]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values).to(query.dtype)


def as_flash_attn_documents(query: torch.Tensor, kv_cache: torch.Tensor, layout: Any, **options: Any) -> torch.Tensor:
    given = flash_attention.arguments(query, kv_cache, layout, **options)
    assert given["causal"]
    assert given["window_size"][1] in (-1, 0)
    assert given["max_seqlen_q"] == given["cu_seqlens_q"].diff().max()
    assert given["max_seqlen_k"] == given["cu_seqlens_k"].diff().max()
    assert given["cu_seqlens_k"].dtype == given["cu_seqlens_q"].dtype == given["block_table"].dtype == torch.int32
    assert given["k"].stride(-1) == given["v"].stride(-1) == given["q"].stride(-1) == 1
    parts = []
    for row, (first, last) in enumerate(zip(given["cu_seqlens_q"][:-1], given["cu_seqlens_q"][1:], strict=True)):
        length = given["cu_seqlens_k"].diff()[row]
        keys, values = (given[name][given["block_table"][row].long()].flatten(0, 1)[:length] for name in "kv")
        facts = {"scale": given["softmax_scale"], "cap": given["softcap"], "left": given["window_size"][0],
                 "slopes": given["alibi_slopes"]}  # fmt: skip
        parts.append(softmax_attention(given["q"][first:last], keys, values, facts))
    return torch.cat(parts)


def as_flashinfer_documents(query: torch.Tensor, kv_cache: torch.Tensor, layout: Any, **options: Any) -> torch.Tensor:
    options = {name: options.get(name) for name in ("scale", "sliding_window", "soft_cap")}
    plan = flashinfer_attention.plan_arguments(query, kv_cache, layout, **options)
    assert plan["causal"]
    assert (plan["num_qo_heads"], plan["head_dim_qk"]) == tuple(query.shape[1:])
    assert kv_cache.shape[1:] == (2, plan["num_kv_heads"], plan["page_size"], plan["head_dim_qk"])  # HND
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    assert {plan[name].dtype for name in names} == {torch.int32}
    parts = []
    for row in range(len(plan["qo_indptr"]) - 1):
        pages = plan["paged_kv_indices"][slice(*plan["paged_kv_indptr"][row : row + 2].tolist())].long()
        length = (len(pages) - 1) * plan["page_size"] + int(plan["paged_kv_last_page_len"][row])
        keys, values = kv_cache[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
        facts = {"scale": plan["sm_scale"], "cap": plan["logits_soft_cap"], "left": plan["window_left"], "slopes": None}
        tokens = query[slice(*plan["qo_indptr"][row : row + 2].tolist())]
        parts.append(softmax_attention(tokens, keys, values, facts))
    return torch.cat(parts)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.skipif(torch.cuda.is_available(), reason="reads arguments on the CPU")
def test_arguments_for_other_libraries_mean_what_the_op_means(block_size: int) -> None:
    slopes = torch.logspace(-1, -3, 4)
    for features in ({}, {"sliding_window": 7}, {"sliding_window": 1}, {"soft_cap": 2.0}):
        check(as_flash_attn_documents, MIXED, block_size=block_size, **features)
        check(as_flashinfer_documents, MIXED, block_size=block_size, **features)
    check(as_flash_attn_documents, MIXED, block_size=block_size, alibi_slopes=slopes)


def test_each_backend_says_what_it_cannot_do() -> None:
    found = {backend.name: backend for backend in attention_backends() if backend.op is ops.paged_attention}
    assert set(found) == {"sdpa", "flashinfer", "flash-attn"}

    def refusal(name: str, **facts: Any) -> str | None:
        present = {field: getattr(found[name], field) for field in found[name].__dataclass_fields__}
        present |= {"unavailable": None, "devices": None}  # where its library is installed, on a GPU
        return type(found[name])(**present).refusal(OpRequest(**{"dtype": torch.bfloat16} | facts))

    assert refusal("sdpa", features=frozenset({"sinks", "alibi"}), cache_dtype="int8") is None
    assert refusal("flashinfer", sizes={"head_dim": 128}, features=frozenset({"soft_cap"})) is None
    assert refusal("flashinfer", sizes={"head_dim": 96}) == "head_dim must be one of 64, 128, 256, is 96"
    assert refusal("flashinfer", features=frozenset({"sinks", "sliding_window"})) == "knows no sinks"
    assert refusal("flashinfer", cache_dtype="fp8_e4m3") == "reads no fp8_e4m3 KV cache"
    assert refusal("flash-attn", features=frozenset({"alibi"}), sizes={"block_size": 256}) is None
    assert refusal("flash-attn", sizes={"block_size": 16}) == "block_size must be a multiple of 256, is 16"
    assert "takes bfloat16, float16, not float32" in str(refusal("flash-attn", dtype=torch.float32))


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is here")
def test_what_is_asked_for_and_missing_is_refused_with_the_reason() -> None:
    request = OpRequest(device="cuda", dtype=torch.bfloat16, sizes={"head_dim": 64, "queries_per_kv_head": 2})
    with pytest.raises(ConfigError, match="flashinfer: flashinfer-python is not installed"):
        select_attention_backend(request, "flashinfer")
