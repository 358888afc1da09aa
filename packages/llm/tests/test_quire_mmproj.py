"""Towers from another folder than the language model's (`mmproj`), and adapters that come with media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_quire_media_adapters import PARAMS, SETTINGS, TEXT, write_adapter

from quire import LLM, QuireConfig
from quire.demo import seeing_demo
from quire_interfaces import CheckpointError
from quire_testkit.seeing_models import SeeingModel, drawing

PROMPT = {"prompt": TEXT, "multi_modal_data": {"image": [drawing(1)]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"))


def write_language_model(model: SeeingModel, folder: Path, **fields: Any) -> Path:
    """The model's language half, as a checkpoint of its own."""
    folder.mkdir()
    config = model.network.config.text_config.to_dict() | {"architectures": ["LlamaForCausalLM"]} | fields
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model.folder / name).read_bytes())
    tensors = load_file(model.folder / "model.safetensors")
    names = {name: name.replace("language_model.model.", "model.").replace("language_model.", "") for name in tensors}
    named = {
        names[name].replace("model.model.", "model."): tensor.contiguous()
        for name, tensor in tensors.items()
        if "language_model" in name or name.startswith("lm_head")
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens(llm: LLM, prompts: list[Any], **more: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, **more)
    return [list(each.outputs[0].token_ids) for each in outputs]


def test_towers_of_another_folder_and_the_adapter_that_images_bring(model: SeeingModel, tmp_path: Path) -> None:
    language = write_language_model(model, tmp_path / "language")
    names = r".*language_model.*\.(q_proj|v_proj|down_proj)"
    network, adapted = model.network, write_adapter(model.network, tmp_path / "adapter", names)
    with LLM(language, mmproj=str(model.folder), **SETTINGS) as llm:
        assert "weights: towers" in llm.engine_info.memory_bytes
        plain = tokens(llm, [PROMPT, "some words"])
    assert plain[0] == model.expected(TEXT, [drawing(1)], PARAMS.max_tokens or 0)
    try:
        model.network = adapted
        expected = model.expected(TEXT, [drawing(1)], PARAMS.max_tokens or 0)
    finally:
        model.network = network
    defaults = {"image": str(tmp_path / "adapter")}
    with LLM(language, mmproj=str(model.folder), default_mm_loras=defaults, **SETTINGS) as llm:
        assert list(llm.engine_info.adapters) == ["adapter"]
        assert tokens(llm, [PROMPT, "some words"]) == [expected, plain[1]], "texts run with no adapter"
        assert tokens(llm, ["some words"], lora_request="adapter") != [plain[1]], "which requests may choose, too"
    with LLM(language, mmproj=str(model.folder), language_model_only=True, **SETTINGS) as llm:
        assert llm.media is None
        assert tokens(llm, ["some words"]) == [plain[1]]


def test_towers_that_do_not_fit(model: SeeingModel, tmp_path: Path) -> None:
    language = write_language_model(model, tmp_path / "language", hidden_size=16)
    with pytest.raises(
        CheckpointError, match=r"are made for embeddings of \d+, and those of the language model have 16"
    ):
        LLM(language, mmproj=str(model.folder), **SETTINGS)
    with pytest.raises(CheckpointError, match="has no towers that are served; it is a LlamaForCausalLM"):
        LLM(language, mmproj=str(language), **SETTINGS)


def test_the_demo_model_sees_unless_something_else_is_said() -> None:
    seeing = seeing_demo(QuireConfig.of(max_num_seqs=3))
    assert seeing.model.mmproj
    assert list(seeing.lora.default_adapters().items()) == [("image", "demo-vision")]
    assert seeing.scheduler.max_num_seqs == 3
    for settings in ({"model": "x"}, {"mmproj": "x"}, {"language_model_only": True}, {"enable_lora": False}):
        config = QuireConfig.of(**settings)
        assert seeing_demo(config) is config
