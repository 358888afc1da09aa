"""Networks that promise it give the same bits however a step is made up, at sizes that no vector divides."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from models_paged_driver import PagedDriver

from quire_models import ModelConfig, load_model
from quire_ops import OpRequest, op_table, ops
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

ODD_SIZES = {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 51}
ODD_FIELDS = {"FalconForCausalLM": {"num_kv_heads": 3}, "GPTNeoXForCausalLM": {"rotary_pct": 0.3}}
"""What else has to change with them."""
PROMISED = [
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BloomForCausalLM",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Exaone4ForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoForCausalLM",
    "PhiForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM",
]
NOT_PROMISED = ["T5ForConditionalGeneration", "BartForConditionalGeneration"]
"""Their attention is torch's."""

served = op_table().choose(ops.linear, OpRequest(device="cpu", dtype=torch.float32))
needs_kernels = pytest.mark.skipif(not served.batch_invariant, reason="torch serves, which promises nothing")


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", PROMISED)
def test_bits_do_not_follow_how_steps_are_made_up(architecture: str, dtype: str, tmp_path: Path) -> None:
    case = CASES[architecture]
    fields = {**case.fields, **ODD_SIZES, **ODD_FIELDS.get(architecture, {}), "vocab_size": 211}
    fields.pop("head_dim", None)
    write_checkpoint(tmp_path, architecture, dataclasses.replace(case, fields=fields))
    config = ModelConfig.from_path(tmp_path)
    model = load_model(config, tmp_path, dtype=dtype)
    assert model.batch_invariant
    rng = random.Random(architecture)
    token_ids = [rng.randrange(3, config.vocab_size) for _ in range(75)]

    def logits(chunk: int, num_strangers: int) -> torch.Tensor:
        driver = PagedDriver(model, block_size=8, shuffle=True, num_tokens=1024)
        seq = driver.add(token_ids)
        for _ in range(num_strangers):
            stranger = driver.add([rng.randrange(3, config.vocab_size) for _ in range(rng.randint(5, 60))])
            driver.step((stranger, len(stranger.token_ids)), (seq, min(chunk, len(token_ids) - seq.num_computed)))
        driver.run(seq, chunk)
        return torch.stack(seq.logits)

    whole = logits(75, 0)
    for chunk, num_strangers in ((1, 0), (7, 5), (32, 2)):
        assert torch.equal(logits(chunk, num_strangers), whole), (chunk, num_strangers)


@needs_kernels
@pytest.mark.parametrize("architecture", NOT_PROMISED)
def test_what_torch_attends_to_is_not_promised(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    model = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    assert not model.batch_invariant
