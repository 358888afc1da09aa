"""generation_config.json: every field that Transformers honours is used, or said not to be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from quire import LLM, SamplingParams
from quire.config import ModelSettings
from quire.generation_config import generation_note, read_generation_defaults
from quire_interfaces import CheckpointError
from quire_testkit.checkpoints import make_checkpoint

HARMLESS = {
    "eos_token_id": [1, 2], "bos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 2, "forced_bos_token_id": 3,
    "do_sample": True, "use_cache": True, "cache_implementation": "hybrid", "transformers_version": "4.50.0",
    "_from_model_config": True, "output_scores": True, "return_dict_in_generate": True, "num_assistant_tokens": 5,
    "num_beams": 1, "length_penalty": 2.0, "early_stopping": True, "typical_p": 1.0, "max_length": 20,
    "num_return_sequences": 1, "no_repeat_ngram_size": 0, "temperature": 0.5,
}  # fmt: skip
SAID: dict[str, Any] = {
    "begin_suppress_tokens": [220, 7], "forced_eos_token_id": 2, "sequence_bias": [[[7], -5.0]], "typical_p": 0.9,
    "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "num_beams": 4, "penalty_alpha": 0.6, "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3, "encoder_repetition_penalty": 1.2, "min_length": 10, "min_new_tokens": 10,
    "max_new_tokens": 2048, "max_length": 4096, "exponential_decay_length_penalty": [10, 1.1], "guidance_scale": 2.0,
    "watermarking_config": {"bias": 2.5}, "dola_layers": "low", "token_healing": True, "top_h": 0.4,
    "num_return_sequences": 3, "force_words_ids": [[1]], "constraints": ["x"], "a_new_field": 1, "max_time": 5.0,
}  # fmt: skip
USED: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (5, "top_k", 5),
    "min_p": (0.1, "min_p", 0.1),
    "repetition_penalty": (1.1, "repetition_penalty", 1.1),
    "suppress_tokens": ([1, 2], "bad_words_token_ids", ((1,), (2,))),
    "bad_words_ids": ([[1, 2], [3]], "bad_words_token_ids", ((1, 2), (3,))),
    "stop_strings": (["\n", "END"], "stop", ("\n", "END")),
}


def note(folder: Path) -> str:
    return generation_note(ModelSettings(), folder)


def write(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", USED)
def test_fields_that_requests_have_are_their_defaults(tmp_path, name):
    value, field, expected = USED[name]
    assert read_generation_defaults(write(tmp_path, **{name: value})) == {field: expected}
    assert note(tmp_path) == ""
    assert read_generation_defaults(write(tmp_path, **{name: None})) == {}


def test_one_stop_string_may_stand_alone(tmp_path):
    assert read_generation_defaults(write(tmp_path, stop_strings="END")) == {"stop": ("END",)}


@pytest.mark.parametrize("name", SAID)
def test_fields_without_a_counterpart_are_said_with_their_value(tmp_path, name):
    assert read_generation_defaults(write(tmp_path, **{**HARMLESS, name: SAID[name]})) == {"temperature": 0.5}
    assert note(tmp_path).startswith("generation_config.json: requests get no default from ")
    assert f"{name} ({json.dumps(SAID[name])})" in note(tmp_path)
    assert ("length_penalty (2.0)" in note(tmp_path)) == (name == "num_beams")
    assert generation_note(ModelSettings(generation_config="vllm"), tmp_path) == ""


def test_fields_that_change_no_output_are_not(tmp_path):
    assert read_generation_defaults(write(tmp_path, **HARMLESS)) == {"temperature": 0.5}
    assert note(tmp_path) == ""


def test_every_field_of_transformers_is_used_or_said_or_without_effect(tmp_path):
    """Set to something, each field has one of the three fates; the last are those listed here and no others."""
    silent = set()
    for name in GenerationConfig().to_dict():
        found = read_generation_defaults(write(tmp_path, **{name: USED[name][0] if name in USED else 7}))
        if not found and not note(tmp_path):
            silent.add(name)
    assert silent == {
        "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
        "assistant_lookbehind", "bos_token_id", "cache_config", "cache_implementation", "compile_config",
        "decoder_start_token_id", "disable_compile", "do_sample", "early_stopping", "eos_token_id",
        "forced_bos_token_id", "is_assistant", "length_penalty", "low_memory", "max_cache_len",
        "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "diversity_penalty", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
        "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values",
        "renormalize_logits", "return_dict_in_generate", "speculation_type", "target_lookbehind",
        "transformers_version", "use_cache", "continuous_batching_config",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suppress_tokens": "all"}, "suppress_tokens must be a token id or a list of token ids, is 'all'"),
        ({"bad_words_ids": [1, 2]}, "bad_words_ids must be a list of lists of token ids"),
        ({"bad_words_ids": [["x"]]}, "bad_words_ids must be a token id or a list of token ids"),
        ({"stop_strings": [1]}, "stop_strings must be a list of strings"),
    ],
)
def test_values_that_are_wrong_name_the_file_and_the_field(tmp_path, fields, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        read_generation_defaults(write(tmp_path, **fields))
    assert str(tmp_path / "generation_config.json") in str(raised.value)


def test_suppressed_tokens_are_in_no_output_of_default_requests(tmp_path, caplog):
    folder = tmp_path / "model"
    make_checkpoint(folder, size="tiny", dtype="float32")
    with LLM(str(folder), max_model_len=64, num_threads=1) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        plain = llm.generate("Hello", greedy, use_tqdm=False)[0].outputs[0].token_ids
    write(folder, eos_token_id=[], suppress_tokens=[plain[0]], stop_strings=["zzzz"], typical_p=0.5)
    with LLM(str(folder), max_model_len=64, num_threads=1) as llm:
        said = [text for text in llm.engine_info.extra["notes"] if "typical_p (0.5)" in text]
        assert len(said) == 1
        assert said[0] in caplog.text
        defaults = llm.get_default_sampling_params()
        assert (defaults.bad_words_token_ids, defaults.stop) == (((plain[0],),), ("zzzz",))
        defaults = dataclasses.replace(defaults, temperature=0.0, max_tokens=4)
        assert plain[0] not in llm.generate("Hello", defaults, use_tqdm=False)[0].outputs[0].token_ids
