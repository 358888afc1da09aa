"""Where an engine's model comes from: the settings reach what loads it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, QuireConfig, SamplingParams
from quire.adapters import adapter_folder
from quire.assemble import model_folder
from quire.draft_plan import plan_draft
from quire_demo_model import checkpoint_path
from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig


def draft_folder(config: QuireConfig) -> object:
    return plan_draft(config, ModelConfig.from_path(checkpoint_path()), None, "float32")


@pytest.mark.parametrize(
    ("settings", "resolve"),
    [
        ({"model": "owner/name"}, model_folder),
        ({"speculative_method": "draft_model", "speculative_model": "owner/name"}, draft_folder),
        ({}, lambda config: adapter_folder(config, "owner/name")),
    ],
    ids=["model", "draft", "adapter"],
)
def test_modelscope_is_asked_for_every_name(
    settings: dict[str, str], resolve: Callable[[QuireConfig], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by the missing package: the client itself is tested beside it, in quire-models."""
    monkeypatch.setitem(sys.modules, "modelscope_hub.compat", None)
    monkeypatch.setenv("QUIRE_USE_MODELSCOPE", "1")
    with pytest.raises(ConfigError, match=r"quire-models\[modelscope\]") as refusal:
        resolve(QuireConfig.from_environment(**settings))
    assert refusal.value.field == "use_modelscope"


def test_pickled_weights_give_the_same_tokens(tmp_path: Path) -> None:
    shutil.copytree(checkpoint_path(), tmp_path, dirs_exist_ok=True)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    settings = {"num_gpu_blocks_override": 40, "max_model_len": 512, "kv_disk_path": str(tmp_path / "tier")}
    with pytest.raises(CheckpointError, match="load_format 'pt'"):
        LLM(tmp_path, **settings)
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(tmp_path, load_format="pt", **settings) as llm:
        (pickled,) = llm.generate(["What is 27 + 35?"], params)
    with LLM(**settings) as llm:
        (safe,) = llm.generate(["What is 27 + 35?"], params)
    assert pickled.outputs[0].token_ids == safe.outputs[0].token_ids
