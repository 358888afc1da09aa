"""What operators may set, and the package's promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quire_lora
from quire_interfaces import ConfigError
from quire_lora import AdapterSlots, LoraConfig, adapter_bytes
from quire_lora.peft_config import PeftConfig


def test_modules_are_names_and_folders() -> None:
    assert LoraConfig(lora_modules=("a=x", "b=y=z")).adapters() == {"a": "x", "b": "y=z"}
    in_json = '{"name": "a", "path": "x=y", "base_model_name": "m"}'
    assert LoraConfig(lora_modules=(in_json, "b=z")).adapters() == {"a": "x=y", "b": "z"}
    for wrong in ('{"name": "a"', '{"name": "a"}', '{"name": 1, "path": "x"}', '{"name": "", "path": "x"}'):
        with pytest.raises(ConfigError, match="lora_modules"):
            LoraConfig(lora_modules=(wrong,)).adapters()
    for wrong in ("a", "=x", "a="):
        with pytest.raises(ConfigError, match="must hold name=folder"):
            LoraConfig(lora_modules=(wrong,)).adapters()
    with pytest.raises(ConfigError, match="names the adapter 'a' twice"):
        LoraConfig(lora_modules=("a=x", "a=y")).adapters()


def test_parameters_are_found_by_the_ends_of_their_names() -> None:
    names = ("experts.gate_up_proj", "mlp.experts.down_proj", "bias")
    config = PeftConfig(r=1, lora_alpha=1.0, target_parameters=names)
    assert config.parameters_of("model.layers.0.mlp.experts") == ["bias", "down_proj", "gate_up_proj"]
    assert config.parameters_of("model.layers.0.other_experts") == ["bias"]
    assert config.parameters_of("experts") == ["bias", "gate_up_proj"]


def test_bytes_of_slots() -> None:
    config = LoraConfig(max_loras=3, max_lora_rank=4)
    assert adapter_bytes([(10, 6)], config, 2) == 3 * (4 * 16 * 2 + 8 * 10)
    narrow = LoraConfig(max_loras=3, max_lora_rank=4, lora_dtype="int8")
    assert adapter_bytes([(10, 6)], narrow, 2) == 3 * (4 * 16 + 4 * (4 + 10) + 8 * 10)
    slots = AdapterSlots(3, 4, torch.bfloat16, torch.device("cpu"), "int8")
    weights = slots.linear("proj", 10, 6, lambda: (torch.zeros(10, 6), None))
    tensors = (weights.a, weights.b, weights.scale, weights.shift, weights.a_scale, weights.b_scale)
    assert sum(each.nbytes for each in tensors if each is not None) == adapter_bytes([(10, 6)], narrow, 2)


def test_every_exported_name_is_there_and_none_needs_torch_to_be_named() -> None:
    for name in quire_lora.__all__:
        assert getattr(quire_lora, name) is not None
    code = "import sys; from quire_lora import LoraConfig; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
