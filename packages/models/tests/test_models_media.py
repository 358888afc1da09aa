"""Networks with towers give the logits of Transformers' whole forward, and refuse what they cannot take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_media import MediaPrompt
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError, ConfigError, Modality, read_json
from quire_models import ModelConfig, Network, load_media_towers, load_model
from quire_models.layers.rotary import RotaryTable
from quire_models.layers.whole_spans import path_table, visible_spans
from quire_models.media_spec import UNSERVED
from quire_models.rope_config import RopeConfig
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.media_items import media_item
from quire_testkit.parity.oracle import write_checkpoint

QWEN3 = "Qwen3VLForConditionalGeneration"
GLM = "Glm4vForConditionalGeneration"
ADDED = {"VoxtralRealtimeForConditionalGeneration"}
"""Classes whose prompts have no places for items: those are added to all tokens."""


def load(folder: Path, **options: Any) -> Network:
    return load_model(ModelConfig.from_path(folder), folder, dtype="float32", **options)


@pytest.mark.parametrize("architecture", sorted(MEDIA_CASES.keys() - ADDED))
def test_prompts_with_items_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    spec = network.config.media
    assert spec is not None
    for num_items in (1, 2):
        prompt = MediaPrompt(network, architecture, num_items)
        assert all(row.shape == (spec.width,) for row in prompt.embeds.values())
        with torch.no_grad():
            expected = model(**prompt.oracle_inputs(model)).logits[0]
        positions = prompt.positions(model)
        assert spec.has_mrope or positions is None
        for chunk in (len(prompt.token_ids), 5):
            logits = prompt.logits(network, chunk, positions)
            assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture(scope="module", params=[QWEN3, GLM], ids=["native", "fallback"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("media")
    write_checkpoint(folder, request.param, MEDIA_CASES[request.param])
    return request.param, folder


def test_language_model_only_builds_no_towers(checkpoint: tuple[str, Path]) -> None:
    architecture, folder = checkpoint
    network = load(folder, language_model_only=True)
    assert network.towers is None
    with pytest.raises(ConfigError, match=f"{architecture} has no towers here"):
        network.encode_media(*_single(architecture))
    whole = load(folder)
    assert whole.towers is not None
    towers = {name: t for name, t in load_file(folder / "model.safetensors").items() if "visual" in name}
    assert whole.towers.num_parameters == sum(tensor.numel() for tensor in towers.values())


def _single(architecture: str) -> tuple[Modality, list[dict[str, torch.Tensor]]]:
    modality, item = media_item(architecture, 0)
    return modality, [item]


def test_experts_may_be_stored_with_their_inputs_first(tmp_path: Path) -> None:
    """As Qwen3-VL's are published."""
    architecture = "Qwen3VLMoeForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    prompt = MediaPrompt(load(tmp_path), architecture, 0)
    expected, file = prompt.logits(load(tmp_path), 8), tmp_path / "model.safetensors"
    tensors = load_file(file)
    turned = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
    assert any(turned[name].shape != tensors[name].shape for name in tensors)
    save_file(turned, file, metadata={"format": "pt"})
    assert torch.equal(prompt.logits(load(tmp_path), 8), expected)


def test_a_modality_without_a_tower_is_refused(checkpoint: tuple[str, Path]) -> None:
    with pytest.raises(ConfigError, match="takes image, video, and no audio"):
        load(checkpoint[1]).encode_media(Modality.AUDIO, [])


def test_missing_weights_of_towers_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, QWEN3, MEDIA_CASES[QWEN3])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith("visual.blocks.1.norm1.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of its towers: .*blocks\.1\.norm1\.weight"):
        load(tmp_path)


def test_media_that_are_not_served_leave_the_text(
    checkpoint: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, folder = checkpoint
    expected = MediaPrompt(load(folder), architecture, 0).logits(load(folder), 8)
    monkeypatch.setitem(UNSERVED, read_json(folder / "config.json")["model_type"], "why not")
    network = load(folder)
    assert network.config.media is None
    assert network.towers is None
    assert network.config.media_refusal == "why not"
    assert torch.equal(MediaPrompt(network, architecture, 0).logits(network, 8), expected)


def test_tokens_before_the_first_item_attend_to_none(tmp_path: Path) -> None:
    """As in the original of Llama 3.2 Vision, not as in Transformers, where they attend to all items."""
    architecture = "MllamaForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    text, seeing = MediaPrompt(network, architecture, 0), MediaPrompt(network, architecture, 1)
    expected = text.logits(network, 9)
    num_leading = len(text.token_ids)
    seeing.cross = [(num_leading, seeing.cross[0][1])]
    seeing.token_ids = [*text.token_ids, *seeing.token_ids]
    logits = seeing.logits(network, 30)
    assert (logits[:num_leading] - expected).abs().max() < 1e-5
    blind = MediaPrompt(network, architecture, 0)
    blind.token_ids = seeing.token_ids
    assert (logits - blind.logits(network, 30))[num_leading:].abs().max(dim=-1).values.min() > 1e-3


def test_towers_that_need_the_language_model_are_not_loaded_alone(tmp_path: Path) -> None:
    architecture = "MllamaForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    with pytest.raises(CheckpointError, match="its towers are not alone"):
        load_media_towers(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    with pytest.raises(CheckpointError, match="made for layers of their own language model"):
        ModelConfig.from_path(tmp_path).with_towers(tmp_path)


def test_quantized_towers_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, QWEN3, MEDIA_CASES[QWEN3])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("visual.blocks.1.mlp.linear_fc1.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"visual\.blocks\.1\.mlp\.linear_fc1\.weight is quantized"):
        load(tmp_path)


def test_dummy_towers_need_no_weights(checkpoint: tuple[str, Path], tmp_path: Path) -> None:
    architecture, folder = checkpoint
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    network = load(tmp_path, load_format="dummy")
    spec = network.config.media
    assert spec is not None
    assert network.encode_media(*_single(architecture))[0].shape == (6, spec.width)


def test_ids_of_media_need_not_be_in_the_vocabulary(checkpoint: tuple[str, Path]) -> None:
    architecture, folder = checkpoint
    network = load(folder)
    prompt = MediaPrompt(network, architecture, 1)
    before = prompt.logits(network, 8)
    prompt.token_ids = [100_000 if token in prompt.embeds else each for token, each in enumerate(prompt.token_ids)]
    assert torch.equal(prompt.logits(network, 8), before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_equal_positions_on_all_axes_rotate_as_one(interleaved: bool) -> None:
    rope = RopeConfig(mrope_section=(2, 3, 3), mrope_interleaved=interleaved)
    table = RotaryTable(rope, 16, dtype=torch.float32, device=torch.device("cpu"))
    positions = torch.tensor([0, 7, 3, 11])
    for one, three in zip(table(positions, 12), table(positions.expand(3, 4), 12), strict=True):
        assert torch.equal(one, three)
    apart = torch.stack((positions, positions + 1, positions + 2))
    assert not torch.equal(table(apart, 14)[0], table(positions, 14)[0])


def test_spans_of_a_step_are_seen_whole() -> None:
    """Two sequences: three tokens behind five others, and four; a window of three tokens."""
    spans = visible_spans([0, 1, 4, 5], [3, 4], [8, 4])
    assert spans.places.tolist() == [5, 6, 7, 0, 1, 2, 3]
    assert spans.begins.tolist() == [5, 5, 7, 0, 1, 1, 3]
    assert spans.ends.tolist() == [7, 7, 8, 1, 3, 3, 4]
    whole, windowed = path_table(spans, None), path_table(spans, 3)
    assert whole[:3, :2].tolist() == [[6, 5], [6, 5], [7, 5]]
    assert whole[:3, 2:5].tolist() == [[5, 6, -1], [5, 6, -1], [5, 6, 7]]
    assert [row[2 : 3 + row[0]].tolist() for row in windowed] == [
        [3, 4, 5, 6], [4, 5, 6], [5, 6, 7], [0], [0, 1, 2], [0, 1, 2], [1, 2, 3],
    ]  # fmt: skip


def test_spans_that_are_prefixes_begin_before_the_step() -> None:
    """Three tokens behind five others, all of a prompt, and a token behind a prompt; a window of three tokens."""
    spans = visible_spans([0, 1, 2], [3, 1], [8, 4], are_prefixes=True)
    assert spans.begins.tolist() == [0, 0, 0, 3]
    whole, windowed = path_table(spans, None), path_table(spans, 3)
    assert [row[:2].tolist() for row in whole] == [[7, 5]] * 3 + [[3, 3]]
    assert [row[2 : 3 + row[0]].tolist() for row in windowed] == [[*range(8)]] * 3 + [[1, 2, 3]]
