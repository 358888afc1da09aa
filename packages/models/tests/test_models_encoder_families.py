"""Encoders by the names and fields of checkpoints that came with code of their own, and options of their families."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.layers.encoder_only import EncoderOnly
from quire_models.layers.rotary import inverse_frequencies
from quire_ops import LoraTokens
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.task_adapters import TASKS, JinaModel

TOLERANCE = 1e-5
"""Of the largest number: both sides compute in float32."""
TEXTS = [random.Random(length).choices(range(3, 200), k=length) for length in (70, 1, 33)]


def write(folder: Path, architecture: str, **fields: Any) -> Any:
    case = ENCODER_CASES[architecture]
    return write_checkpoint(folder, architecture, dataclasses.replace(case, fields={**case.fields, **fields}))


def set_config(folder: Path, values: dict[str, Any], *removed: str) -> None:
    """Change fields of config.json, and take some away."""
    fields = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in fields.items() if name not in removed}
    (folder / "config.json").write_text(json.dumps(kept | values))


def check(folder: Path, oracle: Any) -> EncoderOnly:
    """The network of the checkpoint gives the oracle's hidden states."""
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
    assert isinstance(network, EncoderOnly)
    for hidden, token_ids in zip(network.read(TEXTS), TEXTS, strict=True):
        with torch.inference_mode():
            expected: Tensor = oracle(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        assert float((hidden - expected).abs().max() / expected.abs().max()) < TOLERANCE
    return network


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("DebertaV2Model", {"share_att_key": False}),
    ("DebertaV2Model", {"pos_att_type": ["c2p"], "position_buckets": -1}),
    ("DebertaV2Model", {"pos_att_type": "p2c", "share_att_key": False, "position_biased_input": True}),
    ("DebertaV2Model", {"type_vocab_size": 2, "norm_rel_ebd": "none", "pos_att_type": None}),
    ("ElectraModel", {"embedding_size": 64}),
    ("EuroBertModel", {"attention_bias": True, "mlp_bias": True}),
    ("GteModel", {"type_vocab_size": 0}),
    ("T5EncoderModel", {"feed_forward_proj": "gated-gelu"}),
]


@pytest.mark.parametrize(("architecture", "fields"), OPTIONS)
def test_options_of_a_family(architecture: str, fields: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, write(tmp_path, architecture, **fields))


def test_nomic_bert_in_the_names_of_gpt2(tmp_path: Path) -> None:
    oracle = write(tmp_path, "NomicBertModel", rope_parameters={"rope_type": "default", "rope_theta": 2000.0})
    renamed = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_inner": 112, "n_positions": 8192, "rotary_emb_base": 2000}
    own = {"activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "max_trained_positions": 200, "prenorm": False}
    set_config(
        tmp_path, renamed | own, "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size",
        "max_position_embeddings", "rope_parameters", "layer_norm_eps", "hidden_act", "head_dim",
    )  # fmt: skip
    assert check(tmp_path, oracle).config.max_encoder_len == 200
    for field, value in {"moe_every_n_layers": 2, "prenorm": True, "qkv_proj_bias": True}.items():
        with pytest.raises(CheckpointError, match=f"{field} {value} is not supported"):
            ModelConfig.from_path(tmp_path, overrides={field: value})


@pytest.mark.parametrize("task", [None, TASKS[1], TASKS[4]])
def test_jina_with_the_adapter_of_a_task(task: str | None, tmp_path: Path) -> None:
    oracle = JinaModel(tmp_path).network(task)
    if task is not None:
        set_config(tmp_path, {"default_task": task})
    check(tmp_path, oracle)


def test_texts_of_jina_choose_their_tasks(tmp_path: Path) -> None:
    """Side by side, each with the bits that it has alone."""
    model = JinaModel(tmp_path)
    network = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    assert isinstance(network, EncoderOnly)

    def hidden(texts: list[tuple[list[int], int]]) -> list[Tensor]:
        lens = [len(ids) for ids, _ in texts]
        slots = np.repeat(np.asarray([slot for _, slot in texts], dtype=np.int32), lens)
        ids = [token for text, _ in texts for token in text]
        positions = torch.cat([torch.arange(length) for length in lens])
        batch = EncoderBatch(input_ids=torch.tensor(ids), positions=positions, lens=lens, lora=LoraTokens.of(slots))
        return list(network.encode_batch(batch).split(lens))

    texts = [(TEXTS[0], 1), (TEXTS[2], -1), (TEXTS[1], 4), (TEXTS[2], 1), (TEXTS[0], 0)]
    found = hidden(texts)
    for (ids, slot), each in zip(texts, found, strict=True):
        with torch.inference_mode():
            oracle = model.network(None if slot < 0 else TASKS[slot])
            expected = oracle(input_ids=torch.tensor([ids])).last_hidden_state[0]
        assert float((each - expected).abs().max() / expected.abs().max()) < TOLERANCE
        assert torch.equal(hidden([(ids, slot)])[0], each)


def test_a_task_without_an_adapter_is_refused(tmp_path: Path) -> None:
    JinaModel(tmp_path)
    with pytest.raises(CheckpointError, match="default_task 'search' has no adapter; there are "):
        ModelConfig.from_path(tmp_path, overrides={"default_task": "search"})


def test_gte_as_new_model(tmp_path: Path) -> None:
    oracle = write(tmp_path, "GteModel", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    set_config(
        tmp_path,
        {"architectures": ["NewModel"], "model_type": "new", "rope_theta": 500000, "position_embedding_type": "rope"},
        "rope_parameters",
    )
    check(tmp_path, oracle)


def test_frequencies_of_gte_with_fixed_ntk_scaling() -> None:
    """Base times the factor, then each frequency divided by factor ** (2 / head_dim), as the code that came with
    gte-base-en-v1.5 computes them."""
    fields = {**ENCODER_CASES["GteModel"].fields, "architectures": ["NewModel"], "rope_theta": 500000}
    config = ModelConfig.from_dict({**fields, "rope_scaling": {"type": "ntk", "factor": 2.0}})
    exponents = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    expected = (2 * 500000.0) ** -exponents / 2 ** (2 / 16)
    assert torch.allclose(inverse_frequencies(config.rope, 16).double(), expected, rtol=1e-6)
    assert config.max_encoder_len == 256


def test_a_layer_of_albert_that_runs_twice_is_loaded_and_counted_once(tmp_path: Path) -> None:
    oracle = write(tmp_path, "AlbertModel", num_hidden_layers=4, num_hidden_groups=1, inner_group_num=1)
    network = check(tmp_path, oracle)
    assert len(network.layers) == 4
    assert len(set(map(id, network.layers))) == 1
