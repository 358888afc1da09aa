"""Adapters of networks with towers: of the language model applied, of the tower or its connector refused by name."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire_interfaces import QuireError
from quire_testkit.seeing_models import SeeingModel, drawing

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24, "num_threads": 1, "enable_lora": True,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "one <image> two"


def write_adapter(base: Any, folder: Path, target_modules: str | list[str]) -> Any:
    """A random adapter in PEFT's files, and the network that has it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=target_modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about Transformers
        model = get_peft_model(copy.deepcopy(base), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += torch.randn_like(parameter) * 0.15
        model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"))


def test_adapters_of_the_language_model_are_applied(model: SeeingModel, tmp_path: Path) -> None:
    names = r".*language_model.*\.(q_proj|v_proj|down_proj)"
    network, adapted = model.network, write_adapter(model.network, tmp_path / "new", names)
    old = tmp_path / "old"  # as earlier versions of Transformers and PEFT name the same layers
    old.mkdir()
    (old / "adapter_config.json").write_bytes((tmp_path / "new" / "adapter_config.json").read_bytes())
    tensors = load_file(tmp_path / "new" / "adapter_model.safetensors")
    assert all(".model.language_model.layers." in name for name in tensors)
    renamed = {name.replace("model.language_model.", "language_model.model."): each for name, each in tensors.items()}
    save_file(renamed, old / "adapter_model.safetensors")
    adapters = [LoRARequest(lora_name=name, lora_path=str(tmp_path / name)) for name in ("new", "old")]
    prompts = [{"prompt": TEXT, "multi_modal_data": {"image": [drawing(number)]}} for number in (1, 1, 2, 1)]
    with LLM(model.folder, **SETTINGS) as llm:
        requests = [None, *adapters, adapters[0]]
        outputs = llm.generate([*prompts[:3], prompts[3]], PARAMS, use_tqdm=False, lora_request=requests)
        tokens = [list(each.outputs[0].token_ids) for each in outputs]
    plain = model.expected(TEXT, [drawing(1)], 6)
    try:
        model.network = adapted
        expected = [model.expected(TEXT, [drawing(number)], 6) for number in (1, 2)]
    finally:
        model.network = network
    assert plain != expected[0]
    assert tokens == [plain, expected[0], expected[1], expected[0]]


@pytest.mark.parametrize("names", [r".*vision_tower.*\.q_proj", r".*multi_modal_projector\.linear_1", "all-linear"])
def test_adapters_of_towers_and_connectors_are_refused(model: SeeingModel, tmp_path: Path, names: str) -> None:
    write_adapter(model.network, tmp_path / "tower", names)
    request = LoRARequest(lora_name="tower", lora_path=str(tmp_path / "tower"))
    with (
        LLM(model.folder, **SETTINGS) as llm,
        pytest.raises(QuireError, match=r"(?s)not known.*(vision_tower|multi_modal_projector)"),
    ):
        llm.generate("words", PARAMS, use_tqdm=False, lora_request=request)
