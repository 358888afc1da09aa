"""Networks that draft: tokens stay as they are, and drafts are those of a whole pass, however the text was computed."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_drafting import NUM_DRAFTS, NUM_NODES, SITUATIONS, Engine, requests
from runner_harness import make_request, random_model
from torch import Tensor

from quire_models import DecoderLM, Network, build_model
from quire_models.draft_heads.eagle import EagleHead
from quire_models.draft_heads.eagle_config import EagleConfig, EagleSpec, read_eagle_config
from quire_spec_decode import Draft, paths
from quire_spec_decode.row_drafter import DraftStep

EPS = 1e-5
"""Epsilon of a head's norms."""


@pytest.fixture(scope="module")
def target() -> DecoderLM:
    return random_model("llama")


@pytest.fixture(scope="module")
def alone(target: DecoderLM) -> dict[str, list[int]]:
    return {name: ids for request in requests() for name, ids in Engine(target).run(request).items()}


@pytest.fixture(scope="module")
def other_draft() -> DecoderLM:
    """Another network, whose guesses are mostly wrong; its layers see through windows."""
    return random_model("mistral", num_hidden_layers=2)


def eagle_head(
    target: DecoderLM, *, kind: str = "eagle3", draft_vocab_size: int = 80, speculators: bool = False, **fields: Any
) -> EagleHead:
    sizes = target.config
    values = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_model_len,
        "rope_theta": sizes.rope.theta,
        "rms_norm_eps": EPS,
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
        "torch_dtype": sizes.dtype,
    }
    values |= fields
    if speculators:
        own = {name: values.pop(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
        values = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": kind,
            "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": 3}]},
            "transformer_layer_config": values,
            "target_hidden_size": None,
            "norm_before_residual": True,
            **own,
        }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        config = read_eagle_config(folder, kind)
    head = build_model(config, dtype="float32")
    assert isinstance(head, EagleHead)
    generator = torch.Generator().manual_seed(5)
    for parameter in head.parameters:
        if parameter.name == "d2t" and draft_vocab_size < config.vocab_size:
            chosen = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab_size].sort().values
            parameter.tensor = chosen - torch.arange(draft_vocab_size)
        elif (parameter.name == "lm_head.weight" and kind == "eagle3") or not parameter.optional:
            scale = parameter.shape[-1] ** -0.5 * 1.5 if len(parameter.shape) > 1 else 1.0
            parameter.tensor = torch.randn(parameter.shape, generator=generator) * scale
    head.raw = {parameter.name: parameter.tensor for parameter in head.parameters}  # type: ignore[attr-defined]
    head.finish_loading()
    return head


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("method", ["same", "other", "eagle3", "eagle"])
def test_tokens_are_the_same_in_every_situation(
    method: str, situation: str, target: DecoderLM, other_draft: DecoderLM, alone: dict[str, list[int]]
) -> None:
    if method == "same":
        draft: Network = random_model("llama")
    elif method == "other":
        draft = other_draft
    else:
        draft = eagle_head(target, kind=method, draft_vocab_size=80 if method == "eagle3" else 101)
    engine = Engine(target, draft, **SITUATIONS[situation])
    assert engine.run(*requests()) == alone
    assert engine.scheduler.stats().num_draft_tokens_total > 50
    if situation == "preemption":
        assert engine.scheduler.stats().num_preemptions_total > 0
    engine.executor.close()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["Olmo2ForCausalLM"]},
        {"architectures": ["CohereForCausalLM"], "logit_scale": 0.3},
        {"architectures": ["Gemma2ForCausalLM"], "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9},
    ],
    ids=lambda fields: fields["architectures"][0],
)
def test_heads_draft_for_targets_of_every_kind(fields: dict[str, Any], kind: str) -> None:
    """Norms behind the parts; parts side by side and scaled logits; a scaled embedding and logits with a soft cap."""
    target = random_model("llama", **fields)
    alone = {name: ids for request in requests() for name, ids in Engine(target).run(request).items()}
    draft = eagle_head(target, kind=kind, draft_vocab_size=80 if kind == "eagle3" else 101)
    engine = Engine(target, draft)
    assert engine.run(*requests()) == alone
    assert engine.scheduler.stats().num_draft_tokens_total > 50
    engine.executor.close()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_copy_of_the_target_is_always_right(situation: str, target: DecoderLM) -> None:
    """Greedy drafts of the same network are what the target takes: a wrong one means that it read something else."""
    engine = Engine(target, random_model("llama"), **SITUATIONS[situation])
    greedy = (0.0,) * 5
    engine.run(*requests(greedy))
    assert engine.acceptance == 1.0
    assert all(len(drafts) == NUM_DRAFTS for _, drafts in engine.proposals[:5]) or situation != "together"
    # Prefixes that another request computed, its last tokens among them.
    again = requests(greedy)
    for request in again:
        request.prompt_token_ids = [*request.prompt_token_ids, 1, 2, 3]
        request.request_id += "x"
    engine.run(*again)
    assert situation == "preemption" or engine.scheduler.stats().prefix_cache_hit_tokens_total > 0
    assert engine.acceptance == 1.0


def test_what_was_left_out_is_read_later(target: DecoderLM) -> None:
    """A request that had no drafts for a while (here: its prefix came from an engine's earlier, undrafted life)."""
    engine = Engine(target, random_model("llama"))
    runner = engine.executor
    drafting, runner._drafting = runner._drafting, None
    engine.run(make_request("a", range(1, 40), max_tokens=8))
    runner._drafting = drafting
    engine.run(make_request("b", range(1, 40), max_tokens=12))
    assert engine.scheduler.stats().prefix_cache_hit_tokens_total >= 36
    assert engine.acceptance == 1.0
    assert engine.scheduler.stats().num_accepted_tokens_total >= 8


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_trees_change_no_token(kind: str, situation: str, target: DecoderLM, alone: dict[str, list[int]]) -> None:
    """Sampled and greedy, in trees and, where a request's sampling looks at what came before, in chains."""
    head = eagle_head(target, kind=kind, draft_vocab_size=80 if kind == "eagle3" else 101)
    engine = Engine(target, head, topk=3, **SITUATIONS[situation])
    assert engine.run(*requests()) == alone
    stats = engine.scheduler.stats()
    assert stats.num_draft_tokens_total > 150
    assert all(parents is not None and len(parents) <= NUM_NODES for parents in engine.parents)
    again = requests(repetition_penalty=1.3)
    for request in again:
        request.request_id += "x"
    plain = Engine(target).run(*requests(repetition_penalty=1.3))
    del engine.parents[:]
    assert engine.run(*again) == {f"{name}x": ids for name, ids in plain.items()}
    assert set(map(str, engine.parents)) == {"None"}
    engine.executor.close()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_tree_that_is_always_right(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own tokens are put into random trees, and come through only if each node sees its path, through the
    windows of some layers, too, and what is kept of it moves to its place."""
    model = random_model(family)
    wanted = {name: ids for request in requests() for name, ids in Engine(model).run(request).items()}
    prompts = {request.request_id: len(request.prompt_token_ids) for request in requests()}
    texts = {tuple(r.prompt_token_ids): [*r.prompt_token_ids, *wanted[r.request_id]] for r in requests()}
    engine = Engine(model, eagle_head(model, kind="eagle", draft_vocab_size=model.config.vocab_size), topk=3)
    runner, chooser = engine.executor, random.Random(3)

    def propose(step: DraftStep) -> dict[int, Draft]:
        drafts = {}
        for row, limit in step.limits.items():
            known = list(runner.rows.history(row))
            text = next(text for prompt, text in texts.items() if tuple(known[: len(prompt)]) == prompt)
            draft, parent = Draft([], []), -1
            for token in text[len(known) : len(known) + limit]:
                others = [(token + 1) % 50, (token + 2) % 50]
                nodes = chooser.sample([token, *others], 3)
                draft.token_ids.extend(nodes)
                draft.parents.extend([parent] * 3)  # type: ignore[union-attr]
                parent = len(draft.token_ids) - 3 + nodes.index(token)
            drafts[row] = draft
        return drafts

    monkeypatch.setattr(runner._drafting.drafter, "propose", propose)
    assert engine.run(*requests()) == wanted
    stats = engine.scheduler.stats()
    assert prompts
    assert stats.num_accepted_tokens_total > 0.9 * NUM_DRAFTS * (stats.num_drafts_total - 2 * len(prompts))
    engine.executor.close()


def dense_head(
    head: EagleHead, target: DecoderLM, tokens: list[int], first: int = 0
) -> Callable[[list[int]], dict[int, float]]:
    """The head's definition, in float64, without cache: true features up to the last but one token. Guesses that follow
    the tokens -> token that may come then -> its log probability. It attends to nothing before position `first`."""
    config = head.config
    assert isinstance(config, EagleConfig)
    raw = {name: tensor.double() for name, tensor in head.raw.items() if tensor is not None}  # type: ignore[attr-defined]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * raw[f"{name}.weight"]

    def layer(embedded: Tensor, states: Tensor) -> Tensor:
        eagle3 = config.kind == "eagle3"
        prefix = "midlayer" if eagle3 else "layers.0"
        if eagle3:
            normed = norm(states, f"{prefix}.hidden_norm")
            x = torch.cat((norm(embedded, f"{prefix}.input_layernorm"), normed), -1)
            assert isinstance(config.network, EagleSpec)
            states = normed if config.network.norm_before_residual else states
        else:
            states = x = torch.cat((embedded, states), -1) @ raw["fc.weight"].T
        length, half = len(x), config.head_dim // 2
        angles = torch.arange(length)[:, None] * config.rope.theta ** (-torch.arange(half).double() / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def heads(name: str, rotate: bool) -> Tensor:
            y = (x @ raw[f"{prefix}.self_attn.{name}.weight"].T).view(length, -1, config.head_dim)
            low, high = y[..., :half], y[..., half:]
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1) if rotate else y

        copies = config.num_heads // config.num_kv_heads
        q, k = heads("q_proj", True), heads("k_proj", True).repeat_interleave(copies, 1)
        v = heads("v_proj", False).repeat_interleave(copies, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        hidden = torch.ones(length, length).triu(1).bool()
        hidden[first:, :first] = True
        scores = scores.masked_fill(hidden, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        states = states + mixed @ raw[f"{prefix}.self_attn.o_proj.weight"].T
        y = norm(states, f"{prefix}.post_attention_layernorm")
        gate, up = y @ raw[f"{prefix}.mlp.gate_proj.weight"].T, y @ raw[f"{prefix}.mlp.up_proj.weight"].T
        return states + (torch.nn.functional.silu(gate) * up) @ raw[f"{prefix}.mlp.down_proj.weight"].T

    features = whole_features(target, tokens[:-1], config)
    states = features @ raw["fc.weight"].T if config.kind == "eagle3" else features
    embedding = target.embedding.part(None).double()

    def behind(guesses: list[int]) -> dict[int, float]:
        known = states
        for count in range(len(guesses) + 1):
            out = layer(embedding[[*tokens[1:], *guesses[:count]]], known)
            known = torch.cat((known, out[-1:]))
        if config.kind == "eagle3":
            logits, offsets = norm(out[-1], "norm") @ raw["lm_head.weight"].T, raw["d2t"].long()
        else:
            logits, offsets = target.compute_logits(out[-1:].float())[0].double(), torch.zeros(config.vocab_size).long()
        ids = torch.arange(len(logits)) + offsets
        return dict(zip(ids.tolist(), logits.log_softmax(-1).tolist(), strict=True))

    return behind


def dense_drafts(head: EagleHead, target: DecoderLM, tokens: list[int], count: int, first: int = 0) -> list[int]:
    behind, drafts = dense_head(head, target, tokens, first), list[int]()
    for _ in range(count):
        found = behind(drafts)
        drafts.append(max(found, key=found.__getitem__))
    return drafts


def dense_tree(
    head: EagleHead, target: DecoderLM, tokens: list[int], topk: int, first: int = 0
) -> set[tuple[int, ...]]:
    """The paths of the tree that EAGLE-2 grows and ranks (arXiv:2406.16858, sections 4.1 and 4.2)."""
    behind = dense_head(head, target, tokens, first)
    values: dict[tuple[int, ...], float] = {(): 0.0}
    layer: list[tuple[int, ...]] = [()]
    for _ in range(NUM_DRAFTS):
        grown = {}
        for path in layer:
            found = behind(list(path))
            for token in sorted(found, key=lambda token: -found[token])[:topk]:
                grown[*path, token] = values[path] + found[token]
        values |= grown
        layer = sorted(grown, key=lambda path: -grown[path])[:topk]
    del values[()]
    return set(sorted(values, key=lambda path: -values[path])[:NUM_NODES])


def whole_features(target: DecoderLM, tokens: list[int], config: EagleConfig) -> Tensor:
    """Features of a whole text in one pass, through a runner that shows them."""
    seen: dict[str, Tensor] = {}
    forward = target.forward_with_features

    def spy(batch: Any, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        hidden, features = forward(batch, layers)
        seen["features"] = (features if config.kind == "eagle3" else hidden).double()
        return hidden, features

    engine = Engine(target, eagle_head(target), budget=128)
    runner = engine.executor
    runner._drafting.drafter.feature_layers = config.feature_layers or (0,)
    target.forward_with_features = spy  # type: ignore[method-assign]
    try:
        engine.run(make_request("one", tokens, max_tokens=1))
    finally:
        del target.forward_with_features
    return seen["features"]


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "speculators"])
@pytest.mark.parametrize("situation", ["together", "chunks of prompts"])
def test_drafts_of_a_head_are_those_of_a_whole_pass(kind: str, situation: str, target: DecoderLM) -> None:
    if kind == "speculators":
        head = eagle_head(target, speculators=True)
    else:
        head = eagle_head(target, kind=kind, draft_vocab_size=80 if kind == "eagle3" else 101)
    engine = Engine(target, head, **SITUATIONS[situation])
    engine.run(*requests((0.0, 0.8, 0.0)))
    checked = engine.proposals[:: max(1, len(engine.proposals) // 6)]
    for tokens, drafts in checked:
        assert drafts == dense_drafts(head, target, tokens, len(drafts))
    assert len(checked) >= 5
    engine.executor.close()


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_trees_of_a_head_are_those_of_whole_passes(kind: str, target: DecoderLM) -> None:
    head = eagle_head(target, kind=kind, draft_vocab_size=80 if kind == "eagle3" else 101)
    engine = Engine(target, head, topk=3)
    engine.run(*requests((0.0, 0.8, 0.0)))
    found = list(zip(engine.proposals, engine.parents, strict=True))
    checked = found[:: max(1, len(found) // 6)]
    for (tokens, drafts), parents in checked:
        assert parents is not None
        nodes = {tuple(drafts[i] for i in path) for path in paths(parents)}
        assert nodes == dense_tree(head, target, tokens, 3)
    assert len(checked) >= 5
    engine.executor.close()


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_head_sees_what_follows_the_features_that_it_missed(kind: str, topk: int, target: DecoderLM) -> None:
    """Of a prefix that was cached while drafting rested, beside one that it read, and where drafting begins amid a text
    the next block."""
    head = eagle_head(target, kind=kind, draft_vocab_size=80 if kind == "eagle3" else 101)
    engine = Engine(target, head, topk=topk)
    pace = engine.executor._drafting
    pace._length = 0
    engine.run(make_request("a", range(1, 40), max_tokens=4))
    pace._length = NUM_DRAFTS
    prompts = {"b": [*range(1, 37), 50, 51, 52, 53, 54], "c": list(range(60, 80))}
    found = engine.run(*(make_request(name, ids, max_tokens=8) for name, ids in prompts.items()))
    assert engine.scheduler.stats().prefix_cache_hit_tokens_total == 36
    check(engine, head, target, topk, {1: 36, 60: 0})
    assert found == Engine(target).run(*(make_request(name, ids, max_tokens=8) for name, ids in prompts.items()))

    engine.proposals.clear()
    engine.parents.clear()
    request, pace._length = make_request("d", range(20, 39), max_tokens=16), 0
    engine.scheduler.add_request(request)
    while engine.scheduler.has_requests():
        output = engine.scheduler.schedule()
        assert output is not None
        result = engine.executor.execute(output).result(timeout=60)
        engine.scheduler.update(output, result)
        if result.draft_token_ids and not request.is_finished:
            engine.proposals.append((request.prompt_token_ids + request.output_token_ids, result.draft_token_ids[0]))
            engine.parents.append(result.draft_parents.get(0))
        if len(request.output_token_ids) == 3:  # the next step computes position 21
            pace._length = NUM_DRAFTS
    assert len(engine.proposals[0][0]) == 26
    check(engine, head, target, topk, {20: 24})
    engine.executor.close()


def check(engine: Engine, head: EagleHead, target: DecoderLM, topk: int, firsts: dict[int, int]) -> None:
    """Proposals are those of whole passes over what follows the position that is given for a text's first token."""
    seen = set()
    for (tokens, drafts), parents in zip(engine.proposals, engine.parents, strict=True):
        first = firsts[tokens[0]]
        seen.add(tokens[0])
        if topk == 1:
            assert drafts == dense_drafts(head, target, tokens, len(drafts), first)
        else:
            assert parents is not None
            assert {tuple(drafts[i] for i in path) for path in paths(parents)} == dense_tree(
                head, target, tokens, topk, first
            )
    assert seen == set(firsts)
