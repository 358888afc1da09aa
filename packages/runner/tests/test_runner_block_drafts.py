"""Drafts that come from one pass, P-EAGLE's and DFlash's: tokens stay as they are, and drafts are those of the
published networks, computed in float64 without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runner_drafting import NUM_DRAFTS, SITUATIONS, Engine, requests
from runner_harness import make_request, random_model
from safetensors.torch import save_file
from test_runner_draft_networks import EPS, whole_features
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models import DecoderLM, load_model
from quire_models.draft_heads.dflash_config import read_dflash_config
from quire_models.draft_heads.eagle import EagleHead
from quire_models.draft_heads.eagle_config import EagleConfig, read_eagle_config

LAYERS = (1, 2)
"""Layers of the target whose input is read."""
MASK = 99
INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 24, 4, 2, 8, 80


@pytest.fixture(scope="module")
def target() -> DecoderLM:
    return random_model("llama")


@pytest.fixture(scope="module")
def alone(target: DecoderLM) -> dict[str, list[int]]:
    return Engine(target).run(*requests())


def fields_of(kind: str, target: DecoderLM) -> dict[str, Any]:
    """A config.json: "peagle" and "dflash" as the original checkpoints have it, "... speculators" in that format."""
    layer = {
        "vocab_size": target.config.vocab_size, "hidden_size": target.config.hidden_size, "intermediate_size": INNER,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "rms_norm_eps": EPS, "rope_theta": 10000.0, "torch_dtype": "float32",
    }  # fmt: skip
    name = kind.split()[0]
    if "speculators" in kind:
        own = {"aux_hidden_state_layer_ids": list(LAYERS)} if name == "dflash" else {
            "eagle_aux_hidden_state_layer_ids": list(LAYERS), "draft_vocab_size": DRAFT_VOCAB
        }  # fmt: skip
        own |= {"mask_token_id": MASK, "speculators_model_type": name, "transformer_layer_config": layer}
        return own | ({"block_size": 8} if name == "dflash" else {})
    if name == "dflash":
        outputs = [layer - 1 for layer in LAYERS]
        own = {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": outputs}, "block_size": 8}
        return {**layer, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **own}
    own = {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "ptd_token_id": MASK, "draft_vocab_size": DRAFT_VOCAB}
    return {**layer, "architectures": ["LlamaForCausalLMEagle3"], **own}


def random_tensors(kind: str, target: DecoderLM) -> dict[str, Tensor]:
    """In the published layout."""
    size, vocab, generator = target.config.hidden_size, target.config.vocab_size, torch.Generator().manual_seed(4)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    def norm(width: int = size) -> Tensor:
        return 1 + 0.3 * torch.randn(width, generator=generator)

    is_dflash = kind.startswith("dflash")
    tensors = {"fc.weight": matrix(size, len(LAYERS) * size), "norm.weight": norm()}
    for i in range(2):
        inputs = size if is_dflash or i else 2 * size
        layer = {
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, inputs),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, inputs),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, inputs),
            "self_attn.o_proj": matrix(size, HEADS * HEAD_DIM),
            "mlp.gate_proj": matrix(INNER, size), "mlp.up_proj": matrix(INNER, size),
            "mlp.down_proj": matrix(size, INNER), "input_layernorm": norm(), "post_attention_layernorm": norm(),
        }  # fmt: skip
        if is_dflash:
            layer |= {"self_attn.q_norm": norm(HEAD_DIM), "self_attn.k_norm": norm(HEAD_DIM)}
        elif i == 0:
            layer["hidden_norm"] = norm()
        tensors |= {f"layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    if is_dflash:
        return {**tensors, "hidden_norm.weight": norm()}
    chosen = torch.randperm(vocab, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors["mask_hidden"] = torch.randn(1, 1, len(LAYERS) * size, generator=generator)
    return {**tensors, "lm_head.weight": matrix(DRAFT_VOCAB, size), "d2t": chosen - torch.arange(DRAFT_VOCAB)}


def load(folder: Path, kind: str, target: DecoderLM, **changes: Any) -> tuple[EagleHead, dict[str, Tensor]]:
    raw = random_tensors(kind, target)
    (folder / "config.json").write_text(json.dumps(fields_of(kind, target) | changes))
    save_file(raw, folder / "model.safetensors")
    config = read_dflash_config(folder) if kind.startswith("dflash") else read_eagle_config(folder, "eagle3")
    head = load_model(config, folder, dtype="float32")
    assert isinstance(head, EagleHead)
    return head, {name: tensor.double() for name, tensor in raw.items()}


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def attended(raw: dict[str, Tensor], prefix: str, x: Tensor, context: Tensor, *, first: int, causal: bool) -> Tensor:
    """Attention of x [Q, ...], whose positions begin behind those of context [C, ...]; keys are of both, of positions
    from `first` on."""
    whole, half = torch.cat((context, x)), HEAD_DIM // 2
    angles = torch.arange(len(whole))[:, None] * 10000.0 ** (-torch.arange(half).double() / half)

    def heads(name: str, of: Tensor) -> Tensor:
        y = (of @ raw[f"{prefix}.{name}_proj.weight"].T).view(len(of), -1, HEAD_DIM)
        if name == "v":
            return y
        if f"{prefix}.{name}_norm.weight" in raw:
            y = normed(y, raw[f"{prefix}.{name}_norm.weight"])
        cos, sin = (table[-len(of) :, None] for table in (angles.cos(), angles.sin()))
        low, high = y.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    q = heads("q", x)
    k, v = (heads(name, whole).repeat_interleave(HEADS // KV_HEADS, 1) for name in "kv")
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    places, own = torch.arange(len(whole)), torch.arange(len(context), len(whole))
    seen = (places >= first).expand(len(x), -1)
    if causal:
        seen = seen & (places <= own[:, None])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ raw[f"{prefix}.o_proj.weight"].T


def after_mlp(raw: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    y = normed(x, raw[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = y @ raw[f"{prefix}.mlp.gate_proj.weight"].T, y @ raw[f"{prefix}.mlp.up_proj.weight"].T
    return x + (torch.nn.functional.silu(gate) * up) @ raw[f"{prefix}.mlp.down_proj.weight"].T


def dense_drafts(
    kind: str, raw: dict[str, Tensor], target: DecoderLM, tokens: list[int], count: int, first: int = 0
) -> list[int]:
    """The published network in one pass; it sees nothing before position `first`."""
    features: Any = whole_features(target, tokens[:-1], SimpleNamespace(kind="eagle3", feature_layers=LAYERS))  # type: ignore[arg-type]
    embedding = target.embedding.part(None).double()
    if kind.startswith("dflash"):
        context = normed(features @ raw["fc.weight"].T, raw["hidden_norm.weight"])
        x = embedding[[tokens[-1], *[MASK] * count]]
        for i in range(2):
            y = normed(x, raw[f"layers.{i}.input_layernorm.weight"])
            x = x + attended(raw, f"layers.{i}.self_attn", y, context, first=first, causal=False)
            x = after_mlp(raw, f"layers.{i}", x)
        x = normed(x, raw["norm.weight"])[1:]
        return target.compute_logits(x.float()).argmax(-1).tolist()
    masked = raw["mask_hidden"].view(1, -1).expand(count - 1, -1)
    x = torch.cat((features, masked)) @ raw["fc.weight"].T
    embedded = embedding[[*tokens[1:], *[MASK] * (count - 1)]]
    for i in range(2):
        name, y = f"layers.{i}", x
        if i == 0:
            y = torch.cat((
                normed(embedded, raw[f"{name}.input_layernorm.weight"]), normed(x, raw[f"{name}.hidden_norm.weight"])
            ), -1)  # fmt: skip
        else:
            y = normed(x, raw[f"{name}.input_layernorm.weight"])
        x = x + attended(raw, f"{name}.self_attn", y, torch.empty(0, y.shape[1]), first=first, causal=True)
        x = after_mlp(raw, name, x)
    ids = (normed(x[-count:], raw["norm.weight"]) @ raw["lm_head.weight"].T).argmax(-1)
    return (ids + raw["d2t"].long()[ids]).tolist()


@pytest.mark.parametrize(
    ("kind", "situation"),
    [
        *((kind, situation) for kind in ("peagle", "dflash") for situation in SITUATIONS),
        ("peagle speculators", "together"),
        ("dflash speculators", "together"),
    ],
)
def test_drafts_are_those_of_one_whole_pass(
    kind: str, situation: str, tmp_path: Path, target: DecoderLM, alone: dict[str, list[int]]
) -> None:
    head, raw = load(tmp_path, kind, target)
    engine = Engine(target, head, **SITUATIONS[situation])
    assert engine.run(*requests()) == alone
    assert engine.scheduler.stats().num_draft_tokens_total > 50
    if situation == "preemption":
        assert engine.scheduler.stats().num_preemptions_total > 0
    else:
        checked = engine.proposals[:: max(1, len(engine.proposals) // 6)]
        assert max(len(drafts) for _, drafts in checked) == NUM_DRAFTS
        for tokens, drafts in checked:
            assert drafts == dense_drafts(kind, raw, target, tokens, len(drafts))
    engine.executor.close()


@pytest.mark.parametrize("kind", ["peagle", "dflash"])
def test_it_sees_what_follows_the_features_that_it_missed(kind: str, tmp_path: Path, target: DecoderLM) -> None:
    head, raw = load(tmp_path, kind, target)
    engine = Engine(target, head)
    pace = engine.executor._drafting  # type: ignore[attr-defined]
    pace._length = 0
    engine.run(make_request("a", range(1, 40), max_tokens=4))
    pace._length = NUM_DRAFTS
    prompt = [*range(1, 37), 50, 51, 52]
    engine.run(make_request("b", prompt, max_tokens=8), make_request("c", range(60, 80), max_tokens=8))
    assert engine.scheduler.stats().prefix_cache_hit_tokens_total == 36
    assert {tokens[0] for tokens, _ in engine.proposals} == {1, 60}
    for tokens, drafts in engine.proposals:
        assert drafts == dense_drafts(kind, raw, target, tokens, len(drafts), 36 if tokens[0] == 1 else 0)
    engine.executor.close()


def test_a_parallel_head_may_draft_one_after_another(
    tmp_path: Path, target: DecoderLM, alone: dict[str, list[int]]
) -> None:
    head, raw = load(tmp_path, "peagle", target, ptd_token_id=None)
    assert not head.is_parallel
    engine = Engine(target, head)
    assert engine.run(*requests()) == alone
    for tokens, drafts in engine.proposals[::9]:
        assert drafts[0] == dense_drafts("peagle", raw, target, tokens, 1)[0]
    engine.executor.close()


def test_what_is_not_known_is_refused(tmp_path: Path, target: DecoderLM) -> None:
    for changes, why in (
        ({"use_sliding_window": True}, "within windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "within windows"),
        ({"dflash_config": {"mask_token_id": 9}}, "names no layers"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
    ):
        with pytest.raises(CheckpointError, match=why):
            load(tmp_path, "dflash", target, **changes)
    raw = random_tensors("peagle", target)
    del raw["mask_hidden"]
    (tmp_path / "config.json").write_text(json.dumps(fields_of("peagle", target)))
    save_file(raw, tmp_path / "model.safetensors")
    config = read_eagle_config(tmp_path, "eagle3")
    assert isinstance(config, EagleConfig)
    with pytest.raises(CheckpointError, match="has no mask_hidden"):
        load_model(config, tmp_path, dtype="float32")
