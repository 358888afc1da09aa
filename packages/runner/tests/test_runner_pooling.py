"""Rows that are pooled: whole texts of an encoder in one pass, and chunks of decoders beside rows that generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire_interfaces import FinishReason, NewRow, PooledOutput, PoolingParams, SamplingParams
from quire_kv_cache import NoKVCache
from quire_models import ModelConfig, load_model
from quire_pooling import Pooler, PoolerSpec
from quire_runner import PoolingRunner, RunnerConfig, ThreadedExecutor
from quire_runner.pooling_runner import chunk_lens, pooled_outputs
from quire_runner.row_pooling import RowPooling
from quire_scheduler import Scheduler, SchedulerConfig
from quire_testkit.conformance.scheduler import make_request
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint

TEXTS = [list(range(3, 3 + length)) for length in (30, 1, 17, 44, 2)]


def numbers(pooled: PooledOutput | None) -> Tensor:
    assert pooled is not None
    return torch.frombuffer(bytearray(pooled.data), dtype=torch.float32).reshape(pooled.shape)


@pytest.mark.parametrize("threaded", [False, True])
def test_whole_texts_and_pairs_in_few_passes(threaded: bool, tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, "BertModel", ENCODER_CASES["BertModel"])
    network = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    pooler = Pooler(PoolerSpec(hidden_size=64, methods=("MEAN",)))
    runner = PoolingRunner(network, pooler, RunnerConfig(max_model_len=64))
    executor = ThreadedExecutor(runner) if threaded else runner
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False)
    scheduler = Scheduler(config, NoKVCache())
    for number, text in enumerate(TEXTS):
        request = make_request(f"r{number}", text, max_tokens=1, stop_token_ids=[0])
        request.pooling_params = PoolingParams(task="embed")
        request.second_segment_start = len(text) // 2 if number % 2 else 0
        scheduler.add_request(request)
    outputs, num_steps = {}, 0
    while scheduler.has_requests():
        step = scheduler.schedule()
        assert step is not None
        num_steps += bool(step.rows)
        for each in scheduler.update(step, executor.execute(step).result()):
            assert (each.finish_reason, each.new_token_ids) == (FinishReason.STOP, [])
            outputs[each.request_id] = numbers(each.pooled)
    assert num_steps == 2
    for number, text in enumerate(TEXTS):
        types = [int(bool(number % 2) and len(text) // 2 > 0 and place >= len(text) // 2) for place in range(len(text))]
        with torch.inference_mode():
            hidden = oracle(input_ids=torch.tensor([text]), token_type_ids=torch.tensor([types])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        assert torch.allclose(outputs[f"r{number}"], expected, atol=1e-6)
    request = make_request("part", [5] * 70, max_tokens=1)
    request.pooling_params = PoolingParams(task="embed")
    chunked = Scheduler(SchedulerConfig(max_num_batched_tokens=64, max_model_len=128), NoKVCache())
    chunked.add_request(request)
    step = chunked.schedule()
    assert step is not None
    with pytest.raises(RuntimeError, match="reads 70 tokens at once, 64 were scheduled"):
        executor.execute(step).result()
    executor.close()


def test_outputs_of_all_shapes_come_in_one_buffer() -> None:
    tensors = [torch.arange(3.0), torch.arange(4.0, dtype=torch.bfloat16).reshape(2, 2), torch.empty(0, 5)]
    outputs = pooled_outputs(tensors)
    assert [each.shape for each in outputs] == [(3,), (2, 2), (0, 5)]
    for output, tensor in zip(outputs[:2], tensors, strict=False):
        assert torch.equal(numbers(output), tensor.float())
    assert outputs[2].data == b""
    assert pooled_outputs([]) == []


def test_lengths_of_chunks() -> None:
    assert chunk_lens(5, 8) == [5]
    assert chunk_lens(8, 8) == [8]
    assert chunk_lens(17, 8) == [8, 8, 1]


def test_a_runner_without_a_pooler_takes_no_such_row() -> None:

    new = NewRow(
        row=1,
        request_id="r",
        token_ids=[5],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=(),
        sampling_params=SamplingParams(),
        seed=0,
        pooling_params=PoolingParams(task="embed"),
        stop_token_ids=frozenset((0,)),
    )
    with pytest.raises(ValueError, match="without a pooler"):
        RowPooling(None).fill(new)
    pooling = RowPooling(Pooler(PoolerSpec(hidden_size=4)))
    assert not pooling
    pooling.fill(new)
    assert pooling
    pooling.free(1)
    assert not pooling
