"""Encoders in one call: which networks get it, and that it gives what they give layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire_models import ModelConfig, load_model
from quire_models.layers.encoder_only import EncoderOnly
from quire_ops import OpRequest, op_report
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint

SERVED = op_report(OpRequest(sizes={"head_dim": 64}))
IS_SERVED = any(choice.op == "encoder_stack" and choice.backend != "reference" for choice in SERVED)
NAMES = [name for name in ENCODER_CASES if name.endswith("Model") and name != "DebertaV2Model"]
TEXTS = [[3, 4, 5], [6] * 40, [9], list(range(3, 90))]


def load_encoder(folder: Path, **options: Any) -> EncoderOnly:
    network = load_model(ModelConfig.from_path(folder), folder, **options)
    assert isinstance(network, EncoderOnly)
    return network


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_gives_what_the_layers_give(tmp_path: Path, name: str, dtype: str) -> None:
    """In float32 to its last digits; in bfloat16 as near to float32 as the layers."""
    write_checkpoint(tmp_path, name, ENCODER_CASES[name])
    network = load_encoder(tmp_path, dtype=dtype)
    assert network.in_one_call == IS_SERVED
    together = network.read(TEXTS)
    network.run_layers = network.layer_by_layer
    assert not network.in_one_call
    layered = network.read(TEXTS)
    assert [hidden.dtype for hidden in together] == [hidden.dtype for hidden in layered]
    one_call, by_layers = (torch.cat(hidden).double() for hidden in (together, layered))
    if dtype == "float32":
        assert (one_call - by_layers).abs().max() <= 1e-5 * by_layers.abs().max()
        return
    exact = torch.cat(load_encoder(tmp_path, dtype="float32").read(TEXTS)).double()
    assert (one_call - exact).norm() <= 1.1 * (by_layers - exact).norm()


@pytest.mark.parametrize(("method", "is_taken"), [("int8", True), ("int4", False)])
def test_quantized_weights_have_a_scale_per_output(tmp_path: Path, method: str, is_taken: bool) -> None:
    write_checkpoint(tmp_path, "BertModel", ENCODER_CASES["BertModel"])
    network = load_encoder(tmp_path, dtype="bfloat16", linear_method=method)
    assert network.in_one_call == (IS_SERVED and is_taken)
    together = torch.cat(network.read(TEXTS)).float()
    network.run_layers = network.layer_by_layer
    assert torch.nn.functional.cosine_similarity(together, torch.cat(network.read(TEXTS)).float()).min() > 0.999
