"""Encoders alone: read through Python and planned; parity is verified elsewhere, pooling in test_quire_pooling.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import QuireConfig
from quire.encoder_plan import plan_encoder
from quire_interfaces import ConfigError, RequestError
from quire_models import ModelConfig, load_model
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint


def test_roberta_is_read_as_far_as_its_positions_go(tmp_path: Path) -> None:
    """Its table of positions has two rows that no token takes."""
    case = ENCODER_CASES["RobertaModel"]
    oracle = write_checkpoint(tmp_path, "RobertaModel", case)
    config = ModelConfig.from_path(tmp_path)
    assert config.max_encoder_len == case.fields["max_position_embeddings"] - 2
    network = load_model(config, tmp_path, dtype="float32")
    longest = list(range(3, 150)) + list(range(3, 110))
    assert len(longest) == config.max_encoder_len
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([longest])).last_hidden_state[0]
    short, found = network.read([[7], longest])
    assert short.shape == (1, 64)
    assert torch.allclose(found, expected, atol=1e-4)
    assert network.read([]) == []
    for wrong, message in ([*longest, 5], "input 1 has 255 tokens; give 1 to 254"), ([], "has 0 tokens"), (
        [200], "outside of the vocabulary, 0 to 199"
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            network.read([[7], wrong])


@pytest.mark.parametrize(("architecture", "method"), [("BertModel", "plain"), ("ModernBertModel", "int8")])
def test_the_plan_is_what_is_loaded(architecture: str, method: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, ENCODER_CASES[architecture])
    config = QuireConfig.of(model=str(tmp_path), quantization=None if method == "plain" else method)
    plan = plan_encoder(config, ModelConfig.from_path(tmp_path))
    network = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype=plan.dtype, linear_method=method)
    weights = sum(size for what, size in plan.ledger_bytes.items() if what.startswith("weights"))
    assert weights == pytest.approx(tensor_bytes(network), rel=0.02)
    assert "KV cache" not in plan.ledger_bytes
    with pytest.raises(ConfigError, match="to read 2048 tokens in one pass, but only"):
        plan_encoder(config, ModelConfig.from_path(tmp_path), free_bytes=1000)


def tensor_bytes(root: object) -> int:
    """All that a network keeps, each tensor once."""
    seen: dict[int, int] = {}
    done: set[int] = set()
    todo = [root]
    while todo:
        one = todo.pop()
        if id(one) in done:
            continue
        done.add(id(one))
        if isinstance(one, torch.Tensor):
            seen[one.untyped_storage().data_ptr()] = one.nbytes
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, (list, tuple)):
            todo += one
        elif type(one).__module__.startswith("quire_models"):
            names = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            todo += [getattr(one, name) for name in (*names, *getattr(one, "__dict__", ())) if hasattr(one, name)]
    return sum(seen.values())
