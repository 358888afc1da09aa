"""Adapters against PEFT: 32 of them, of mixed rank and kind, in one batch with requests that have none.

PEFT runs one adapter at a time; whatever else is in a step here, tokens must be the same.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, LoRARequest, RequestError, RequestOptions, SamplingParams
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_ADAPTERS, NUM_TOKENS = 32, 6
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
KINDS: tuple[dict[str, Any], ...] = (
    {"target_modules": ATTENTION + MLP},
    {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"target_modules": ATTENTION + MLP, "use_dora": True},
    {"target_modules": "all-linear", "rank_pattern": {"k_proj": 5, r"layers\.1\..*up_proj": 1}},
    {"target_modules": r".*\.(down|o)_proj", "alpha_pattern": {"o_proj": 3}, "lora_bias": True},
    {"target_modules": ["gate_proj", "q_proj"], "layers_to_transform": [0, 2], "bias": "lora_only"},
    {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    {"target_modules": ["q_proj", "k_proj"], "use_dora": True, "bias": "lora_only", "exclude_modules": r".*\.0\..*"},
)
"""Fields of PEFT's configuration."""


def write_adapter(base: Any, folder: Path, seed: int, fields: dict[str, Any] | None = None) -> Any:
    """A random adapter in PEFT's files, and the network that has it. fields: Of PEFT's configuration; None for those of
    one of `KINDS`."""
    from peft import LoraConfig, get_peft_model

    chooser = random.Random(seed)
    fields = fields or KINDS[seed % len(KINDS)]
    torch.manual_seed(seed)
    config = LoraConfig(
        r=chooser.choice([1, 2, 3, 8, 16]), lora_alpha=chooser.choice([2, 8]), init_lora_weights=False,
        task_type="CAUSAL_LM", **fields,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about Transformers
        model = get_peft_model(copy.deepcopy(base), config)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_", "modules_to_save", "bias")) and parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.15
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that embeddings are saved, too
        model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path | None], list[list[int]], list[list[int]]]:
    """Folder of the network; per request its adapter, its prompt, and PEFT's tokens."""
    folder = tmp_path_factory.mktemp("network")
    base = tiny_hf_checkpoint(folder, "qwen2", tie_word_embeddings=False, num_hidden_layers=3)
    base.generation_config.eos_token_id = None
    write_tokenizer(folder, vocab_size=base.config.vocab_size)
    places: list[Path | None] = []
    prompts: list[list[int]] = []
    expected: list[list[int]] = []
    chooser = random.Random(0)
    shared = [chooser.randrange(3, 300) for _ in range(20)]
    for seed in range(NUM_ADAPTERS + 8):
        place = None if seed >= NUM_ADAPTERS else tmp_path_factory.mktemp(f"adapter-{seed}")
        model = base if place is None else write_adapter(base, place, seed)
        # Beginnings that all share, so that a prefix cache that does not know adapters is found out.
        prompts.append(shared + [chooser.randrange(3, 300) for _ in range(chooser.choice([1, 3, 20]))])
        ids = torch.tensor(prompts[-1:])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
            )
        expected.append(out[0, ids.shape[1] :].tolist())
        places.append(place)
    return folder, places, prompts, expected


SITUATIONS: dict[str, dict[str, Any]] = {
    "whole prompts, a step ahead": {"async_scheduling": True, "max_loras": 32},
    "chunks, few slots, preemption": {
        "async_scheduling": False, "max_loras": 3, "max_cpu_loras": 5, "block_size": 4, "max_num_batched_tokens": 24,
        "num_gpu_blocks_override": 24, "max_num_seqs": 12,
    },
    "chunks, few slots, a step ahead": {
        "async_scheduling": True, "max_loras": 2, "max_num_batched_tokens": 33, "num_gpu_blocks_override": 30,
        "block_size": 8, "max_num_seqs": 10,
    },
    "layer by layer": {"async_scheduling": False, "max_loras": 32, "attention_backend": "torch"},
}  # fmt: skip


@pytest.fixture(params=SITUATIONS)
def llm(request: pytest.FixtureRequest, tiny) -> Iterator[LLM]:
    settings = {"max_model_len": 64, "max_num_seqs": 64, "num_gpu_blocks_override": 400, **SITUATIONS[request.param]}
    with LLM(tiny[0], enable_lora=True, max_lora_rank=16, dtype="float32", **settings) as llm:
        yield llm


def test_tokens_are_pefts(llm: LLM, tiny) -> None:
    _, places, prompts, expected = tiny
    adapters = [None if place is None else LoRARequest(lora_name=place.name, lora_path=str(place)) for place in places]
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time with their prompts in the prefix cache
        outputs = llm.generate(
            [prompts[i] for i in order], params, use_tqdm=False, lora_request=[adapters[i] for i in order]
        )
        got = {i: list(output.outputs[0].token_ids) for i, output in zip(order, outputs, strict=True)}
        assert [got[i] for i in range(len(prompts))] == expected
    stats = llm.stats()
    assert stats.prefix_cache_hit_tokens_total > 0
    if llm.config.scheduler.max_num_batched_tokens < 30:
        assert stats.num_preemptions_total > 0
    llm.engine.core.parts.check_integrity()


def test_whole_prompts_beside_requests_that_decode(tiny) -> None:
    """One batch of all adapters: half of the requests have their whole prompts in one step, the others theirs in a step
    with the first half's next tokens."""
    folder, places, prompts, expected = tiny
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 64, "num_gpu_blocks_override": 400}
    settings |= {"max_loras": NUM_ADAPTERS, "max_lora_rank": 16, "max_cpu_loras": NUM_ADAPTERS, "dtype": "float32"}
    with LLM(folder, enable_lora=True, async_scheduling=False, enable_prefix_caching=False, **settings) as llm:
        order = random.Random(2).sample(range(len(prompts)), len(prompts))
        halves, got, which = (order[::2], order[1::2]), dict[int, list[int]](), dict[str, int]()
        for half in halves:
            for i in half:
                place = places[i]
                if place is not None:
                    llm.load_adapter(place.name, str(place))
                name = llm.engine.add_request(prompts[i], params, RequestOptions(adapter=place.name if place else None))
                which[name] = i
            before = llm.stats()
            llm.engine.step()
            stats = llm.stats()
            read = stats.num_prompt_tokens_total - before.num_prompt_tokens_total
            assert read == sum(len(prompts[i]) for i in half)
            assert stats.num_generation_tokens_total - before.num_generation_tokens_total == len(which)
        assert stats.num_adapters_running == NUM_ADAPTERS
        while llm.engine.has_unfinished_requests():
            got |= {which[out.request_id]: list(out.outputs[0].token_ids) for out in llm.engine.step()}
        assert [got[i] for i in range(len(prompts))] == expected


@pytest.mark.parametrize("backend", [None, "torch"])
def test_tokens_are_pefts_while_adapters_move_into_weights_and_out(tiny, backend: str | None) -> None:
    """Each adapter has the batch to itself for long enough, then runs beside requests of others; requests without one
    keep their bits."""
    folder, places, prompts, expected = tiny
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 400}
    settings |= {"max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 4, "dtype": "float32", "lora_merge_after": 2}
    chooser = random.Random(3)
    plain = [i for i, place in enumerate(places) if place is None]

    def run(llm: LLM, which: list[int], params: SamplingParams = params) -> list[Any]:
        requests = [
            None if place is None else LoRARequest(lora_name=place.name, lora_path=str(place)) for place in places
        ]
        outputs = llm.generate(
            [prompts[i] for i in which], params, use_tqdm=False, lora_request=[requests[i] for i in which]
        )
        for i, output in zip(which, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == expected[i], i
        return [output.outputs[0].logprobs for output in outputs]

    with LLM(folder, enable_lora=True, attention_backend=backend, **settings) as llm:
        observed = dataclasses.replace(params, logprobs=5)
        before = run(llm, plain, observed)
        merges = 0
        for seed in chooser.sample(range(NUM_ADAPTERS), 12):
            is_merged = KINDS[seed % len(KINDS)].keys().isdisjoint({"use_dora", "lora_bias", "bias"})
            is_merged = is_merged and seed % len(KINDS) < 6
            for _ in range(6):  # 21 matrices at most, and a step that counts before the first
                run(llm, [seed])
            merges += is_merged
            assert llm.stats().num_adapter_merges_total == merges
            others = chooser.sample([i for i in range(len(places)) if i != seed], 3)
            run(llm, [seed, *others, *chooser.sample(plain, 2)])
        assert merges >= 3
        assert run(llm, plain, observed) == before
        if backend is None:
            certain = dataclasses.replace(params, deterministic=True)
            run(llm, plain, certain)
            with pytest.raises(RequestError, match="lora_merge_after at 0") as refusal:
                run(llm, [0], certain)
            assert refusal.value.param == "deterministic"


@pytest.mark.parametrize("architecture", [
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM",
    "SmolLM3ForCausalLM",
])  # fmt: skip
def test_adapters_of_layers_with_other_norms_and_rotations(architecture: str, tmp_path: Path) -> None:
    """A request with an adapter beside one without, where op `decoder_stack` has more to do than for Llama."""
    case = CASES[architecture]
    write_checkpoint(tmp_path, architecture, dataclasses.replace(case, fields={**case.fields, "vocab_size": 320}))
    base = getattr(transformers, architecture).from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    base.generation_config.eos_token_id = None
    write_tokenizer(tmp_path, vocab_size=320)
    mlp = ["gate_up_proj", "down_proj"] if architecture == "Glm4ForCausalLM" else MLP
    adapted = write_adapter(base, tmp_path / "adapter", 1, {"target_modules": ATTENTION + mlp})
    prompt = random.Random(1).choices(range(3, 320), k=30)
    expected = []
    for model in (adapted, base):
        with torch.inference_mode():
            expected.append(model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1))
    assert (expected[0] - expected[1]).abs().max() > 0.05
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    requests = [LoRARequest(lora_name="adapter", lora_path=str(tmp_path / "adapter")), None]
    with LLM(tmp_path, enable_lora=True, max_lora_rank=16, dtype="float32", max_model_len=64, max_num_seqs=4) as llm:
        outputs = llm.generate([prompt] * 2, params, use_tqdm=False, lora_request=requests)
    for output, wanted in zip(outputs, expected, strict=True):
        found = output.outputs[0].logprobs[0]
        assert len(found) > 4
        for token_id, entry in found.items():
            assert entry.logprob == pytest.approx(float(wanted[token_id]), abs=2e-4)
