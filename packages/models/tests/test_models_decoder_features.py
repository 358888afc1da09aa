"""What every decoder-only family gets from the framework: additions fused with norms, the argmax in the LM head,
features for EAGLE heads."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from quire_models import DecoderLM, ModelConfig, build_model
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.norm import RMSNorm
from quire_models.weights import load_dummy_weights
from quire_ops import OpBackend, op_table, ops
from quire_ops.backends import replaced_backends
from quire_testkit.parity.dense_cases import DENSE_CASES
from quire_testkit.parity.moe_cases import MOE_CASES
from quire_testkit.parity.recurrent_cases import RECURRENT_CASES
from quire_testkit.parity.situations import Situation, serve

CASES = {**DENSE_CASES, **MOE_CASES, **RECURRENT_CASES}
PROMPT = [5, 9, 31, 7]
WEIGHT_OF = {ops.rms_norm: 1, ops.add_rms_norm: 2, ops.lm_head_argmax: 1}
"""Op -> which of its arguments is the weight."""


class Case(NamedTuple):
    network: DecoderLM
    calls: Counter[tuple[str, int]]
    """(op, address of its weight) -> calls since the network was built."""


@contextmanager
def counted_calls() -> Iterator[Counter[tuple[str, int]]]:
    """Within it, networks are built that count their calls of the ops of `WEIGHT_OF`."""
    calls: Counter[tuple[str, int]] = Counter()

    def counting(backend: OpBackend[..., Any]) -> OpBackend[..., Any]:
        def run(*args: Any) -> Any:
            calls[backend.op.name, args[WEIGHT_OF[backend.op]].data_ptr()] += 1
            return backend.function(*args)

        return dataclasses.replace(backend, function=run)

    with replaced_backends([counting(backend) for op in WEIGHT_OF for backend in op_table().backends(op)]):
        yield calls


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """A tiny network with random weights, whose layers run op by op."""
    case = CASES[request.param]
    fields = getattr(transformers, case.config)(**case.fields).to_dict()
    config = ModelConfig.from_dict({**fields, "architectures": [request.param]}).within(64)
    with counted_calls() as calls:
        network = build_model(config, dtype="float32", attention_backend="torch")
    load_dummy_weights(network)
    network.finish_loading()
    assert isinstance(network, DecoderLM)
    assert not network.in_one_call
    return Case(network, calls)


def has_one_stream(network: DecoderLM) -> bool:
    """Layers add to one residual stream, which the last norm reads."""
    return type(network)._forward is DecoderLM._forward


def test_additions_are_fused_with_the_rms_norms_behind_them(case: Case) -> None:
    """All norms of the residual stream but the first, which stands behind the embedding."""
    network, calls = case
    calls.clear()
    serve(network, Situation(), PROMPT, 1)
    blocks = [layer for layer in network.layers if isinstance(layer, SequentialBlock)]
    norms = [add.norm for block in blocks for add in (block.before_mixer, block.before_feed_forward)]
    norms += [network.norm] if has_one_stream(network) else []
    stream = [norm.weight.data_ptr() for norm in norms if isinstance(norm, RMSNorm)]
    is_first_fused = not blocks or not isinstance(norms[0], RMSNorm)
    apart = [calls["rms_norm", weight] for weight in stream]
    fused = [calls["add_rms_norm", weight] for weight in stream]
    if stream:
        assert apart == [not is_first_fused] + [0] * (len(stream) - 1)
        assert fused == [is_first_fused] + [1] * (len(stream) - 1)


def test_the_head_finds_the_largest_logit(case: Case) -> None:
    network, calls = case
    calls.clear()
    hidden = torch.randn((3, network.config.hidden_size), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        max_logits, token_ids = network.compute_logits(hidden).max(dim=-1)
        found = network.argmax(hidden)
    assert torch.equal(found[0], token_ids)
    assert torch.equal(found[1], max_logits)
    in_head = network.has_fused_argmax and network.lm_head.plain_weight is not None
    assert sum(count for (op, _), count in calls.items() if op == "lm_head_argmax") == in_head


def test_features_are_the_stream_between_layers(case: Case) -> None:
    """The first is what is embedded, and the last one gives the hidden states."""
    network, features = case.network, {}
    if not network.config.network.has_one_stream:
        pytest.skip("heads that read its stream are refused")
    forward = network.forward

    def watched(batch: Any) -> Tensor:
        embedded, num_layers = network.embed(batch.input_ids, batch.positions, batch.lora), network.config.num_layers
        hidden, both = network.forward_with_features(batch, (0, num_layers))
        first, last = both.chunk(2, dim=-1)
        features["embedded"] = (torch.equal if has_one_stream(network) else torch.allclose)(first, embedded)
        features["hidden"] = not has_one_stream(network) or torch.equal(network.norm(last), hidden)
        return hidden

    network.forward = watched  # type: ignore[method-assign]
    serve(network, Situation(), PROMPT, 1)
    network.forward = forward  # type: ignore[method-assign]
    assert features == {"embedded": True, "hidden": True}
