"""Networks with an encoder and a decoder, from text to text: the tokens of Transformers' `generate`."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_interfaces import ConfigError, ContextLengthError, RequestError
from quire_models.config import ModelConfig
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS = 12
TEXTS = ["the river", "a much longer text about the gathering of pages, and of leaves", "so"]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PATTERN = "[ab]{3}-[0-9]{2}"
BART, T5 = "BartForConditionalGeneration", "T5ForConditionalGeneration"


def write_model(folder: Path, architecture: str, **generation: int) -> Any:
    case = ENCODER_CASES[architecture]
    case = ParityCase(config=case.config, fields={**case.fields, "vocab_size": 320}, weight_scale=case.weight_scale)
    oracle = write_checkpoint(folder, architecture, case)
    write_tokenizer(folder, vocab_size=320)
    if generation:
        oracle.generation_config = transformers.GenerationConfig(**generation)
        oracle.generation_config.save_pretrained(folder)
    return oracle


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp("bart")
    oracle = write_model(folder, BART, decoder_start_token_id=2, forced_bos_token_id=7, pad_token_id=1)
    with LLM(folder, num_gpu_blocks_override=200, block_size=4) as llm:
        yield llm, oracle


def generated(oracle: Any, encoder: list[int], begun: list[int] | None = None, **options: Any) -> list[int]:
    """New tokens of Transformers."""
    start = None if begun is None else torch.tensor([begun])
    options = {
        "max_new_tokens": NUM_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
        "forced_eos_token_id": None,
        **options,
    }
    tokens = oracle.generate(input_ids=torch.tensor([encoder]), decoder_input_ids=start, **options)[0].tolist()
    return tokens[1 if begun is None else len(begun) :]


def token_ids(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_bart_generates_as_transformers(bart: tuple[LLM, Any]) -> None:
    """The token that outputs are made to begin with is part of what the decoder begins with, not of the output."""
    llm, oracle = bart
    expected = [generated(oracle, llm.tokenizer.encode(text), max_new_tokens=NUM_TOKENS + 1) for text in TEXTS]
    assert {tokens[0] for tokens in expected} == {7}
    outputs = llm.generate(TEXTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens[1:] for tokens in expected]
    assert [output.prompt for output in outputs] == TEXTS
    for output in outputs:
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_t5_generates_as_transformers_when_memory_is_scarce(tmp_path: Path) -> None:
    oracle = write_model(tmp_path, T5)
    prompts = [llm_prompt * 3 for llm_prompt in ([5, 9, 12], [40], [77, 3, 5, 120, 8])]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(tmp_path, num_gpu_blocks_override=13, block_size=4, max_model_len=20) as llm:
        found = token_ids(llm, [*prompts, *prompts], params)
        assert llm.stats().num_preemptions_total > 0
    assert found == 2 * [generated(oracle, prompt) for prompt in prompts]


def test_the_decoders_prompt_can_be_given(bart: tuple[LLM, Any]) -> None:
    llm, oracle = bart
    encoder, begun = llm.tokenizer.encode(TEXTS[1]), [30, 31, 32, 33, 34]
    expected = generated(oracle, encoder, [2, *begun])
    pairs = [
        {"encoder_prompt": TEXTS[1], "decoder_prompt": {"prompt_token_ids": begun}},
        {"encoder_prompt": {"prompt_token_ids": encoder}, "decoder_prompt": [2, *begun]},
    ]
    assert token_ids(llm, pairs) == [expected, expected]
    (again,) = llm.generate(pairs[0], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 4, "what the decoder made of its prompt is shared, after the same input"
    (other,) = llm.generate({"encoder_prompt": TEXTS[0], "decoder_prompt": begun}, GREEDY, use_tqdm=False)
    assert other.num_cached_tokens == 0
    (nothing,) = token_ids(llm, {"encoder_prompt": TEXTS[0], "decoder_prompt": None})
    assert nothing == token_ids(llm, TEXTS[0])[0]


def test_completions_of_one_prompt(bart: tuple[LLM, Any]) -> None:
    llm, _ = bart
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, n=3, ignore_eos=True)
    (output,) = llm.generate(TEXTS[1], params, use_tqdm=False)
    alone = [
        token_ids(llm, TEXTS[1], SamplingParams(temperature=0.8, seed=3 + i, max_tokens=6, ignore_eos=True))[0]
        for i in range(3)
    ]
    assert [each.token_ids for each in output.outputs] == alone


def test_beams_are_transformers(bart: tuple[LLM, Any]) -> None:
    llm, oracle = bart
    encoder = llm.tokenizer.encode(TEXTS[1])
    expected = generated(oracle, encoder, [2, 7], num_beams=3, max_new_tokens=5, forced_bos_token_id=None)
    (output,) = llm.beam_search(TEXTS[1], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    assert output.outputs[0].token_ids == expected


def test_what_does_not_fit_is_refused(bart: tuple[LLM, Any], tmp_path: Path) -> None:
    llm, _ = bart
    with pytest.raises(
        ContextLengthError, match="the prompt has 257 tokens, and this model's encoder reads at most 256"
    ):
        llm.generate([[5] * 257], GREEDY, use_tqdm=False)
    with pytest.raises(ContextLengthError, match="the prompt has 255 tokens and max_tokens is 12"):
        llm.generate({"encoder_prompt": [5], "decoder_prompt": [5] * 254}, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="predicts nothing of them: leave prompt_logprobs out"):
        llm.generate("a", SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(RequestError, match="must be a token id from 0 to 319, got 320"):
        llm.generate({"encoder_prompt": [5], "decoder_prompt": [320]}, GREEDY, use_tqdm=False)
    with LLM(make_checkpoint(tmp_path), max_model_len=32, num_gpu_blocks_override=9) as other:  # noqa: SIM117
        with pytest.raises(RequestError, match="this model has no encoder"):
            other.generate({"encoder_prompt": "a", "decoder_prompt": None}, GREEDY, use_tqdm=False)


def test_the_cache_is_planned_and_allocated_alike(bart: tuple[LLM, Any], tmp_path: Path) -> None:
    llm, _ = bart
    info = llm.engine_info
    runner = llm.engine.core.parts.executor  # type: ignore[attr-defined]
    tensors = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner._layers.kv_caches
    }
    # Two layers keep their own tokens and what the encoder read in the same two tensors.
    assert sum(tensors.values()) == info.memory_bytes["KV cache"] == 200 * 2 * (2 * 4 * 64 * 4)
    tables = sum(table.table.nbytes for table in runner.rows.block_tables)
    assert info.memory_bytes["rows"] == runner.rows.token_ids.nbytes + tables
    config = QuireConfig.of(block_size=4, max_model_len=100, max_num_batched_tokens=64, kv_cache_memory_bytes=4_000_000)
    plan = make_plan(config, ModelConfig.from_path(llm.model_folder))
    assert plan.max_encoder_len == 64
    assert plan.max_concurrency == pytest.approx((plan.kv_plan.num_blocks - 1) / (100 / 4 + 64 / 4))
    assert any("max_num_batched_tokens" in note for note in plan.notes)
    # The encoder's share of a request, 16 blocks of 4 tokens, is there however short the decoder's context is.
    for num_blocks, advice in (
        (16, "what the encoder reads for one request, up to 64 tokens, needs 65.54 kB of KV cache"),
        (21, r"(?s)one request of max_model_len=100 tokens.*--max-model-len 1\d \(it is 100\)"),
    ):
        scarce = QuireConfig.of(
            block_size=4, max_model_len=100, max_num_batched_tokens=64, num_gpu_blocks_override=num_blocks
        )
        with pytest.raises(ConfigError, match=advice):
            make_plan(scarce, ModelConfig.from_path(llm.model_folder))
    drafting = QuireConfig.of(speculative_method="draft_model", speculative_model=str(llm.model_folder))
    with pytest.raises(ConfigError, match="which would not know what the encoder of this model has read"):
        make_plan(drafting, ModelConfig.from_path(llm.model_folder))
    write_model(tmp_path, T5)
    model = ModelConfig.from_path(tmp_path)
    assert make_plan(QuireConfig.of(max_model_len=1000), model).max_encoder_len == 1000 > model.max_model_len


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookup_drafts_change_no_token(tmp_path: Path, method: str) -> None:
    oracle = write_model(tmp_path, T5)
    with LLM(tmp_path, num_gpu_blocks_override=80, speculative_method=method, num_speculative_tokens=3) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        assert token_ids(llm, [[9] * 8], params) == [generated(oracle, [9] * 8, max_new_tokens=40)]


def test_an_output_can_be_held_to_a_pattern(bart: tuple[LLM, Any]) -> None:
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=PATTERN)
    )
    for output in bart[0].generate(TEXTS, params, use_tqdm=False):
        assert re.fullmatch(PATTERN, output.outputs[0].text), output.outputs[0].text


def test_adapters_are_pefts(tmp_path: Path) -> None:
    """On the encoder, on what cross attention keeps of it, and on the decoder; beside a request that has none."""
    import peft

    oracle = write_model(tmp_path / "model", BART)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj", "fc1"], init_lora_weights=False, task_type="SEQ_2_SEQ_LM"
    )
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about Transformers
        adapted = peft.get_peft_model(copy.deepcopy(oracle), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    prompt = [5, 90, 41, 200, 17, 8, 33]
    wanted = [generated(model, prompt, decoder_start_token_id=2) for model in (adapted, oracle)]
    assert wanted[0] != wanted[1]
    adapter = LoRARequest(lora_name="a", lora_path=str(tmp_path / "adapter"))
    with LLM(tmp_path / "model", num_gpu_blocks_override=200, enable_lora=True, max_loras=1) as llm:
        for _ in range(2):  # the second time from the prefix cache, which tells them apart
            outputs = llm.generate([prompt, prompt], GREEDY, use_tqdm=False, lora_request=[adapter, None])
            assert [output.outputs[0].token_ids for output in outputs] == wanted
