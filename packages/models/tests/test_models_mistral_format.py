"""Folders in Mistral AI's own format (params.json, consolidated.safetensors): the logits of Transformers' class of the
same weights under their other names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import save_file
from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError
from quire_models import DecoderLM, ModelConfig, load_model, resolve_model
from quire_models.mistral_format.folder import mistral_notes
from quire_models.named_formats import check_load_format
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

TOKENS = [(7 * i) % 190 + 3 for i in range(40)]
SIZES = {
    "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 112, "norm_eps": 1e-6, "vocab_size": 200,
    "rope_theta": 10000.0, "max_position_embeddings": 256,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta": 32.0, "alpha": 1.0}
GROWTH = {"llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 32}, "yarn": YARN}
PARAMS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {**SIZES, "n_kv_heads": 2, "head_dim": 16, "sliding_window": 20},
    "Ministral3ForCausalLM": {**SIZES, **GROWTH, "n_kv_heads": 2, "head_dim": 16, "norm_eps": 1e-5,
                              "yarn": {**YARN, "apply_scale": False}},
    "MixtralForCausalLM": {**SIZES, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 48, "norm_eps": 1e-5,
                           "rope_theta": 1e6, "moe": {"num_experts": 6, "num_experts_per_tok": 2}},
    "Mistral4ForCausalLM": {
        **SIZES, **GROWTH, "n_kv_heads": 4, "head_dim": 20, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "moe": {
            "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2, "expert_hidden_dim": 32,
            "first_k_dense_replace": 1, "num_expert_groups": 4, "num_expert_groups_per_tok": 2, "routed_scale": 1.5,
            "route_every_n": 1,
        },
    },
}  # fmt: skip
"""Transformers' class -> params.json of its parity case."""
NAMES = {
    "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm", "model.layers": "layers",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "self_attn.q_a_proj": "attention.wq_a", "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b", "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm", "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.shared_experts": "shared_experts", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def in_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head, whose pairs are (i, i + half) for Transformers, one pair behind the other."""
    return tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(tensor.shape).contiguous()


def stored(oracle: Any) -> dict[str, Tensor]:
    """The oracle's weights, as Mistral's tools name and order them."""
    latent = hasattr(oracle.config, "kv_lora_rank")
    experts, dense = ("", "feed_forward.") if latent else ("feed_forward.", "feed_forward.")
    found: dict[str, Tensor] = {}
    for name, tensor in oracle.state_dict().items():
        if ".mlp.experts." in name:
            layer = re.sub(r".*layers\.(\d+)\..*", r"\1", name)
            for number, matrices in enumerate(tensor):
                parts = zip(("w1", "w3"), matrices.chunk(2), strict=True)
                pairs = parts if "gate_up" in name else [("w2", matrices)]
                found |= {f"layers.{layer}.{experts}experts.{number}.{w}.weight": m.contiguous() for w, m in pairs}
            continue
        if not latent and name.endswith(("q_proj.weight", "k_proj.weight")):
            config = oracle.config
            tensor = in_pairs(tensor, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        name = name.replace("mlp.gate.", f"{experts}gate.").replace("mlp.", dense)
        found[name] = tensor.contiguous()
    return found


def write(folder: Path, params: dict[str, Any], tensors: dict[str, Tensor], num_files: int = 1) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "tekken.json").write_text("{}")
    names, files = sorted(tensors), {}
    for number in range(num_files):
        file = "consolidated.safetensors" if num_files == 1 else f"consolidated-{number + 1:05}.safetensors"
        files[file] = names[number::num_files]
        save_file({name: tensors[name] for name in files[file]}, folder / file)
    if num_files > 1:
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    return folder


def logits(folder: Path, **options: Any) -> Tensor:
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32", **options)
    assert isinstance(network, DecoderLM)
    driver = PagedDriver(network, block_size=4, shuffle=True)
    sequence = driver.add(TOKENS)
    driver.run(sequence, 9)
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("architecture", PARAMS)
def test_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    case = CASES[architecture]
    if architecture == "Ministral3ForCausalLM":  # cosines and sines without a factor
        fields = json.loads(json.dumps(dict(case.fields)))
        fields["rope_parameters"]["attention_factor"] = 1.0
        case = type(case)(config=case.config, fields=fields)
    oracle = write_checkpoint(tmp_path / "hf", architecture, case)
    folder = resolve_model(write(tmp_path / "own", PARAMS[architecture], stored(oracle), num_files=2))
    assert folder.name == "own"
    assert (folder / "tekken.json").is_file()
    assert resolve_model(tmp_path / "own") == resolve_model(folder) == folder
    expected = oracle(torch.tensor([TOKENS])).logits[0]
    assert (logits(folder) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert mistral_notes(folder) == []


def test_queries_of_latent_attention_without_a_latent_keep_their_rows(tmp_path: Path) -> None:
    case, params = CASES["Mistral4ForCausalLM"], dict(PARAMS["Mistral4ForCausalLM"])
    fields = {**case.fields, "q_lora_rank": None}
    del params["q_lora_rank"]
    oracle = write_checkpoint(tmp_path / "hf", "Mistral4ForCausalLM", type(case)(config=case.config, fields=fields))
    folder = resolve_model(write(tmp_path / "own", params, stored(oracle)))
    expected = oracle(torch.tensor([TOKENS])).logits[0]
    assert (logits(folder) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_float8_is_what_it_is_under_transformers_names(tmp_path: Path) -> None:
    """One scale for a matrix; rows of queries and keys are put in order as bytes."""
    oracle = write_checkpoint(tmp_path / "hf", "MistralForCausalLM", CASES["MistralForCausalLM"])
    theirs, ours = dict(oracle.state_dict()), stored(oracle)
    for tensors, pattern, scale_name in ((theirs, r"_proj\.weight$", "weight_scale"),
                                         (ours, r"\.w[a-z0-9_]+\.weight$", "qscale_weight")):  # fmt: skip
        for name in [name for name in tensors if re.search(pattern, name)]:
            scale = tensors[name].abs().max() / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", f".{scale_name}")] = scale
    ours["layers.0.attention.kv_fake_quantizer.qscale_act"] = torch.ones(())
    ours["vision_encoder.patch_conv.weight"] = torch.ones(2, 2)
    params = PARAMS["MistralForCausalLM"] | {
        "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"},
        "vision_encoder": {"hidden_size": 4}, "something": 3,
    }  # fmt: skip
    folder = resolve_model(write(tmp_path / "own", params, ours))
    save_file({name: tensor.contiguous() for name, tensor in theirs.items()}, tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(folder), logits(tmp_path / "hf"))
    notes = mistral_notes(folder)
    assert len(notes) == 2
    assert "not read: something" in notes[0]
    assert "media are not served: towers of params.json (vision_encoder)" in notes[1]


def test_files_of_both_formats_are_read_as_asked(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path / "hf", "MistralForCausalLM", CASES["MistralForCausalLM"])
    write(tmp_path / "own", PARAMS["MistralForCausalLM"], stored(oracle))
    for path in (tmp_path / "own").iterdir():
        path.rename(tmp_path / "hf" / path.name)
    assert resolve_model(tmp_path / "hf") == tmp_path / "hf"
    own = resolve_model(tmp_path / "hf", mistral=True)
    assert own != tmp_path / "hf"
    assert torch.equal(logits(own, load_format="mistral"), logits(tmp_path / "hf"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not in Mistral's own format"):
        resolve_model(tmp_path / "empty", mistral=True)
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(oracle.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    assert resolve_model(tmp_path / "hf") == own
    pickled = resolve_model(tmp_path / "hf", pickled=True)
    assert torch.equal(logits(pickled, load_format="pt"), logits(own))
    assert mistral_notes(pickled) == []
    with pytest.raises(CheckpointError, match="not in Transformers' format, whose files load_format runai_streamer"):
        logits(own, load_format="runai_streamer")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}}, "num_shared_experts 1 is not"),
        (
            {"sliding_window": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
            "without moe",
        ),
        ({"sliding_window": [20, 30, None]}, r"sliding_window must be a number, or a list .* is \[20, 30, None\]"),
        ({"quantization": {"quant_method": "compressed-tensors"}}, "quant_method 'compressed-tensors' is not read"),
        ({**GROWTH, "yarn": {**YARN, "original_max_position_embeddings": 64}}, r"\(64 and 32\)"),
        ({"dim": None}, "dim is missing"),
        ({"n_kv_heads": 3}, r"params.json: n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
        ({"head_dim": 17}, r"params.json.*head_dim.*17"),
    ],
)
def test_what_is_not_known_is_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    params = PARAMS["MistralForCausalLM"] | fields
    with pytest.raises(CheckpointError, match=words):
        resolve_model(write(tmp_path / "own", params, {"norm.weight": torch.ones(4)}))


def test_windows_of_latent_attention_are_refused(tmp_path: Path) -> None:
    params = PARAMS["Mistral4ForCausalLM"] | {"sliding_window": 20}
    with pytest.raises(CheckpointError, match="sliding_window 20 is not supported; supported: no value"):
        resolve_model(write(tmp_path / "own", params, {"norm.weight": torch.ones(4)}))


def test_windows_by_turns_are_layer_types(tmp_path: Path) -> None:
    params = PARAMS["MistralForCausalLM"] | {"sliding_window": [None, 20, 20], "max_position_embeddings": None}
    model = ModelConfig.from_path(resolve_model(write(tmp_path / "own", params, {"norm.weight": torch.ones(4)})))
    assert model.sliding_windows == (None, 20, 20)
    assert (model.max_model_len, model.eos_token_ids) == (128_000, (2,))


def test_a_load_format_says_what_files_are(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", "MistralForCausalLM", CASES["MistralForCausalLM"])
    check_load_format("mistral", ModelConfig.from_path(tmp_path / "hf"))
    with pytest.raises(ConfigError, match="load_format must"):
        check_load_format("mistrals", ModelConfig.from_path(tmp_path / "hf"))
