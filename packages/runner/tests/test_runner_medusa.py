"""Medusa heads: tokens stay as they are, and drafts are what the published layout means."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_drafting import NUM_DRAFTS, NUM_NODES, SITUATIONS, Engine, requests
from runner_harness import make_request, random_model
from safetensors.torch import save_file
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models import DecoderLM, load_model
from quire_models.draft_heads.medusa import MedusaHeads
from quire_models.draft_heads.medusa_config import read_medusa_config
from quire_spec_decode import paths

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def target() -> DecoderLM:
    return random_model("llama")


@pytest.fixture(scope="module")
def alone(target: DecoderLM) -> dict[str, list[int]]:
    return Engine(target).run(*requests())


def random_heads(target: DecoderLM) -> dict[str, Tensor]:
    """In the published layout."""
    size, vocab = target.config.hidden_size, target.config.vocab_size
    generator = torch.Generator().manual_seed(8)
    tensors = {}
    for i in range(NUM_DRAFTS):
        for layer in range(NUM_LAYERS):
            tensors[f"{i}.{layer}.linear.weight"] = torch.randn(size, size, generator=generator) * size**-0.5
            tensors[f"{i}.{layer}.linear.bias"] = torch.randn(size, generator=generator)
        tensors[f"{i}.{NUM_LAYERS}.weight"] = torch.randn(vocab, size, generator=generator) * size**-0.5
    return tensors


def load_heads(folder: Path, target: DecoderLM, tensors: dict[str, Tensor], fields: dict[str, Any]) -> MedusaHeads:
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    heads = load_model(read_medusa_config(folder, target.config), folder, dtype="float32")
    assert isinstance(heads, MedusaHeads)
    return heads


def of_head(raw: dict[str, Tensor], hidden: Tensor, head: int) -> Tensor:
    """Log probabilities, in float64."""
    x = hidden.double()
    for layer in range(NUM_LAYERS):
        name = f"{head}.{layer}.linear"
        x = x + torch.nn.functional.silu(raw[f"{name}.weight"].double() @ x + raw[f"{name}.bias"].double())
    return (raw[f"{head}.{NUM_LAYERS}.weight"].double() @ x).log_softmax(-1)


def hidden_of(target: DecoderLM, tokens: list[int]) -> Tensor:
    """States of a whole text in one pass."""
    seen: list[Tensor] = []
    forward = target.forward

    def spy(batch: Any) -> Tensor:
        seen.append(forward(batch).clone())
        return seen[-1]

    target.forward = spy  # type: ignore[method-assign]
    try:
        Engine(target, budget=128).run(make_request("one", tokens, max_tokens=1))
    finally:
        del target.forward
    return seen[0]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_are_those_of_the_heads(
    situation: str, topk: int, tmp_path: Path, target: DecoderLM, alone: dict[str, list[int]]
) -> None:
    raw = random_heads(target)
    fields = {"medusa_num_heads": NUM_DRAFTS, "medusa_num_layers": NUM_LAYERS}
    engine = Engine(target, load_heads(tmp_path, target, raw, fields), topk=topk, **SITUATIONS[situation])
    assert engine.run(*requests()) == alone
    assert engine.scheduler.stats().num_draft_tokens_total > 50
    found = list(zip(engine.proposals, engine.parents, strict=True))
    for (tokens, drafts), parents in found[:: max(1, len(found) // 5)]:
        hidden = hidden_of(target, tokens)[len(tokens) - 2]
        scores = [of_head(raw, hidden, head) for head in range(NUM_DRAFTS)]
        if parents is None:
            assert drafts == [int(each.argmax()) for each in scores[: len(drafts)]]
            continue
        best = [each.topk(topk) for each in scores]
        likely = {
            tuple(int(best[i].indices[place]) for i, place in enumerate(places)): sum(
                float(best[i].values[place]) for i, place in enumerate(places)
            )
            for depth in range(1, NUM_DRAFTS + 1)
            for places in itertools.product(range(topk), repeat=depth)
        }
        nodes = {tuple(drafts[i] for i in path) for path in paths(parents)}
        if len(nodes) == NUM_NODES:  # fewer near the end of the text
            assert nodes == set(sorted(likely, key=lambda path: -likely[path])[:NUM_NODES])
    engine.executor.close()


def test_converted_heads_are_the_same(tmp_path: Path, target: DecoderLM) -> None:
    raw, states = random_heads(target), torch.randn(5, target.config.hidden_size)
    for name in raw:
        if name.endswith("bias"):
            raw[name] = torch.zeros_like(raw[name])
    renamed = {}
    for name, tensor in raw.items():
        head, layer, *rest = name.split(".")
        if rest == ["weight"]:
            renamed[f"lm_heads.{head}.weight"] = tensor
        elif rest[-1] == "weight":
            renamed[f"blocks.{head}.layers.{layer}.weight"] = tensor
    converted = load_heads(tmp_path, target, renamed, {"num_heads": NUM_DRAFTS, "num_hidden_layers": NUM_LAYERS})
    fields = {"medusa_num_heads": NUM_DRAFTS, "medusa_num_layers": NUM_LAYERS}
    within = {f"medusa_head.{name}": tensor for name, tensor in raw.items()}
    published = load_heads(tmp_path, target, within, fields)
    for head in range(NUM_DRAFTS):
        ours, theirs = published.top(states, head, 4), converted.top(states, head, 4)
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[0], theirs[0])
        for i, state in enumerate(states):
            expected = of_head(raw, state, head).topk(4)
            assert ours[1][i].tolist() == expected.indices.tolist()
            assert (ours[0][i] - expected.values).abs().max() < 1e-4


def test_heads_of_another_model_are_refused(tmp_path: Path, target: DecoderLM) -> None:
    with pytest.raises(CheckpointError, match="no folder of Medusa heads"):
        read_medusa_config(tmp_path, target.config)
    for fields, why in (
        ({"num_hidden_layers": 1}, "num_heads"),
        ({"num_heads": 2, "vocab_size": 77}, "whose vocab_size is 77"),
        ({"num_heads": 2, "truncated_vocab_size": 50}, "part of the vocabulary"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(CheckpointError, match=why):
            read_medusa_config(tmp_path, target.config)
