"""Models that cannot be run: the message says what they are, what is nearest, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model, resolve_model
from quire_models.registry import ARCHITECTURES
from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.oracle import write_checkpoint


def refusal(**fields: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        ModelConfig.from_dict(fields)
    text = str(error.value)
    assert len(text) < 500
    assert sum(name in text.replace(",", " ").replace(";", " ").split() for name in ARCHITECTURES) <= 4
    return text


@pytest.mark.parametrize(
    ("architecture", "model_type", "kind", "nearest"),
    [
        ("Wav2Vec2Model", "wav2vec2", "hears or speaks", ""),
        ("ParakeetEncoder", "parakeet_encoder", "transcribes speech, as Whisper, Qwen3-ASR", "ParakeetFor"),
        ("Wav2Vec2ForCTC", "wav2vec2", "transcribes speech", ""),
        ("Siglip2Model", "siglip2", "sees pictures", ""),
        ("ViTForImageClassification", "vit", "looks at pictures", ""),
        ("FNetForMaskedLM", "fnet", "fills gaps in texts", ""),
        ("T5ForSequenceClassification", "t5", "classifies texts", "T5EncoderModel, T5ForConditionalGeneration"),
        ("LLamaForRewardModel", "llama", "gives texts a reward", "LlamaForCausalLM"),
        ("LLaDAModelLM", "llada", "writes by diffusion: it refines a block", ""),
        ("SDARForCausalLM", "sdar", "writes by diffusion", ""),
        ("DiffusionGemmaForBlockDiffusion", "diffusion_gemma", "writes by diffusion", ""),
        ("MT5EncoderModels", "mt5", "makes embeddings", "MT5EncoderModel"),
        ("LLamaForCausalLM", "llama", "LLamaForCausalLM is not supported", "LlamaForCausalLM"),
    ],
)
def test_the_kind_and_the_nearest_are_named(architecture: str, model_type: str, kind: str, nearest: str) -> None:
    text = refusal(architectures=[architecture], model_type=model_type)
    assert kind in text
    assert f"nearest to it are {nearest}" in text if nearest else True
    assert "docs/models.md lists all" in text


def test_a_text_half_that_continues_no_texts_makes_no_language_model() -> None:
    halves = {"text_config": {"model_type": "siglip2_text_model"}, "vision_config": {}}
    assert "it sees pictures" in refusal(architectures=["Siglip2Model"], model_type="siglip2", **halves)


def test_a_file_that_names_nothing() -> None:
    assert "no architecture has the model_type 'foo'" in refusal(model_type="foo")
    assert "nearest to it are Qwen3ForCausalLM" in refusal(model_type="qwen_3")
    assert "it names no architecture" in refusal()


FOLDERS: list[tuple[dict[str, str], str]] = [
    ({}, "it is empty"),
    ({"tokenizer.json": ""}, "it has a tokenizer only"),
    ({"pytorch_model.bin": ""}, "has weights but no config.json"),
    ({"model.safetensors": "", "tokenizer.json": ""}, "has weights but no config.json"),
    ({"a.gguf": "", "b.gguf": ""}, "has GGUF files; give the path of one"),
    ({"model_index.json": "{}"}, "is a pipeline of the Diffusers library"),
    ({"params.json": "{}", "consolidated.safetensors": ""}, "load_format auto or mistral"),
    ({"params.json": "{}", "consolidated.00.pth": ""}, "of others, download the files for Transformers"),
    ({"inner/config.json": "{}"}, "the folder 'inner' in it has one"),
    ({"snapshots/abc/config.json": "{}"}, "snapshots/abc'"),
    ({"notes.txt": ""}, "it has notes.txt"),
    ({"adapter_config.json": '{"base_model_name_or_path": "org/base"}'}, "serve its base model 'org/base', and give"),
    ({"adapter_config.json": "{"}, "serve the model that it was trained on, and give the adapter as --lora-modules"),
]


@pytest.mark.parametrize(("files", "words"), FOLDERS)
def test_a_folder_without_config_json_says_what_it_is(files: dict[str, str], words: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError) as error:
        ModelConfig.from_path(tmp_path)
    assert words in str(error.value)


def test_a_path_with_a_typo_names_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "my-model" / "v1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"did you mean '{tmp_path}/my-model'"):
        resolve_model(tmp_path / "my-modle" / "v1")
    with pytest.raises(CheckpointError, match=f"did you mean '{tmp_path}/my-model/v1'"):
        resolve_model(tmp_path / "my-model" / "v11")
    with pytest.raises(CheckpointError) as error:
        resolve_model(tmp_path / "something else")
    assert "did you mean" not in str(error.value)


def test_a_file_of_a_checkpoint_is_told_to_be_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match=f"is a file; give the folder of a checkpoint, '{tmp_path}'"):
        resolve_model(file)


def test_a_class_with_attentions_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    """GPT-Neo looks its attention up in a table that nothing can be registered in."""
    fields = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 200, "max_position_embeddings": 128}
    case = ParityCase(config="GPTNeoConfig", fields=fields | {"attention_types": [[["global", "local"], 1]]})
    write_checkpoint(tmp_path, "GPTNeoForCausalLM", case)
    with pytest.raises(CheckpointError, match=r"^Transformers' GPTNeoForCausalLM does not let its attention be exch"):
        load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
