"""The planner's byte figures against what is really allocated."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from quire_interfaces import ConfigError
from quire_runner import RunnerConfig, activation_bytes, row_bytes
from runner_harness import HYBRID, Engine, TinyNetwork


@dataclass
class Shape:
    vocab_size: int = 1000
    hidden_size: int = 64
    intermediate_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16


@pytest.mark.parametrize("windows", [(None, None), HYBRID], ids=["full", "hybrid"])
def test_row_bytes_are_the_bytes_of_the_rows(windows: tuple[int | None, ...]) -> None:
    engine = Engine(TinyNetwork(windows), max_num_seqs=5, max_model_len=77, num_speculative_tokens=2)
    rows = engine.runner.rows
    engine.close()
    config = RunnerConfig(max_num_seqs=5, max_model_len=77, num_speculative_tokens=2)
    sizes = tuple(table.block_size for table in rows.block_tables)
    held = rows.token_ids.nbytes + sum(table.table.nbytes for table in rows.block_tables)
    assert row_bytes(config, block_sizes=sizes) == held


def test_activations_of_a_long_step_are_those_of_its_widest_layer() -> None:
    config = RunnerConfig(max_num_batched_tokens=4096, max_num_seqs=1, logits_chunk_tokens=1, dtype="bfloat16")
    mlp, stream = 3 * 256, 3 * 64
    assert activation_bytes(Shape(), config) == 4096 * (stream + mlp) * 2


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
    ("field", "value"),
    [("dtype", "int8"), ("max_num_seqs", 0), ("max_model_len", 0), ("num_threads", 0), ("num_speculative_tokens", -1)],
)
def test_wrong_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        RunnerConfig(**{field: value})
    assert caught.value.field == field
