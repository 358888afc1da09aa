"""Networks of Transformers with quantized weights through the engine: alone, with adapters, and shared by two ranks."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire_interfaces import ConfigError
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "num_gpu_blocks_override": 64,
    "dtype": "float32",
    "max_num_batched_tokens": 16,
    "num_threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[7, 9, 30, 100, 41, 5, 66], [3, 4, 5]]
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*k_proj"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    },
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with int8 weights, keys' aside, and Transformers' network with what they stand for."""
    folder, architecture = tmp_path_factory.mktemp("cwm"), "CwmForCausalLM"
    case = CASES[architecture]
    oracle = write_checkpoint(
        folder, architecture, dataclasses.replace(case, fields={**case.fields, "vocab_size": 300})
    )
    write_tokenizer(folder, vocab_size=300)
    tensors = load_file(folder / "model.safetensors")
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and "k_proj" not in name:
            scale = module.weight.data.abs().amax(1, keepdim=True) / 127
            elements = (module.weight.data / scale).round().to(torch.int8)
            module.weight.data = elements * scale
            tensors |= {f"{name}.weight": elements, f"{name}.weight_scale": scale}
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": QUANTIZATION}))
    return folder, oracle


def greedy(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None
        )
    return list(out[0, len(prompt) :].tolist())


def answers(folder: Path, **settings: Any) -> list[list[int]]:
    with LLM(str(folder), **SETTINGS, **settings) as llm:
        return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_ranks_share_quantized_layers(quantized: tuple[Path, Any]) -> None:
    folder, oracle = quantized
    expected = [greedy(oracle, prompt) for prompt in PROMPTS]
    assert answers(folder) == expected
    assert answers(folder, tensor_parallel_size=2) == expected


def test_adapters_go_on_quantized_layers(quantized: tuple[Path, Any], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder, oracle = quantized
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["q_proj", "k_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about Transformers
        model: Any = get_peft_model(copy.deepcopy(oracle), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += torch.randn_like(parameter) * 0.15
        model.save_pretrained(tmp_path / "adapter")
    model.eval()
    expected = [greedy(model, PROMPTS[0]), greedy(oracle, PROMPTS[1])]
    assert expected[0] != greedy(oracle, PROMPTS[0])
    adapter = LoRARequest(lora_name="a", lora_path=str(tmp_path / "adapter"))
    with LLM(str(folder), enable_lora=True, max_lora_rank=8, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[adapter, None])
        assert [list(each.outputs[0].token_ids) for each in outputs] == expected


def test_weights_are_quantized_online(quantized: tuple[Path, Any], tmp_path: Path) -> None:
    case = CASES["CwmForCausalLM"]
    write_checkpoint(tmp_path, "CwmForCausalLM", dataclasses.replace(case, fields={**case.fields, "vocab_size": 300}))
    write_tokenizer(tmp_path, vocab_size=300)
    with LLM(str(tmp_path), quantization="int8", **SETTINGS) as llm:
        assert llm.engine_info.choices["weights"].startswith("int8; by ")
        assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == GREEDY.max_tokens
    with pytest.raises(ConfigError, match="quantized already"):
        LLM(str(quantized[0]), quantization="int4", **SETTINGS)
