"""An engine whose ranks share out experts gives what one process gives, also while experts move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_quire_lora_experts import network, stacked

from quire import LLM, LoRARequest, SamplingParams
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_interfaces import ConfigError
from quire_models import ModelConfig

SETTINGS: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 128, "num_threads": 1}
EP: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
EPLB: dict[str, Any] = {"step_interval": 3, "window_size": 2, "num_redundant_experts": 1, "log_balancedness": True}
PROMPTS = ["The capital of France is", "one two three one two three"]


def answers(llm: LLM, adapter: LoRARequest) -> list[Any]:
    """Tokens and log probabilities, greedy, sampled and with an adapter on the experts."""
    found = []
    for params, request in (
        (SamplingParams(temperature=0, max_tokens=16, logprobs=3), None),
        (SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=12, logprobs=2), None),
        (SamplingParams(temperature=0, max_tokens=12, logprobs=1), adapter),
    ):
        for output in llm.generate(PROMPTS, params, lora_request=request):
            for each in output.outputs:
                logprobs = [{token: one.logprob for token, one in at.items()} for at in each.logprobs or ()]
                found.append((each.token_ids, logprobs))
    return found


def test_ranks_that_share_out_experts_give_the_bits_of_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="quire")
    base = network("MixtralForCausalLM", tmp_path / "model")
    stacked(base, tmp_path / "adapter", 1, target_parameters=["experts.gate_up_proj"], target_modules=["q_proj"])
    adapter = LoRARequest("experts", 1, str(tmp_path / "adapter"))
    folder = str(tmp_path / "model")
    common = {**SETTINGS, "enable_lora": True, "max_lora_rank": 8}
    with LLM(folder, **common) as alone:
        expected = answers(alone, adapter)
    with LLM(folder, **common, **EP, enable_eplb=True, eplb_config=EPLB, all2all_backend="naive") as shared:
        assert answers(shared, adapter) == expected
        stats = shared.stats()
        before = shared.collective_rpc("expert_load")
        moved = shared.collective_rpc("rebalance_experts")
        after = shared.collective_rpc("expert_load")
        assert answers(shared, adapter) == expected
    assert [each["rank"] for each in before] == [0, 1]
    assert all(each["layers"][0]["expert_tokens"] == before[0]["layers"][0]["expert_tokens"] for each in before)
    assert sum(before[0]["layers"][0]["expert_tokens"]) > 0
    assert moved[0] == moved[1]
    assert after[0]["balancedness"] == after[1]["balancedness"] >= before[0]["balancedness"]
    assert 0 < stats.num_expert_rebalances_total <= stats.num_moved_experts_total
    assert 0 < stats.expert_balancedness <= 1
    assert set(stats.expert_rank_tokens_total) == {"0", "1"}
    assert min(stats.expert_rank_tokens_total.values()) > 0
    assert any("moved" in record.message and "moved 0" not in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_eplb": True}, "enable_eplb moves experts between ranks .* set enable_expert_parallel too"),
        ({**EP, "all2all_backend": "deepep_low_latency"}, "needs the library deep_ep"),
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "data_parallel_size does not go .* independent"),
        ({**EP, "tensor_parallel_size": 16}, "16 ranks cannot share"),
        ({**EP, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 99}}, "num_redundant_experts is 99"),
    ],
)
def test_what_contradicts_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    network("MixtralForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_plan(QuireConfig.of(max_model_len=64, **settings), ModelConfig.from_path(tmp_path), free_bytes=1 << 30)


@pytest.mark.parametrize("config", [{"window": 3}, {"step_interval": 0}, {"log_balancedness": 1}])
def test_wrong_eplb_configs_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="eplb_config must"):
        QuireConfig.of(eplb_config=config)


def test_the_plan_has_the_experts_of_a_rank(tmp_path: Path) -> None:
    network("MixtralForCausalLM", tmp_path)
    model = ModelConfig.from_path(tmp_path)
    experts = [
        make_plan(QuireConfig.of(max_model_len=64, **settings), model, free_bytes=1 << 30).ledger_bytes[
            "weights: experts"
        ]
        for settings in ({}, {"tensor_parallel_size": 2}, EP)
    ]
    assert experts[0] == experts[1]
    assert 1.9 * experts[2] < experts[0]
