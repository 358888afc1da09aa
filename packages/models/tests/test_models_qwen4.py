"""Qwen4-Exp beyond its parity case: hashes that the checkpoint need not bring, its table in one piece or in many, the
text of a checkpoint with towers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig, load_model
from quire_models.families.qwen4_exp import NGramSpec
from quire_models.ledger import weight_ledger
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint

NAME = "Qwen4ExpForCausalLM"
SEEING = "Qwen4ExpForConditionalGeneration"
TEXT = [196, 3, *(3 + 7 * token % 140 for token in range(30)), 196, 5, 6]
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


def logits(folder: Path) -> torch.Tensor:
    driver = PagedDriver(load_model(ModelConfig.from_path(folder), folder, dtype="float32"), block_size=4, shuffle=True)
    sequence = driver.add(TEXT)
    driver.run(sequence, 9)
    return torch.stack(sequence.logits)


def test_hashes_and_tables_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NAME, CASES[NAME])
    expected, weights = logits(tmp_path), load_file(tmp_path / "model.safetensors")
    layers = {0: "model.layers.0", 2: "model.layers.2"}
    for layer, name in layers.items():
        spec = ModelConfig.from_path(tmp_path).network.layers[layer].mixers[1]
        assert isinstance(spec, NGramSpec)
        table = f"{name}.ple.ple_embedding"
        assert weights.pop(f"{table}.layer_multipliers").tolist() == list(spec.multipliers)
        assert weights.pop(f"{table}.ngram_heads_vocab_sizes").tolist() == list(spec.head_sizes)
        shards = [weights.pop(f"{table}.ngram_embedding.shard_{shard}.weight") for shard in range(3)]
        weights[f"{table}.ngram_embedding.weight"] = torch.cat(shards)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), expected)


@pytest.mark.parametrize("is_whole", [False, True])
def test_tables_in_float8(tmp_path: Path, is_whole: bool) -> None:
    write_checkpoint(tmp_path, NAME, CASES[NAME])
    weights, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    found: dict[str, torch.Tensor] = {}
    for table in {name.rpartition(".shard_")[0] for name in weights if ".shard_" in name}:
        shards = [f"{table}.shard_{shard}.weight" for shard in range(3)]
        scale = torch.cat([weights[name] for name in shards]).abs().max() / 448
        for name in shards:
            found[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
            weights[name] = found[name].float() * scale
        if is_whole:
            found[f"{table}.weight"] = torch.cat([found.pop(name).view(torch.uint8) for name in shards]).view(
                torch.float8_e4m3fn
            )
        found[f"{table}.weight_scale"] = scale[None]
    save_file(weights, file)
    expected, plain = logits(tmp_path), weight_ledger(ModelConfig.from_path(tmp_path), "bfloat16")
    kept = {name: tensor for name, tensor in weights.items() if ".shard_" not in name}
    save_file({**kept, **found}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_convert": ["ngram_embedding"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    model = ModelConfig.from_path(tmp_path)
    assert (logits(tmp_path) - expected).abs().max() < 1e-6 * expected.abs().max()
    ngrams = [mixer for layer in model.network.layers for mixer in layer.mixers if isinstance(mixer, NGramSpec)]
    saved = sum(each.num_rows * each.embed_dim // len(each.head_sizes) - 4 for each in ngrams)
    assert plain["n-gram embedding"] - weight_ledger(model, "bfloat16")["n-gram embedding"] == saved
    with pytest.raises(CheckpointError, match=r"modules_to_convert \['lm_head'\]"):
        ModelConfig.from_dict({**config, "quantization_config": {**said, "modules_to_convert": ["lm_head"]}})


def test_the_text_of_a_checkpoint_with_towers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}
    config = Qwen4ExpConfig(text_config=dict(CASES[NAME].fields), vision_config=VISION, **ids)
    oracle = Qwen4ExpForConditionalGeneration(config).eval()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    oracle.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([TEXT])).logits[0]
    whole = ModelConfig.from_path(tmp_path)
    assert whole.media is not None
    assert whole.media.has_mrope
    assert (logits(tmp_path) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_budget": 10}, r"indexer_budget \(10\) must be a multiple of indexer_compress_ratio \(4\)"),
        ({"indexer_budget": None}, "indexer_budget"),
        ({"indexer_head_dim": 6}, r"indexer_head_dim \(6\) must be at least the 8 dimensions"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported"),
        (
            {"ple_layer_ids": [4]},
            r"ple_layer_ids must list layers with linear attention.*some of \[1, 2, 3\].*is \[4\]",
        ),
        ({"ple_embed_dim": 50}, r"ple_embed_dim \(50\) must be a multiple of 4 hashes"),
        ({"eos_token_id": None}, "eos_token_id must be a token, where n-grams end, is None"),
        ({"output_gate_type": "tanh"}, "output_gate_type must be silu or sigmoid, is 'tanh'"),
        ({"hc_count": 1}, "hc_count must be at least 2"),
        ({"vocab_size": 1 << 25}, "vocab_size must be at most 16777216"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    values = json.loads(json.dumps(dict(CASES[NAME].fields)))
    values |= {"layer_types": None, "model_type": "qwen4_exp_text", "architectures": [NAME], **fields}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(values)


def test_positions_on_several_axes_stand_behind_the_keys_of_the_index() -> None:
    config = ModelConfig.from_dict({**MEDIA_CASES[SEEING].fields, "model_type": "qwen4_exp", "architectures": [SEEING]})
    assert config.kv_cache_specs(16, "bfloat16")["model.layers.3.indexer"].block_bytes == 16 * (12 + 9) * 2


def test_keys_of_the_index_have_no_narrow_form() -> None:
    values = {**CASES[NAME].fields, "model_type": "qwen4_exp_text", "architectures": [NAME]}
    config = ModelConfig.from_dict(values)
    assert config.kv_cache_specs(16, "bfloat16")["model.layers.3.indexer"].block_bytes == 16 * 12 * 2
    with pytest.raises(ConfigError, match="keys of an index are not kept in fp8_e4m3"):
        config.kv_cache_specs(16, "fp8_e4m3")
