"""Towers of Quire's own give the embeddings of Transformers' classes, whatever they are packed with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_native_towers import NATIVE, embeddings
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError, ConfigError, Modality
from quire_models import ModelConfig, Network, load_model
from quire_models.towers.grids import ThwGrid, windows_of
from quire_models.towers.native import NativeTowers
from quire_models.transformers_backend.towers import TransformersTowers, load_towers
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.media_items import media_item
from quire_testkit.parity.oracle import write_checkpoint

SMOLVLM = "SmolVLMForConditionalGeneration"


def load(folder: Path, **options: Any) -> Network:
    return load_model(ModelConfig.from_path(folder), folder, **{"dtype": "float32", **options})


@pytest.mark.parametrize("architecture", NATIVE)
def test_embeddings_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    assert isinstance(network.towers, NativeTowers)
    oracle = load_towers(network.config, tmp_path, torch.float32, torch.device("cpu"))
    assert isinstance(oracle, TransformersTowers)
    items = [media_item(architecture, index) for index in range(5)]
    packed = embeddings(network.towers, items)
    for item, expected, embeds in zip(items, embeddings(oracle, items), packed, strict=True):
        assert embeds.shape == expected.shape
        assert (embeds - expected).abs().max() <= 1e-5 * expected.abs().max()
        (alone,) = embeddings(network.towers, [item])
        assert (embeds - alone).abs().max() <= 1e-5 * expected.abs().max()
    assert not torch.equal(packed[0][:1], packed[1][:1])
    assert embeddings(network.towers, items[:1])[0].dtype == torch.float32


QWEN = {"Qwen2VL": 96, "Qwen2_5_VL": 96, "Qwen3VL": 96}
"""Networks with grids -> numbers of a patch."""


@pytest.mark.parametrize("name", QWEN)
def test_grids_may_be_of_any_size(name: str, tmp_path: Path) -> None:
    """Windows with edges that are not whole, frames of a video, tables that are stretched."""
    architecture = f"{name}ForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    assert isinstance(network.towers, NativeTowers)
    oracle = load_towers(network.config, tmp_path, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for modality, ending, frames in ((Modality.IMAGE, "", 1), (Modality.VIDEO, "_videos", 3)):
        items = []
        for height, width in ((2, 2), (6, 10), (14, 4), (6, 10)):
            pixels = torch.randn(frames * height * width, QWEN[name], generator=generator)
            grid = torch.tensor([[frames, height, width]])
            items.append({f"pixel_values{ending}": pixels, f"{modality}_grid_thw": grid})
        packed = network.encode_media(modality, items)
        for embeds, expected in zip(packed, oracle.encode(modality, items), strict=True):
            assert embeds.shape == expected.shape
            assert (embeds - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_images_may_be_of_any_size_and_have_padding(tmp_path: Path) -> None:
    architecture = "Mistral3ForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    oracle = load_towers(network.config, tmp_path, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    items = []
    for height, width in ((32, 64), (16, 32), (48, 32)):
        pixels = torch.randn(1, 3, height + 8, width + 16, generator=generator)
        items.append({"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])})
    packed, expected = network.encode_media(Modality.IMAGE, items), oracle.encode(Modality.IMAGE, items)
    assert [len(each) for each in packed] == [8, 2, 6]
    for embeds, one in zip(packed, expected, strict=True):
        assert (embeds - one).abs().max() <= 1e-5 * one.abs().max()
    with pytest.raises(ValueError, match="no multiples of 2"):
        network.encode_media(Modality.IMAGE, [{**items[0], "image_sizes": torch.tensor([[24, 64]])}])


@pytest.mark.parametrize("num_items", [0, 1, 2, 5])
def test_tiles_may_be_of_any_size_and_have_padding(num_items: int, tmp_path: Path) -> None:
    """Positions that are stretched and shrunk, tiles of several sizes in an item."""
    architecture = "Lfm2VlForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    assert isinstance(network.towers, NativeTowers)
    oracle = load_towers(network.config, tmp_path, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    items = []
    for tiles in (((4, 6),), ((2, 2), (6, 4)), ((20, 36), (6, 4)), ((16, 16),), ((2, 40), (4, 4), (40, 2)))[:num_items]:
        most = max(height * width for height, width in tiles) + 8
        mask = torch.stack([(torch.arange(most) < height * width).long() for height, width in tiles])
        pixels = torch.randn(len(tiles), most, 192, generator=generator)
        items.append({"pixel_values": pixels, "spatial_shapes": torch.tensor(tiles), "pixel_attention_mask": mask})
    packed = network.encode_media(Modality.IMAGE, items)
    assert len(packed) == num_items
    for item, embeds in zip(items, packed, strict=True):
        (expected,) = oracle.encode(Modality.IMAGE, [item])
        assert embeds.shape == expected.shape
        assert (embeds - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_tiles_that_are_not_their_patches_are_refused(tmp_path: Path) -> None:
    architecture = "Lfm2VlForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    pixels = torch.zeros(1, 12, 192)
    with pytest.raises(ValueError, match=r"an item has patches of \[1, 12\], and tiles of \[\(4, 4\)\]"):
        network.encode_media(Modality.IMAGE, [{"pixel_values": pixels, "spatial_shapes": torch.tensor([[4, 4]])}])
    with pytest.raises(ValueError, match="no multiples of 2"):
        network.encode_media(Modality.IMAGE, [{"pixel_values": pixels, "spatial_shapes": torch.tensor([[3, 4]])}])


def test_frames_that_are_no_sound_are_not_read(tmp_path: Path) -> None:
    architecture = "Qwen2AudioForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    oracle = load_towers(network.config, tmp_path, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    items = []
    for frames in (60, 41, 3):
        mask = (torch.arange(60) < frames).long()[None]
        features = torch.randn(1, 16, 60, generator=generator)
        items.append({"input_features": features, "feature_attention_mask": mask})
    packed, expected = network.encode_media(Modality.AUDIO, items), oracle.encode(Modality.AUDIO, items)
    assert [len(each) for each in packed] == [15, 10, 1]
    for embeds, one in zip(packed, expected, strict=True):
        assert (embeds - one).abs().max() <= 1e-5 * one.abs().max()
    with pytest.raises(ValueError, match="a sound has 50 frames, and the tower takes 60"):
        network.encode_media(Modality.AUDIO, [{"input_features": torch.zeros(1, 16, 50)}])


def test_grids_that_are_not_their_pixels_are_refused(tmp_path: Path) -> None:
    architecture = "Qwen2VLForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    network = load(tmp_path)
    pixels = torch.zeros(12, 96)
    with pytest.raises(ValueError, match=r"an item has 12 patches, and grids of \[\(1, 4, 4\)\]"):
        network.encode_media(Modality.IMAGE, [{"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}])
    with pytest.raises(ValueError, match="no multiples of 2"):
        network.encode_media(Modality.IMAGE, [{"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 3, 4]])}])


def test_windows_of_one_size_in_a_frame_stand_next_to_each_other() -> None:
    """Two frames of 3 x 5 squares, in windows of 2 x 2."""
    windows = windows_of([ThwGrid(2, 6, 10)], 2, 2)
    assert windows.lens == [16, 16, 8, 8, 8, 4] * 2
    assert windows.order[:8].tolist() == [0, 1, 5, 6, 2, 3, 7, 8]
    assert sorted(windows.order.tolist()) == list(range(30))


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm")
    write_checkpoint(folder, SMOLVLM, MEDIA_CASES[SMOLVLM])
    return folder


def test_frames_of_a_video_may_be_tiles(smolvlm: Path) -> None:
    network = load(smolvlm)
    assert isinstance(network.towers, NativeTowers)
    oracle = load_towers(network.config, smolvlm, torch.float32, torch.device("cpu"))
    frames = torch.randn(1, 3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    (embeds,), (expected,) = (each.encode("video", [{"pixel_values": frames}]) for each in (network.towers, oracle))
    assert (embeds - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_bfloat16_is_near(smolvlm: Path) -> None:
    item = [media_item(SMOLVLM, 0)]
    wide, narrow = (embeddings(load(smolvlm, dtype=dtype).towers, item)[0] for dtype in ("float32", "bfloat16"))
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - wide).abs().max() <= 0.03 * wide.abs().max()


def test_weights_of_older_names_are_found(smolvlm: Path, tmp_path: Path) -> None:
    """As checkpoints have them that were written before Transformers flattened its towers."""
    architecture = "LlavaForConditionalGeneration"
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    items, file = [media_item(architecture, 0)], tmp_path / "model.safetensors"
    expected = embeddings(load(tmp_path).towers, items)[0]
    older = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in load_file(file).items()
    }
    save_file(older, file, metadata={"format": "pt"})
    assert torch.equal(embeddings(load(tmp_path).towers, items)[0], expected)


def test_tiles_of_another_size_are_refused(smolvlm: Path) -> None:
    network = load(smolvlm)
    with pytest.raises(ValueError, match="a tile is 40 x 32 pixels, and the tower takes 32 x 32"):
        network.encode_media(Modality.IMAGE, [{"pixel_values": torch.zeros(1, 1, 3, 32, 40)}])
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    mask[..., 24:] = False
    with pytest.raises(ValueError, match="a tile has padding"):
        network.encode_media(
            Modality.IMAGE, [{"pixel_values": torch.zeros(1, 1, 3, 32, 32), "pixel_attention_mask": mask}]
        )


def test_a_modality_that_the_tower_does_not_take_is_refused(smolvlm: Path) -> None:
    with pytest.raises(ConfigError, match="SmolVLMForConditionalGeneration takes image, video, and no audio"):
        load(smolvlm).encode_media(Modality.AUDIO, [])


def test_weights_that_do_not_fit_are_named(smolvlm: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((smolvlm / "config.json").read_text())
    tensors = load_file(smolvlm / "model.safetensors")
    name = next(name for name in tensors if name.endswith("vision_model.encoder.layers.1.mlp.fc1.weight"))
    file = tmp_path / "model.safetensors"
    save_file({**tensors, name: tensors[name][:40].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.fc1\.weight is \[40, 32\], should be \[48, 32\]"):
        load(tmp_path)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of its towers: .*layers\.1\.mlp\.fc1\.weight"):
        load(tmp_path)


def test_dummy_towers_need_no_weights(smolvlm: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((smolvlm / "config.json").read_text())
    network = load(tmp_path, load_format="dummy")
    assert isinstance(network.towers, NativeTowers)
    assert embeddings(network.towers, [media_item(SMOLVLM, 0)])[0].isfinite().all()


def test_variants_that_are_not_described_stay_with_transformers(smolvlm: Path) -> None:
    values = json.loads((smolvlm / "config.json").read_text())
    values["vision_config"]["hidden_act"] = "mish"
    media = ModelConfig.from_dict(values).media
    assert media is not None
    assert media.tower is None
