"""Adapters on networks that run through Transformers, against PEFT: mixed in one batch with requests without one."""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire_interfaces import QuireError
from quire_models.config import ModelConfig
from quire_models.ledger import linear_shapes
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS = 6
KINDS: tuple[dict[str, Any], ...] = (
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"target_modules": ["k_proj", "o_proj", "down_proj"], "use_dora": True},
)


def adapted(base: Any, folder: Path, seed: int, **fields: Any) -> Any:
    """A random adapter in PEFT's files, and the network that has it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4 + seed, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about Transformers
        model = get_peft_model(copy.deepcopy(base), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += torch.randn_like(parameter) * 0.15
        model.save_pretrained(folder)
    return model.eval()


def network(architecture: str, folder: Path) -> Any:
    """Write a tiny network with a tokenizer; its Transformers model."""
    case = CASES[architecture]
    case = dataclasses.replace(case, fields={**case.fields, "vocab_size": 300})
    base = write_checkpoint(folder, architecture, case)
    write_tokenizer(folder, vocab_size=300)
    base.generation_config.eos_token_id = None
    return base


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
    return list(out[0, len(prompt) :].tolist())


# Llama's shape without a network of its own; a mixture, whose experts take none; recurrent layers.
@pytest.mark.parametrize("architecture", ["Ernie4_5ForCausalLM", "HunYuanMoEV1ForCausalLM", "Lfm3ForCausalLM"])
def test_tokens_are_pefts(architecture: str, tmp_path: Path) -> None:
    base = network(architecture, tmp_path)
    config = ModelConfig.from_path(tmp_path)
    assert not config.is_native
    chooser = random.Random(0)
    shared = [chooser.randrange(3, 290) for _ in range(9)]
    kinds = KINDS if architecture.startswith("Ernie") else KINDS[1:2]
    adapters: list[LoRARequest | None] = [None]
    models = [base]
    for seed, fields in enumerate(kinds):
        place = tmp_path / f"adapter-{seed}"
        models.append(adapted(base, place, seed, **fields))
        adapters.append(LoRARequest(lora_name=place.name, lora_path=str(place)))
    prompts = [shared + [chooser.randrange(3, 290) for _ in range(1 + 5 * i)] for i in range(len(models))]
    expected = [greedy(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
    assert len(set(map(tuple, (greedy(model, prompts[0]) for model in models)))) > 1, "adapters change something"
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 100, "max_num_batched_tokens": 16}
    with LLM(tmp_path, enable_lora=True, max_loras=2, max_lora_rank=8, dtype="float32", **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        served = llm.engine.core.parts.executor._paths[-1]._network  # type: ignore[attr-defined]
        sites = [site.shape for site in served.adapters.linears.values()]
        assert sorted(sites) == sorted(linear_shapes(config)), "what is planned for"


def test_what_takes_no_adapters_is_named(tmp_path: Path) -> None:
    base = network("Ernie4_5ForCausalLM", tmp_path)
    adapted(base, tmp_path / "head", 0, target_modules=["q_proj", "lm_head"])
    settings: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 100}
    with (
        LLM(tmp_path, enable_lora=True, dtype="float32", **settings) as llm,
        pytest.raises(QuireError, match="lm_head"),
    ):
        llm.generate(
            [[5, 6]],
            SamplingParams(max_tokens=2),
            lora_request=[LoRARequest(lora_name="a", lora_path=str(tmp_path / "head"))],
        )
