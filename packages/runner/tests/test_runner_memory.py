"""The planner's byte figures against what is really allocated."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from runner_harness import HYBRID, Engine, TinyNetwork, random_model
from torch.profiler import ProfilerActivity, profile

from quire_interfaces import ConfigError, NewRow, SamplingParams
from quire_kv_cache import plan_kv_cache
from quire_models import ModelConfig, load_model
from quire_ops import LogitEditTable
from quire_runner import ModelRunner, RunnerConfig, activation_bytes, row_bytes
from quire_runner.memory import step_graph_bytes
from quire_sampling.edit_lists import EditLists
from quire_testkit.conformance.executor import ExecutorSuite
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint


@dataclass
class Shape:
    vocab_size: int = 1000
    hidden_size: int = 64
    intermediate_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16

    @property
    def inner_width(self) -> int:
        return 3 * self.intermediate_size


@pytest.mark.parametrize("windows", [(None, None), HYBRID], ids=["full", "hybrid"])
def test_row_bytes_are_the_bytes_of_the_rows(windows: tuple[int | None, ...]) -> None:
    engine = Engine(TinyNetwork(windows), max_num_seqs=5, max_model_len=77, num_speculative_tokens=2)
    rows = engine.runner.rows
    engine.close()
    config = RunnerConfig(max_num_seqs=5, max_model_len=77, num_speculative_tokens=2)
    sizes = tuple(table.block_size for table in rows.block_tables)
    held = rows.token_ids.nbytes + sum(table.table.nbytes for table in rows.block_tables)
    assert row_bytes(config, block_sizes=sizes) == held
    table = EditLists(torch.zeros(6, dtype=torch.int64), 1000).table
    listed = sum(getattr(table, name).nbytes for name in LogitEditTable.__slots__ if name != "num_prompt_tokens")
    assert row_bytes(config, block_sizes=sizes, edited_vocab=1000) - held == pytest.approx(listed, abs=6 * 4)


def test_activations_of_a_long_step_are_those_of_its_widest_layer() -> None:
    config = RunnerConfig(
        max_num_batched_tokens=4096, max_num_seqs=1, max_model_len=16, logits_chunk_tokens=1, dtype="bfloat16"
    )
    mlp, stream, rotations = 3 * 256, 3 * 64 + 2 * 16, 4 * 16 * 16
    assert activation_bytes(Shape(), config) == (rotations + 4096 * (stream + mlp)) * 2


def test_a_network_without_attention_is_planned_on_a_gpu() -> None:
    config = RunnerConfig(device="cuda", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    without = Shape(num_heads=0, num_kv_heads=0, head_dim=0)
    assert 40 << 20 < activation_bytes(without, config) < activation_bytes(Shape(), config)
    assert step_graph_bytes(without, config, dtype_bytes=2) > 40 << 20


def test_many_sampling_rows_are_bound_by_their_logits() -> None:
    few = RunnerConfig(max_num_batched_tokens=512, max_num_seqs=64, logits_chunk_tokens=1)
    drafted = RunnerConfig(max_num_batched_tokens=512, max_num_seqs=64, logits_chunk_tokens=1, num_speculative_tokens=3)
    shape = Shape(vocab_size=150_000)
    assert activation_bytes(shape, few) >= 64 * 150_000 * 4
    assert activation_bytes(shape, drafted) >= 256 * 150_000 * 4
    # More rows than tokens in a step cannot sample.
    capped = RunnerConfig(max_num_batched_tokens=512, max_num_seqs=4096)
    assert activation_bytes(shape, capped) < 3.1 * 512 * 150_000 * 4


def test_halving_the_dtype_halves_a_layer() -> None:
    config = RunnerConfig(max_num_batched_tokens=4096, max_num_seqs=1, logits_chunk_tokens=1)
    assert activation_bytes(Shape(), config, dtype_bytes=4) == 2 * activation_bytes(Shape(), config, dtype_bytes=2)


@pytest.mark.parametrize(
    ("step_tokens", "context", "wide", "cache_dtype"),
    [
        (256, 256, 512, "float32"),
        (64, 2048, 512, "float32"),
        (256, 256, 4096, "float32"),
        (64, 2048, 512, "fp8_e4m3"),
        (64, 2048, 512, "int8"),
        (64, 2048, 512, "int4"),
    ],
)
def test_a_prefill_step_stays_within_the_figure(step_tokens: int, context: int, wide: int, cache_dtype: str) -> None:
    """The last chunk of a long prompt in scattered blocks, as torch's own allocation log has it.

    With torch's attention, which takes the most.
    """
    fields = {"hidden_size": 256, "intermediate_size": wide, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = random_model(
        "llama", num_hidden_layers=2, max_position_embeddings=4096, attention_backend="torch", **fields
    )
    plan = plan_kv_cache(model.config.kv_cache_specs(16, cache_dtype), num_blocks=300)
    config = RunnerConfig(
        max_num_seqs=1, max_model_len=context, max_num_batched_tokens=step_tokens, logits_chunk_tokens=1
    )
    runner = ModelRunner.for_model(model, plan, config)
    blocks = list(range(1, 300))
    random.Random(0).shuffle(blocks)
    request = NewRow(
        row=0,
        request_id="r",
        token_ids=[1] * context,
        num_prompt_tokens=context,
        num_computed_tokens=context - step_tokens,
        block_ids=(blocks[: context // 16],),
        sampling_params=SamplingParams(),
        seed=0,
    )
    step = ExecutorSuite().entries(0, [0], context - step_tokens, step_tokens, new_rows=[request])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        runner.run(step)
    events = [e for e in log.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    figure = activation_bytes(model.config, config, dtype_bytes=4, kv_cache_dtype=cache_dtype)
    assert peak <= figure < 2 * peak


OTHER_ATTENTION = {
    # Several residual streams, and attention to the tokens that an index finds.
    "Qwen4ExpForCausalLM": {
        "hidden_size": 256, "head_dim": 64, "hc_count": 2, "ple_embed_dim": 256, "indexer_head_dim": 64,
        "indexer_budget": 512,
    },
    # Biases by distance that each query mixes for itself.
    "InklingForCausalLM": {"hidden_size": 256},
    # Windows and compressed entries.
    "DeepseekV4ForCausalLM": {
        "hidden_size": 256, "head_dim": 64, "partial_rotary_factor": 0.25, "index_head_dim": 64, "index_topk": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "step_tokens", "context"),
    [
        ("Qwen4ExpForCausalLM", 128, 1024),
        ("InklingForCausalLM", 128, 4096),
        ("InklingForCausalLM", 512, 8192),
        ("DeepseekV4ForCausalLM", 1024, 4096),
    ],
)
def test_a_step_of_other_attention_stays_within_the_figure(
    architecture: str, step_tokens: int, context: int, tmp_path: Path
) -> None:
    case = CASES[architecture]
    sizes = OTHER_ATTENTION[architecture] | {"max_position_embeddings": context}
    write_checkpoint(tmp_path, architecture, dataclasses.replace(case, fields={**case.fields, **sizes}))
    model = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    specs = model.config.kv_cache_specs(16, "float32")
    plan = plan_kv_cache(specs, num_blocks=(len(specs) + 1) * context // 16 + 1)
    config = RunnerConfig(
        max_num_seqs=1, max_model_len=context, max_num_batched_tokens=step_tokens, logits_chunk_tokens=1
    )
    runner = ModelRunner.for_model(model, plan, config)
    num = context // 16
    request = NewRow(
        row=0,
        request_id="r",
        token_ids=[5] * context,
        num_prompt_tokens=context,
        num_computed_tokens=context - step_tokens,
        block_ids=tuple(list(range(1 + group * num, 1 + (group + 1) * num)) for group in range(len(plan.groups))),
        sampling_params=SamplingParams(),
        seed=0,
    )
    step = ExecutorSuite().entries(0, [0], context - step_tokens, step_tokens, new_rows=[request])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        runner.run(step)
    events = [e for e in log.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    figure = activation_bytes(
        model.config, config, dtype_bytes=4, kv_cache_dtype="float32", score_copies=model.config.network.score_copies
    )
    assert peak <= figure < 2 * peak


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int8"), ("max_num_seqs", 0), ("max_model_len", 0), ("num_threads", 0), ("num_speculative_tokens", -1)],
)
def test_wrong_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        RunnerConfig(**{field: value})
    assert caught.value.field == field
