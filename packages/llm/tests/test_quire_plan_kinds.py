"""The memory plan against what a start-up then allocates, for every kind of KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from quire.assemble import build_parts
from quire.config import QuireConfig
from quire.encoder_plan import plan_encoder
from quire.plan import MemoryPlan, make_plan
from quire_interfaces import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentAttentionSpec,
    MambaSpec,
    Request,
    SamplingParams,
    SlidingLatentSpec,
    SlidingWindowSpec,
)
from quire_kv_cache import KVCacheConfig, KVCacheManager
from quire_models.config import ModelConfig
from quire_models.layers.scope import Parameter
from quire_runner import RunnerConfig, activation_bytes
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

STEP_TOKENS, MAX_LEN, MEMORY = 48, 192, 6_000_000
SHARE = 0.02

KINDS: dict[str, set[type[KVCacheSpec]]] = {
    "LlamaForCausalLM": {FullAttentionSpec},
    "Gemma2ForCausalLM": {FullAttentionSpec, SlidingWindowSpec},
    "GptOssForCausalLM": {FullAttentionSpec, SlidingWindowSpec},
    "Llama4ForCausalLM": {FullAttentionSpec, ChunkedLocalSpec},
    "DeepseekV3ForCausalLM": {LatentAttentionSpec},
    "DeepseekV32ForCausalLM": {LatentAttentionSpec},
    "DeepseekV4ForCausalLM": {LatentAttentionSpec, SlidingLatentSpec},
    "HYV4ForCausalLM": {LatentAttentionSpec},
    "AXK2ForCausalLM": {LatentAttentionSpec},
    "T5ForConditionalGeneration": {FullAttentionSpec, CrossAttentionSpec},
    "BartForConditionalGeneration": {FullAttentionSpec, CrossAttentionSpec},
    "Mamba2ForCausalLM": {MambaSpec},
    "BambaForCausalLM": {FullAttentionSpec, MambaSpec},
    "Qwen3NextForCausalLM": {FullAttentionSpec, MambaSpec},
    "Zamba2ForCausalLM": {FullAttentionSpec, MambaSpec},
    "NemotronHForCausalLM": {FullAttentionSpec, MambaSpec},
    "MiniMaxForCausalLM": {FullAttentionSpec, MambaSpec},
}
"""Architecture -> the kinds of cache that its layers have. A context is whole chunks of Llama 4's."""


@pytest.mark.parametrize("architecture", KINDS)
def test_the_plan_is_what_is_allocated(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    loaded: list[int] = []
    take = Parameter.take

    def counted(parameter: Parameter) -> Tensor:
        tensor = take(parameter)
        loaded.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(Parameter, "take", counted)
    config = QuireConfig.of(
        model=str(tmp_path), max_model_len=MAX_LEN, max_num_seqs=4, max_num_batched_tokens=STEP_TOKENS,
        kv_cache_memory_bytes=MEMORY, block_size=8,
    )  # fmt: skip
    plan = make_plan(config, ModelConfig.from_path(tmp_path))
    assert {type(group.spec) for group in plan.kv_plan.groups} == KINDS[architecture]
    parts = build_parts(config)
    weights = sum(size for what, size in plan.ledger_bytes.items() if what.startswith("weights"))
    assert weights == pytest.approx(sum(loaded), rel=SHARE)
    caches = [cache.untyped_storage() for cache in parts.executor._layers.kv_caches]  # type: ignore[attr-defined]
    allocated = sum({storage.data_ptr(): storage.nbytes() for storage in caches}.values())
    assert plan.ledger_bytes["KV cache"] == pytest.approx(allocated, rel=SHARE)
    assert MEMORY - sum(plan.kv_plan.tensor_block_bytes) < allocated <= MEMORY
    parts.executor.close()
    check_request(plan)


def test_the_first_convolutions_of_a_sound_are_planned() -> None:
    case = CASES["CohereAsrForConditionalGeneration"]
    encoder = {**case.fields["encoder_config"], "subsampling_conv_channels": 256, "num_mel_bins": 128}
    fields = {**case.fields, "encoder_config": encoder, "architectures": ["CohereAsrForConditionalGeneration"]}
    model = ModelConfig.from_dict({**fields, "model_type": "cohere_asr"})
    settings = QuireConfig.of(model="m", dtype="float32", max_num_batched_tokens=200, kv_cache_memory_bytes=1 << 24)
    plan = make_plan(settings, model, free_bytes=1 << 30)
    assert plan.max_encoder_len == 200
    convolutions = 200 * model.network.sound_width * 4
    assert convolutions <= plan.ledger_bytes["activations"] < 1.1 * convolutions
    alone = {"vocab_size": 200, "pad_token_id": 199, "encoder_config": encoder, "architectures": ["ParakeetForCTC"]}
    read = plan_encoder(settings, ModelConfig.from_dict({**alone, "model_type": "parakeet_ctc"}), free_bytes=1 << 34)
    assert read.ledger_bytes["activations"] >= read.max_encoder_len * model.network.sound_width * 4


def check_request(plan: MemoryPlan) -> None:
    """A request of the full length holds the blocks that the planned concurrency means, while it decodes."""
    cache = KVCacheManager(plan.kv_plan, KVCacheConfig(block_size=plan.block_size))
    num_blocks = plan.kv_plan.num_blocks - 1
    specs = [group.spec for group in plan.kv_plan.groups]
    encoder = max((spec.max_encoder_tokens for spec in specs if isinstance(spec, CrossAttentionSpec)), default=0)
    request = Request(
        request_id="long",
        prompt_token_ids=list(range(MAX_LEN - 16)),
        sampling_params=SamplingParams(),
        seed=0,
        max_tokens=16,
        encoder_token_ids=[5] * encoder,
    )
    most = 0
    while request.num_computed_tokens < MAX_LEN:
        prompt_left = len(request.prompt_token_ids) - request.num_computed_tokens
        count = min(STEP_TOKENS, max(prompt_left, 1))
        cached = cache.find_cached_prefix(request) if not request.num_computed_tokens else None
        assert cache.allocate(request, count, cached) is not None
        request.num_computed_tokens += count
        if prompt_left <= 0:
            most = max(most, num_blocks - cache.usage().num_free_blocks)
            request.output_token_ids.append(1)
    assert num_blocks / most == pytest.approx(plan.max_concurrency, rel=SHARE)


def test_scores_in_memory_are_planned(tmp_path: Path) -> None:
    """Inkling's attention is torch's, whose scores are beside the activations."""
    write_checkpoint(tmp_path, "InklingForCausalLM", CASES["InklingForCausalLM"])
    config = QuireConfig.of(
        model=str(tmp_path), max_model_len=MAX_LEN, max_num_seqs=4, max_num_batched_tokens=STEP_TOKENS,
        kv_cache_memory_bytes=MEMORY, block_size=8,
    )  # fmt: skip
    model = ModelConfig.from_path(tmp_path)
    scores = MAX_LEN * STEP_TOKENS * model.num_heads * 4
    runner = RunnerConfig(max_num_seqs=4, max_model_len=MAX_LEN, max_num_batched_tokens=STEP_TOKENS)
    without = activation_bytes(model, runner, dtype_bytes=4, kv_cache_dtype="float32")
    assert make_plan(config, model).ledger_bytes["activations"] >= without + 3 * scores
