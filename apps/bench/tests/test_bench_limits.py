"""Limits are arithmetic: against figures worked out by hand for a known model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire_bench.limits import MachineLimits, MachineProbe, ModelWork, file_bytes
from quire_bench.situations import Lengths, parse_situations
from quire_interfaces import QuireError
from quire_models.config import ModelConfig
from quire_models.config_fields import DTYPE_BYTES
from quire_testkit.checkpoints import make_checkpoint

MACHINE = MachineLimits(read_bytes_per_s=29.9e9, matmul_flop_per_s=2.54e12)
# The shape of Qwen3-0.6B: 28 layers, 1024 wide, 16 heads and 8 KV heads of 128, MLP 3072, vocabulary 151,936, tied.
LAYERS = 28 * (1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072)
HEAD = 151_936 * 1024
WORK = ModelWork(
    weight_bytes=2 * (LAYERS + HEAD),
    layer_parameters=LAYERS,
    head_parameters=HEAD,
    kv_bytes_per_token=2 * 28 * 1024 * 2,
    attention_flop=4 * 28 * 2048,
)


def limit(name: str, work: ModelWork = WORK) -> float:
    (situation,) = parse_situations(name, Lengths())
    found = situation.limit(MACHINE, work)
    assert found is not None
    return found


def test_decode_of_one_request_is_bound_by_reading() -> None:
    read = 2 * (LAYERS + HEAD) + 192 * 114_688
    assert limit("decode") == pytest.approx(29.9e9 / read)
    assert limit("decode") == pytest.approx(24.6, abs=0.1)
    assert limit("concurrent-1") < limit("decode"), "the prompt takes its time, too"


def test_prefill_is_bound_by_multiplying() -> None:
    flop = 2 * (2048 * LAYERS + HEAD) + 4 * 28 * 2048 * 2048 * 2049 / 2
    assert limit("prefill") == pytest.approx(2048 * 2.54e12 / flop)


def test_many_requests_share_the_reading_until_multiplying_binds() -> None:
    assert limit("decode") < limit("concurrent-8") < 8 * limit("decode")
    prompts_s = (2 * 32 * (128 * LAYERS + HEAD) + 32 * 4 * 28 * 2048 * 128 * 129 / 2) / 2.54e12
    step_s = (2 * (LAYERS + HEAD) + 32 * 192 * 114_688) / 29.9e9
    assert limit("concurrent-32") == pytest.approx(32 * 128 / (prompts_s + 127 * step_s))
    # With more requests the rate no longer grows: each token has its own products.
    assert limit("concurrent-2000") < 1.4 * limit("concurrent-500")


def test_smaller_weights_raise_the_limit() -> None:
    small = replace(WORK, weight_bytes=WORK.weight_bytes // 2)
    assert 1.9 < limit("decode", small) / limit("decode") < 2
    assert limit("prefill", small) == limit("prefill")


@pytest.mark.parametrize("like", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_work_of_a_checkpoint(tmp_path: Path, like: str, dtype: str) -> None:
    folder = make_checkpoint(tmp_path / "model", like=like, dtype=dtype)
    model = ModelConfig.from_path(folder)
    work = ModelWork.of(model, dtype)
    size = (folder / "model.safetensors").stat().st_size
    assert model.tie_word_embeddings, "so that every weight in the file is read in a step"
    assert 0.95 * size < work.weight_bytes <= size
    int8 = ModelWork.of(model, dtype, "int8")
    # The embedding is looked up: the head is a copy of its own.
    assert int8.weight_bytes < 1.1 * work.weight_bytes / DTYPE_BYTES[dtype]
    assert int8.layer_parameters == work.layer_parameters


def test_an_untied_embedding_is_looked_up_not_read() -> None:
    tied = ModelConfig.from_path(_demo())
    untied = replace(tied, network=replace(tied.network, head=replace(tied.network.head, tied=False)))
    assert ModelWork.of(untied, "bfloat16") == ModelWork.of(tied, "bfloat16")


def _demo() -> Path:
    from quire_demo_model import checkpoint_path

    return Path(checkpoint_path())


def test_sizes_of_converted_models(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x" * 100)
    assert file_bytes(str(tmp_path / "model.gguf")) == 100
    (tmp_path / "openvino_model.bin").write_bytes(b"x" * 70)
    (tmp_path / "openvino_tokenizer.bin").write_bytes(b"x" * 1000)
    assert file_bytes(str(tmp_path)) == 70


def test_the_machine_is_measured_in_bounded_time() -> None:
    with MachineProbe("bfloat16", 1, timeout_s=120) as machine:
        assert 1e8 < machine.limits.read_bytes_per_s < 1e13
        assert 1e8 < machine.limits.matmul_flop_per_s < 1e16
        assert 1e8 < machine.sample("read") < 1e13
        assert 1e8 < machine.sample("multiply") < 1e16
        with pytest.raises(QuireError, match="limits failed"):
            machine.sample("colour")
    with pytest.raises(QuireError, match=r"longer than 0\.1 s \(--timeout\)"):
        MachineProbe("bfloat16", 1, timeout_s=0.1)
    with pytest.raises(QuireError, match="limits failed"):
        MachineProbe("no_dtype", 1, timeout_s=120)


def test_medians_of_rounds() -> None:
    rounds = [MachineLimits(read_bytes_per_s=read, matmul_flop_per_s=flop) for read, flop in ((1, 9), (5, 2), (3, 4))]
    assert MachineLimits.median(rounds) == MachineLimits(read_bytes_per_s=3, matmul_flop_per_s=4)
