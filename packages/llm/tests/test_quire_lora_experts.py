"""Adapters on routed experts against PEFT, mixed in one batch with adapters of other layers and with none."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire_interfaces import QuireError
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS = 6
STACKED: tuple[dict[str, Any], ...] = (
    {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": ["q_proj"]},
    {"target_parameters": ["experts.down_proj"], "target_modules": [], "use_rslora": True},
    {
        "target_parameters": ["mlp.experts.gate_up_proj"],
        "target_modules": ["v_proj"],
        "rank_pattern": {"gate_up_proj": 3},
        "alpha_pattern": {r"experts\.gate_up_proj": 5},
    },
)
"""Fields of PEFT's configuration: weights of all experts in one tensor."""


def network(architecture: str, folder: Path) -> Any:
    """Write a tiny network with a tokenizer; its Transformers model."""
    case = CASES[architecture]
    case = dataclasses.replace(case, fields={**case.fields, "vocab_size": 300})
    base = write_checkpoint(folder, architecture, case)
    write_tokenizer(folder, vocab_size=300)
    base.generation_config.eos_token_id = None
    return base


def stacked(base: Any, folder: Path, seed: int, **fields: Any) -> Any:
    """A random adapter in PEFT's files, and the network that has it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4 + seed, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about Transformers
        model = get_peft_model(copy.deepcopy(base), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) * 0.15
        model.save_pretrained(folder)
    return model.eval()


def one_by_one(base: Any, folder: Path, experts: str, roles: dict[str, tuple[int, int]], **fields: Any) -> Any:
    """The same of a network that keeps experts as linear layers, as Transformers did before its fifth version.

    Args:
        experts: Name of a layer's experts, with a place for the layer's number.
        roles: Name of an expert's linear layer -> its outputs and inputs.
    """
    from peft import PeftModel

    rank, tensors = 3, {}
    for layer in range(base.config.num_hidden_layers):
        for expert in range(base.config.num_local_experts):
            for role, (outputs, inputs) in roles.items():
                name = f"base_model.model.{experts.format(layer)}.{expert}.{role}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs) * 0.15
                tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank) * 0.15
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, **fields}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": sorted(roles)}))
    save_file(tensors, folder / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
    return list(out[0, len(prompt) :].tolist())


SITUATIONS: dict[str, dict[str, Any]] = {
    "chunks, few slots, preemption": {
        "max_loras": 2, "max_num_batched_tokens": 16, "block_size": 4, "num_gpu_blocks_override": 17,
    },
    "a step ahead": {"max_loras": 8, "async_scheduling": True, "num_gpu_blocks_override": 100},
}  # fmt: skip


# Weights [experts, outputs, inputs]; inputs first, gate and up by turns; linear layers; inputs first unknown to PEFT.
@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM", "Llama4ForCausalLM"]
)
def test_tokens_are_pefts(architecture: str, tmp_path: Path) -> None:
    base = network(architecture, tmp_path)
    models, adapters = [base], [None]
    for seed, fields in enumerate(STACKED):
        if "Llama4" in architecture:  # calls them feed_forward
            fields = {**fields, "target_parameters": [x.removeprefix("mlp.") for x in fields["target_parameters"]]}
        place = tmp_path / f"stacked-{seed}"
        models.append(stacked(base, place, seed, **fields))
        adapters.append(LoRARequest(lora_name=place.name, lora_path=str(place)))
    if "Mixtral" in architecture:
        size, inner = base.config.hidden_size, base.config.intermediate_size
        roles = {"w1": (inner, size), "w2": (size, inner), "w3": (inner, size)}
        place = tmp_path / "one-by-one"
        models.append(one_by_one(base, place, "model.layers.{}.block_sparse_moe.experts", roles))
        adapters.append(LoRARequest(lora_name=place.name, lora_path=str(place)))
    chooser = random.Random(0)
    shared = [chooser.randrange(3, 290) for _ in range(17)]
    prompts = [shared + [chooser.randrange(3, 290) for _ in range(1 + 5 * i)] for i in range(len(models))]
    expected = [greedy(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
    alone = {tuple(greedy(model, prompts[0])) for model in models}
    assert len(alone) >= len(models) - 1, "adapters change something"
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": 64, "dtype": "float32", "enable_lora": True, "max_lora_rank": 8}
    names = ["chunks, few slots, preemption", "a step ahead"] if "Qwen3" in architecture else ["a step ahead"]
    for name in names:
        with LLM(tmp_path, **settings, **SITUATIONS[name]) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
                assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert (llm.stats().num_preemptions_total > 0) == ("preemption" in name)


def test_adapters_that_do_not_fit_are_named(tmp_path: Path) -> None:
    base = network("Qwen3MoeForCausalLM", tmp_path)
    place = tmp_path / "adapter"
    stacked(base, place, 0, **STACKED[0])
    tensors = load_file(place / "adapter_model.safetensors")
    experts = [name for name in tensors if name.endswith("experts.lora_A.weight")]
    settings: dict[str, Any] = {"max_model_len": 64, "dtype": "float32", "enable_lora": True, "max_lora_rank": 8}
    with LLM(tmp_path, num_gpu_blocks_override=20, **settings) as llm:
        save_file({**tensors, experts[0]: torch.zeros(31, 48)}, place / "adapter_model.safetensors")
        with pytest.raises(QuireError, match=r"1 of the wrong shape: .*experts\.down_proj: lora_A is \[31, 48\]"):
            llm.load_adapter("short", str(place))
        without = {name: tensor for name, tensor in tensors.items() if "experts.lora_" not in name}
        save_file(without, place / "adapter_model.safetensors")
        with pytest.raises(QuireError, match=r"missing: .*experts\.down_proj"):
            llm.load_adapter("half", str(place))
