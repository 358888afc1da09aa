"""MLP speculators: tokens stay as they are, and drafts are what the published layout means."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_drafting import NUM_DRAFTS, SITUATIONS, Engine, requests
from runner_harness import random_model
from safetensors.torch import save_file
from test_runner_medusa import hidden_of
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models import DecoderLM, load_model
from quire_models.draft_heads.mlp_speculator import MLPSpeculator
from quire_models.draft_heads.mlp_speculator_config import read_mlp_speculator_config

INNER = 24


@pytest.fixture(scope="module")
def target() -> DecoderLM:
    return random_model("llama")


@pytest.fixture(scope="module")
def alone(target: DecoderLM) -> dict[str, list[int]]:
    return Engine(target).run(*requests())


def fields_of(target: DecoderLM, **more: Any) -> dict[str, Any]:
    """A config.json as IBM's checkpoints have it."""
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": target.config.vocab_size,
        "emb_dim": target.config.hidden_size,
        "inner_dim": INNER,
        "n_predict": NUM_DRAFTS,
        "top_k_tokens_per_head": [4, 3, 2],
        "n_candidates": 5,
        **more,
    }


def random_tensors(target: DecoderLM, *, tied: bool) -> dict[str, Tensor]:
    """In the published layout; tied heads are written under the name of each."""
    size, vocab = target.config.hidden_size, target.config.vocab_size
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for i in range(NUM_DRAFTS):
        shapes = {"emb": (vocab, INNER), "head": (vocab, INNER), "proj": (INNER, INNER if i else size)}
        own = {f"{part}.{i}.weight": torch.randn(shape, generator=generator) for part, shape in shapes.items()}
        own |= {f"ln.{i}.{part}": torch.randn(INNER, generator=generator) for part in ("weight", "bias")}
        for name, tensor in own.items():
            first = f"{name.split('.')[0]}.{int(name.startswith('proj'))}.{name.split('.')[2]}"
            copied = tied and i > int(name.startswith("proj"))
            tensors[f"speculator.{name}"] = tensors[f"speculator.{first}"].clone() if copied else tensor
    return tensors


def load(folder: Path, target: DecoderLM, tensors: dict[str, Tensor], fields: dict[str, Any]) -> MLPSpeculator:
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    heads = load_model(read_mlp_speculator_config(folder, target.config), folder, dtype="float32")
    assert isinstance(heads, MLPSpeculator)
    return heads


def dense_drafts(raw: dict[str, Tensor], state: Tensor, token: int, count: int, *, scaled: bool) -> list[int]:
    """The definition in float64: IBM's fms-extras, `MLPSpeculator`."""

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    share = 0.5 ** (0.5 / NUM_DRAFTS)
    weight = math.sqrt((1 - share**2) * INNER / 2) / share
    state = normed(state.double()) / math.sqrt(2) if scaled else state.double()
    drafts = []
    for i in range(count):
        of = {name.removeprefix("speculator."): tensor.double() for name, tensor in raw.items() if f".{i}." in name}
        state = of[f"proj.{i}.weight"] @ state + weight * of[f"emb.{i}.weight"][token]
        x = normed(state) * of[f"ln.{i}.weight"] + of[f"ln.{i}.bias"]
        state = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        token = int((of[f"head.{i}.weight"] @ state).argmax())
        drafts.append(token)
    return drafts


@pytest.mark.parametrize(("situation", "tied", "scaled"), [
    ("together", False, False), ("chunks of prompts", True, True), ("asynchronous", False, True),
    ("preemption", True, False),
])  # fmt: skip
def test_drafts_are_those_of_the_heads(
    situation: str, tied: bool, scaled: bool, tmp_path: Path, target: DecoderLM, alone: dict[str, list[int]]
) -> None:
    raw = random_tensors(target, tied=tied)
    heads = load(tmp_path, target, raw, fields_of(target, tie_weights=tied, scale_input=scaled))
    engine = Engine(target, heads, **SITUATIONS[situation])
    assert engine.run(*requests()) == alone
    assert engine.scheduler.stats().num_draft_tokens_total > 50
    for tokens, drafts in engine.proposals[:: max(1, len(engine.proposals) // 6)]:
        state = hidden_of(target, tokens)[len(tokens) - 2]
        assert drafts == dense_drafts(raw, state, tokens[-1], len(drafts), scaled=scaled)
    engine.executor.close()


def test_tied_heads_are_stored_once(tmp_path: Path, target: DecoderLM) -> None:
    """A file with the first of the tied heads is the same as one with all of them, and weighs what the plan says."""
    raw = random_tensors(target, tied=True)
    fields = fields_of(target, tie_weights=True)
    states, tokens = torch.randn(4, target.config.hidden_size), torch.tensor([5, 9, 0, 77])
    expected = load(tmp_path, target, raw, fields).draft(states, tokens, 3)
    once = {name: tensor for name, tensor in raw.items() if ".0." in name or name == "speculator.proj.1.weight"}
    assert torch.equal(load(tmp_path, target, once, fields).draft(states, tokens, 3), expected)
    config = read_mlp_speculator_config(tmp_path, target.config)
    assert config.weight_bytes("float32") == sum(tensor.nbytes for tensor in once.values())
    (tmp_path / "config.json").write_text(json.dumps(fields_of(target)))
    config = read_mlp_speculator_config(tmp_path, target.config)
    assert config.weight_bytes("float32") == sum(tensor.nbytes for tensor in raw.values())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"vocab_size": 77}, "whose vocabulary is 77"),
        ({"emb_dim": 8}, "whose hidden size is 8"),
        ({"n_predict": 0}, "n_predict"),
        ({"architectures": ["ArcticMLPSpeculatorPreTrainedModel"], "model_type": "arctic"}, "not the configuration of"),
    ],
)
def test_what_does_not_belong_to_the_model_is_refused(
    fields: dict[str, Any], why: str, tmp_path: Path, target: DecoderLM
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields_of(target, **fields)))
    with pytest.raises(CheckpointError, match=why):
        read_mlp_speculator_config(tmp_path, target.config)
