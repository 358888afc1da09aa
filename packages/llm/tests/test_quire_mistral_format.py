"""A folder in Mistral AI's own format, served whole: params.json, consolidated.safetensors and tekken.json; and
quantized."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.quantize import quantize_checkpoint
from quire_models import resolve_model
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import greedy_continuation, write_checkpoint

NAMES = {
    "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm", "model.layers": "layers",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip
PARAMS = {
    "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 112, "norm_eps": 1e-6,
    "vocab_size": 276, "rope_theta": 10000.0, "max_position_embeddings": 256, "vision_encoder": {"hidden_size": 8},
}  # fmt: skip
TEKKEN = {
    "config": {"pattern": ".", "default_vocab_size": 276, "default_num_special_tokens": 20, "version": "v3"},
    "vocab": [{"token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)],
}


def test_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case = CASES["MistralForCausalLM"]
    fields = {**case.fields, "vocab_size": 276, "sliding_window": None, "eos_token_id": 2}
    oracle = write_checkpoint(tmp_path / "hf", "MistralForCausalLM", replace(case, fields=fields))
    tensors = {"vision_encoder.patch_conv.weight": torch.ones(2, 2)}
    for name, tensor in oracle.state_dict().items():
        for heads, part in ((4, "q_proj"), (2, "k_proj")):
            if part in name:  # pairs that rotate together lie behind each other
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        for theirs, own in NAMES.items():
            name = name.replace(theirs, own)
        tensors[name] = tensor.contiguous()
    (folder := tmp_path / "own").mkdir()
    save_file(tensors, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(PARAMS))
    (folder / "tekken.json").write_text(json.dumps(TEKKEN))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for load_format in ("auto", "mistral"):
        with LLM(model=str(folder), load_format=load_format, dtype="float32", num_threads=1) as llm:
            (output,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
            notes = llm.engine_info.extra["notes"]
        assert output.prompt_token_ids == [1, 3, 20 + ord("H"), 20 + ord("i"), 4]  # <s> [INST] Hi [/INST]
        expected = greedy_continuation(oracle, output.prompt_token_ids, 6).token_ids
        assert output.outputs[0].token_ids == expected
        assert any("towers of params.json (vision_encoder) are not read" in note for note in notes)
    outs = [tmp_path / "quantized", tmp_path / "quantized hf"]
    for source, out in zip((resolve_model(folder), tmp_path / "hf"), outs, strict=True):
        quantize_checkpoint(source, out, "int8")
    assert {path.name for path in outs[0].iterdir()} == {"config.json", "model.safetensors", "tekken.json"}
    ours, theirs = (load_file(out / "model.safetensors") for out in outs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
