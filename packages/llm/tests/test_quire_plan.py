"""The memory plan: right to the byte where the engine allocates, quick, and free of torch."""

from __future__ import annotations

import dataclasses
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.assemble import build_parts
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_demo_model import checkpoint_path
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_testkit.checkpoints import checkpoint_config, make_checkpoint

GB = 10**9


def big_model() -> ModelConfig:
    return ModelConfig.from_dict(checkpoint_config("qwen3", "0.6b"))


def test_weights_are_the_files_size(tmp_path: Path) -> None:
    for like in ("llama", "mistral", "qwen2", "qwen3"):
        folder = make_checkpoint(tmp_path / like, like=like, tie_word_embeddings=False)
        plan = make_plan(QuireConfig(), ModelConfig.from_path(folder))
        weights = sum(size for what, size in plan.ledger_bytes.items() if what.startswith("weights"))
        file = (folder / "model.safetensors").stat().st_size
        assert 0 <= file - weights < 16_384  # the header


def test_cache_is_allocated_as_planned(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    config = QuireConfig.of(model=str(folder), max_model_len=256, kv_cache_memory_bytes=1_000_000)
    plan = make_plan(config, ModelConfig.from_path(folder))
    parts = build_parts(config)
    caches = parts.executor._layers.kv_caches  # type: ignore[attr-defined]
    assert sum(cache.nbytes for cache in caches) == plan.ledger_bytes["KV cache"] <= 1_000_000
    assert parts.info.num_blocks == plan.kv_plan.num_blocks - 1
    assert parts.scheduler._allocator.usage().num_total_blocks == parts.info.num_blocks  # type: ignore[attr-defined]
    parts.executor.close()


def test_qwen3_06b_ledger() -> None:
    config = QuireConfig.of(max_model_len=4096, max_num_seqs=32, kv_cache_memory_bytes="4G")
    plan = make_plan(config, big_model(), free_bytes=20 * GB)
    assert sum(v for k, v in plan.ledger_bytes.items() if k.startswith("weights")) == 1_192_099_840
    # 28 layers x 2 x 8 heads x 128 x 2 bytes = 114,688 bytes per token.
    assert plan.ledger_bytes["KV cache"] == plan.kv_plan.num_blocks * 16 * 114_688
    assert plan.max_concurrency == pytest.approx(plan.num_kv_tokens / 4096, rel=1e-3)


def test_plans_for_a_device_that_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device must be one of cpu, cuda, rocm, .* got 'xpu:7'"):
        make_plan(QuireConfig.of(device="xpu:7"), big_model())


def test_graphs_are_planned_where_there_are_any() -> None:
    def graphs(**settings: Any) -> int:
        plan = make_plan(QuireConfig.of(max_model_len=4096, **settings), big_model(), free_bytes=100 * GB)
        return plan.ledger_bytes.get("graphs", 0)

    assert graphs() == graphs(device="cuda", enforce_eager=True) == 0
    few, many = (graphs(device="cuda", max_num_seqs=rows, enable_lora=False) for rows in (8, 256))
    # At least the logits of as many rows, in float32, and never more than a fifth of what weights take.
    assert 8 * 151_936 * 4 < few < many < 1.2 * GB
    assert many > 256 * 151_936 * 4
    # Launches of other graphs only: what they write to is shared.
    assert many < graphs(device="cuda", max_num_seqs=256, enable_lora=True) < 2 * many


def test_graphs_have_room_for_what_a_head_reads() -> None:
    """Of the demo model, whose head reads three layers; a draft model reads none."""
    model = ModelConfig.from_path(checkpoint_path())

    def graphs(method: str) -> int:
        settings = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 8, "num_speculative_tokens": 3}
        config = QuireConfig.of(speculative_method=method, **settings)
        return make_plan(config, model, free_bytes=10 * GB).ledger_bytes["graphs"]

    # For the 1,024 tokens of the largest mixed step: inputs of the layers, the same side by side, and where the head
    # finds them.
    assert graphs("eagle3") - graphs("draft_model") == 3 * 1024 * 3 * model.hidden_size * 2


def test_a_tier_on_disk_takes_its_copies() -> None:
    without, with_tier = (
        make_plan(QuireConfig.of(kv_disk_path=path), big_model(), free_bytes=20 * GB) for path in (None, "folder")
    )
    assert with_tier.ledger_bytes.keys() - without.ledger_bytes.keys() == {"copies on their way to disk"}
    assert list(with_tier.ledger_bytes)[-1] == "KV cache"
    assert with_tier.kv_plan.num_blocks < without.kv_plan.num_blocks
    assert with_tier.total_bytes <= 10 * GB


def test_cache_stops_growing_when_it_is_enough() -> None:
    plan = make_plan(QuireConfig.of(max_model_len=128, max_num_seqs=2), big_model(), free_bytes=200 * GB)
    assert plan.kv_plan.num_blocks == 1 + 2 * 8
    assert any("enough" in note for note in plan.notes)


def test_what_the_network_leaves_out_is_noted() -> None:
    model = big_model()
    model = dataclasses.replace(model, network=dataclasses.replace(model.network, notes=("no sparse attention",)))
    plan = make_plan(QuireConfig.of(max_model_len=128), model, free_bytes=20 * GB)
    assert "no sparse attention" in plan.notes


def test_too_little_memory_says_what_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"one request of max_model_len=40960 tokens needs 4\.70 GB of KV cache"
    ) as error:
        make_plan(QuireConfig(), big_model(), free_bytes=8 * GB)
    assert error.value.field == "max_model_len"
    text = str(error.value)
    assert re.search(r"\n  weights +1\.19 GB  --quantization, --dtype\n  activations ", text)
    advised = re.findall(r"(--\S+) ([\d.]+) \(it is [\d.]+\)", text)
    assert {flag for flag, _ in advised} == {"--max-model-len", "--gpu-memory-utilization"}
    for flag, value in advised:
        plan = make_plan(QuireConfig.of(**{flag: value}), big_model(), free_bytes=8 * GB)
        assert plan.fits
        assert plan.total_bytes <= plan.budget_bytes
    longest = int(dict(advised)["--max-model-len"])
    with pytest.raises(ConfigError):
        make_plan(QuireConfig.of(max_model_len=int(longest * 1.03)), big_model(), free_bytes=8 * GB)


@pytest.mark.parametrize(
    ("asked", "field", "flag"),
    [
        ({"kv_cache_memory_bytes": "10T"}, "kv_cache_memory_bytes", "--kv-cache-memory-bytes"),
        ({"num_gpu_blocks_override": 10**9}, "num_gpu_blocks_override", "--num-gpu-blocks-override"),
        ({"max_num_seqs": 10**9}, "max_model_len", "--max-num-seqs"),
        ({"max_num_batched_tokens": 10**15}, "max_model_len", "--max-num-batched-tokens"),
    ],
)
def test_absurd_amounts_are_answered_with_the_largest_that_fits(asked: dict[str, Any], field: str, flag: str) -> None:
    base = {"max_model_len": 2048} | asked
    with pytest.raises(ConfigError) as error:
        make_plan(QuireConfig.of(**base), big_model(), free_bytes=24 * GB)
    assert error.value.field == field
    (largest,) = re.findall(rf"{flag} (\d+) \(it is", str(error.value))
    name = flag.removeprefix("--").replace("-", "_")
    assert make_plan(QuireConfig.of(**base | {name: int(largest)}), big_model(), free_bytes=24 * GB).fits
    with pytest.raises(ConfigError):
        make_plan(QuireConfig.of(**base | {name: int(int(largest) * 1.03)}), big_model(), free_bytes=24 * GB)


def test_weights_that_are_too_large_are_told_apart_from_a_long_context() -> None:
    small = {"max_model_len": 512, "max_num_seqs": 4}
    words = r"weights and activations take 1\.86 GB, and 1\.50 GB of memory may be used on cpu \(3\.00 GB are free\)"
    with pytest.raises(ConfigError, match=words) as error:
        make_plan(QuireConfig.of(**small), big_model(), free_bytes=3 * GB)
    assert "--quantization int4" in str(error.value)
    assert make_plan(QuireConfig.of(**small, quantization="int4"), big_model(), free_bytes=3 * GB).fits
    with pytest.raises(ConfigError, match="no single flag makes it fit here"):
        make_plan(QuireConfig.of(), big_model(), free_bytes=GB // 10)


def test_a_plan_that_does_not_fit_can_be_looked_at() -> None:
    plan = make_plan(QuireConfig(), big_model(), free_bytes=8 * GB, must_fit=False)
    assert not plan.fits
    assert plan.budget_bytes == 4 * GB
    assert plan.total_bytes > plan.budget_bytes
    assert plan.max_concurrency == 1, "the ledger has room for one request"


def test_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the model's context of 40960"):
        make_plan(QuireConfig.of(max_model_len=40961), big_model())


def test_planning_loads_no_torch_and_is_quick(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    code = (
        "import sys; from quire import QuireConfig, make_plan; from quire_models.config import ModelConfig; "
        f"make_plan(QuireConfig(), ModelConfig.from_path({str(folder)!r})); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, because other tests run beside this one.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.mark.parametrize("free_bytes", [2 * GB, 3 * GB, 40 * GB])
def test_auto_takes_the_longest_context_that_fits(free_bytes: int) -> None:
    model = big_model()

    def plan(max_model_len: Any) -> Any:
        config = QuireConfig.of(max_model_len=max_model_len, gpu_memory_utilization=1.0, max_num_seqs=4)
        return make_plan(config, model, free_bytes=free_bytes)

    longest = plan("auto")
    assert longest == plan(-1)
    if longest.max_model_len < model.max_model_len:
        assert longest.max_concurrency >= 1
        with pytest.raises(ConfigError, match="one request of max_model_len"):
            plan(longest.max_model_len + longest.block_size)
        assert "the longest that one request has memory for" in longest.notes[0]
    else:
        assert free_bytes == 40 * GB
        assert longest.ledger_bytes == plan(None).ledger_bytes


def test_auto_without_room_for_anything_is_refused() -> None:
    with pytest.raises(ConfigError, match="one request of max_model_len=16 tokens needs"):
        make_plan(QuireConfig.of(max_model_len="auto"), big_model(), free_bytes=GB)
    with pytest.raises(ConfigError, match="max_model_len must be a number of at least 1, or auto, got 0"):
        QuireConfig.of(max_model_len=0)
