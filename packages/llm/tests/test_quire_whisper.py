"""Whisper by `LLM.generate`, beside Transformers: a random network that hears two seconds."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from scipy.ndimage import median_filter
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from quire import LLM, LoRARequest, SamplingParams
from quire.shared_engine import OfflineRequest
from quire_engine import alignment_params
from quire_interfaces import PoolingParams, RequestError, RequestOptions
from quire_models.layers.fused_decoder import FusedDecoder
from quire_testkit.tokenizers import write_tokenizer

START = 5
HEADS = [[0, 1], [1, 0], [1, 1]]
"""Those that are said to follow the words."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Samples = NDArray[np.float32]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=300, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=100,
        max_target_positions=64, decoder_start_token_id=START, eos_token_id=2, bos_token_id=2, pad_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None, init_std=0.3,
    )  # fmt: skip
    model = WhisperForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    model.generation_config.alignment_heads = HEADS
    model.save_pretrained(folder)
    write_tokenizer(folder, vocab_size=300)
    return folder, model


@pytest.fixture(scope="module")
def llm(reference: tuple[Path, WhisperForConditionalGeneration]) -> Iterator[LLM]:
    llm = LLM(str(reference[0]), dtype="float32", max_num_seqs=4, max_num_batched_tokens=250)
    yield llm
    llm.close()


def sound(seed: int, num_samples: int = 24_000) -> Samples:
    return (0.1 * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


def prompt(samples: Any, begun: Any = (START, 9)) -> dict[str, Any]:
    encoder = {"prompt": "", "multi_modal_data": {"audio": samples}}
    return {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": list(begun)}}


def features_of(samples: Samples) -> torch.Tensor:
    """The spectrogram by Transformers, [1, bins, frames]."""
    extractor = WhisperFeatureExtractor(feature_size=16)
    padded = np.pad(samples, (0, max(0, 32_000 - len(samples))))[:32_000]
    return torch.tensor(extractor._np_extract_fbank_features([padded], "cpu")).float()


def expected(
    model: WhisperForConditionalGeneration, samples: Samples, begun: tuple[int, ...] = (START, 9)
) -> list[int]:
    """What Transformers' network writes greedily."""
    features = features_of(samples)
    token_ids = list(begun)
    with torch.inference_mode():
        encoded = model.model.encoder(features)
        for _ in range(12):
            logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([token_ids])).logits
            token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(begun) :]


def aligned(
    model: WhisperForConditionalGeneration, samples: Samples, token_ids: list[int], num_places: int
) -> tuple[Samples, Samples]:
    """The heads' weights at the last tokens but one, from the second on, as OpenAI's Whisper prepares them; and how
    probable the tokens behind the second are."""
    with torch.inference_mode():
        output = model(
            features_of(samples), decoder_input_ids=torch.tensor([token_ids]), output_attentions=True, use_cache=False
        )
    attention = torch.stack([output.cross_attentions[layer][0, head] for layer, head in HEADS])[..., :num_places]
    weights = (attention / attention.sum(-1, keepdim=True)).numpy()
    weights = (weights - weights.mean(1, keepdims=True)) / weights.std(1, keepdims=True)
    weights = median_filter(weights, size=(1, 1, 7), mode="mirror").mean(0)[1:-1]
    chances = output.logits[0, 1:-2, : token_ids[-1]].softmax(-1)
    return weights, chances.gather(1, torch.tensor(token_ids[2:-1])[:, None])[:, 0].numpy()


def test_sounds_side_by_side_are_written_as_by_transformers(
    llm: LLM, reference: tuple[Path, WhisperForConditionalGeneration]
) -> None:
    sounds = [sound(0), sound(1, 32_000), sound(2, 500), sound(3, 40_000), sound(0)]
    outputs = llm.generate([prompt((each, 16_000)) for each in sounds], GREEDY, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected(reference[1], each) for each in sounds]
    assert len({tuple(each) for each in found}) > 2  # they tell sounds apart


def test_files_and_other_rates_are_heard(llm: LLM, reference: tuple[Path, WhisperForConditionalGeneration]) -> None:
    samples, file = sound(4), io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    own, encoded = llm.generate([prompt(samples), prompt(file.getvalue())], GREEDY, use_tqdm=False)
    assert list(own.outputs[0].token_ids) == list(encoded.outputs[0].token_ids) == expected(reference[1], samples)
    (other,) = llm.generate(prompt((sound(5, 8_000), 8_000)), GREEDY, use_tqdm=False)
    assert len(other.outputs[0].token_ids) == 12


def test_the_short_form_of_a_prompt_begins_the_output(
    llm: LLM, reference: tuple[Path, WhisperForConditionalGeneration]
) -> None:
    short: Any = {"prompt_token_ids": [START, 9], "multi_modal_data": {"audio": (sound(6), 16_000)}}
    (output,) = llm.generate(short, GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected(reference[1], sound(6))
    (bare,) = llm.generate({"encoder_prompt": short | {"prompt_token_ids": []}}, GREEDY, use_tqdm=False)
    assert list(bare.outputs[0].token_ids) == expected(reference[1], sound(6), (START,))


def test_texts_are_aligned_by_the_cross_attention_of_the_named_heads(
    llm: LLM, reference: tuple[Path, WhisperForConditionalGeneration]
) -> None:
    """Beside Transformers' weights, smoothed by SciPy's median filter; several texts share steps with generation."""
    sounds, num_places = [sound(7), sound(8, 32_000), sound(9)], 70
    texts = [[START, 9, *np.random.default_rng(each).integers(10, 290, 40).tolist(), 299] for each in range(3)]
    assert llm.engine_info.aligns_words
    prompts = llm._parsed([prompt((each, 16_000), text) for each, text in zip(sounds, texts, strict=True)])
    params = alignment_params(2, num_places)
    requests = [
        OfflineRequest(prompt=each.rendered, params=params, options=RequestOptions(), media=each.media)
        for each in prompts
    ]
    outputs = llm._shared.run_pooling(requests, window=3)
    for samples, text, output in zip(sounds, texts, outputs, strict=True):
        assert output.pooled is not None
        found = np.frombuffer(output.pooled.data, np.float32).reshape(output.pooled.shape)
        weights, probabilities = aligned(reference[1], samples, text, num_places)
        np.testing.assert_allclose(found[:, :-1], weights, atol=2e-3)
        np.testing.assert_allclose(found[:-1, -1], probabilities, rtol=1e-3)
        assert np.ptp(weights) > 1  # there is something to see


@pytest.mark.parametrize("params", [PoolingParams(task="embed"), PoolingParams(task="plugin")])
def test_it_aligns_and_pools_nothing_else(llm: LLM, params: PoolingParams) -> None:
    (parsed,) = llm._parsed([prompt((sound(7), 16_000), (START, 9, 11, 299))])
    request = OfflineRequest(prompt=parsed.rendered, params=params, options=RequestOptions(), media=parsed.media)
    with pytest.raises(RequestError, match="pools nothing") as refused:
        llm._shared.run_pooling([request], window=1)
    assert refused.value.param == "task"


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ("hello", "prompt", "reads audio"),
        ({"encoder_prompt": "hello"}, "prompt", "reads audio"),
        ({"encoder_prompt": {"prompt": "x", "multi_modal_data": {"audio": sound(0)}}}, "encoder_prompt", "a sound"),
        (prompt(sound(0)) | {"prompt": "x"}, "decoder_prompt", "leave one of them out"),
        (prompt([sound(0), sound(1)]), "multi_modal_data.audio", "one sound, got 2"),
        (prompt(b"no sound at all, only letters"), "multi_modal_data.audio[0]", "audio"),
        ({"prompt": "", "multi_modal_data": {"image": b"x"}}, "multi_modal_data.image[0]", "takes no image"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(llm: LLM, wrong: Any, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        llm.generate(wrong, GREEDY, use_tqdm=False)
    assert refused.value.param == param


def test_int8_weights_hear_nearly_the_same(reference: tuple[Path, WhisperForConditionalGeneration]) -> None:
    llm = LLM(str(reference[0]), dtype="float32", quantization="int8", max_num_seqs=2, max_num_batched_tokens=250)
    try:
        (output,) = llm.generate(prompt(sound(1)), GREEDY, use_tqdm=False)
        same = [a == b for a, b in zip(output.outputs[0].token_ids, expected(reference[1], sound(1)), strict=True)]
        assert sum(same) >= 6
    finally:
        llm.close()


def test_adapters_reach_encoder_and_decoder(
    reference: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path
) -> None:
    """As weights with the adapter added, in Transformers."""
    folder, model = reference
    merged = copy.deepcopy(model)
    chooser, tensors = torch.Generator().manual_seed(1), {}
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "v_proj", "fc1")):
            outputs, inputs = module.weight.shape
            a, b = (torch.randn(shape, generator=chooser) * 0.2 for shape in ((4, inputs), (outputs, 4)))
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += 2 * b @ a
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "fc1"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    adapter = LoRARequest("voice", 1, str(tmp_path))
    with LLM(str(folder), dtype="float32", max_num_seqs=4, max_num_batched_tokens=250, enable_lora=True) as llm:
        outputs = llm.generate(
            [prompt(sound(1)), prompt(sound(1))], GREEDY, use_tqdm=False, lora_request=[None, adapter]
        )
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected(model, sound(1)), expected(merged, sound(1))]
    assert found[0] != found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_decoder_in_one_call_has_the_bits_of_its_ops(
    reference: tuple[Path, WhisperForConditionalGeneration], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Steps in which words are aligned go op by op, beside others of the same request that do not."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    prompts = [prompt(sound(seed), (START, *range(9, 9 + seed))) for seed in (1, 2, 5)]
    settings: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 3, "max_num_batched_tokens": 250}
    found = []
    for bind in (FusedDecoder.bind, lambda *args, **options: None):
        monkeypatch.setattr(FusedDecoder, "bind", bind)
        with LLM(str(reference[0]), **settings) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            found.append((llm.engine_info.choices["layers"], [(each.token_ids, each.logprobs) for each in outputs]))
    assert [layers for layers, _ in found] == ["all in one call", "op by op"]
    assert found[0][1] == found[1][1]
