"""What runs through Transformers, and what is refused at the start with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig, load_model
from quire_models.ledger import num_parameters
from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint


def load(folder: Path, **options: Any) -> Any:
    return load_model(ModelConfig.from_path(folder), folder, dtype="float32", **options)


@pytest.fixture(scope="module")
def ernie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ernie")
    write_checkpoint(folder, "Ernie4_5ForCausalLM", CASES["Ernie4_5ForCausalLM"])
    return folder


def test_weights_are_counted_in_the_files(ernie: Path) -> None:
    config = ModelConfig.from_path(ernie)
    assert not config.is_native
    network = load(ernie)
    assert num_parameters(config) == sum(p.numel() for p in network._model.parameters())


def test_files_of_another_format_are_refused(ernie: Path) -> None:
    with pytest.raises(ConfigError, match="is given safetensors only"):
        load(ernie, load_format="pt")
    with pytest.raises(ConfigError, match="leave load_format runai_streamer out"):
        load(ernie, load_format="runai_streamer")


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("DiffLlamaForCausalLM", "DiffLlamaConfig", "attends twice in a step"),
        ("DogeForCausalLM", "DogeConfig", "its attention has a mask of its own"),
        ("MegatronBertForCausalLM", "MegatronBertConfig", "does not let its attention be exchanged"),
        ("WonderForCausalLM", None, "has no class WonderForCausalLM"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    architecture: str, config: str | None, message: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    if config is not None:
        write_checkpoint(tmp_path, architecture, ParityCase(config=config))
    else:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_FIELDS, "architectures": [architecture]}))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("index_topk", 16), ("attention_chunk_size", 64)])
def test_fields_of_other_mechanisms_are_refused(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{field} .* is not supported"):
        ModelConfig.from_dict({**LLAMA_FIELDS, "architectures": ["NewForCausalLM"], field: value})
