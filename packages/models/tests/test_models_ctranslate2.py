"""Folders in the format of CTranslate2: written here from a random Whisper, opened as its checkpoint."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from quire_interfaces import CheckpointError
from quire_models.checkpoint_files import open_checkpoint
from quire_models.config import ModelConfig
from quire_models.ctranslate2.header import is_ctranslate2
from quire_models.hub import resolve_model

_CODES = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.float16: 4}
_ADDED = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>")


def random_whisper() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
        max_target_positions=24, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def converted(model: WhisperForConditionalGeneration) -> dict[str, Tensor]:
    """Names and tensors as CTranslate2's converter writes them."""
    state = model.state_dict()
    found: dict[str, Tensor] = {}

    def linear(name: str, *modules: str) -> None:
        found[f"{name}/weight"] = torch.cat([state[f"{module}.weight"] for module in modules])
        size = len(state[f"{modules[0]}.weight"])
        biases = [state.get(f"{module}.bias", torch.zeros(size)) for module in modules]
        found[f"{name}/bias"] = torch.cat(biases)

    def norm(name: str, module: str) -> None:
        found[f"{name}/gamma"], found[f"{name}/beta"] = state[f"{module}.weight"], state[f"{module}.bias"]

    for stack, count in (("encoder", 2), ("decoder", 1)):
        for number in range(count):
            layer, own = f"{stack}/layer_{number}", f"model.{stack}.layers.{number}"
            linear(f"{layer}/self_attention/linear_0", *(f"{own}.self_attn.{each}_proj" for each in "qkv"))
            linear(f"{layer}/self_attention/linear_1", f"{own}.self_attn.out_proj")
            norm(f"{layer}/self_attention/layer_norm", f"{own}.self_attn_layer_norm")
            if stack == "decoder":
                linear(f"{layer}/attention/linear_0", f"{own}.encoder_attn.q_proj")
                linear(f"{layer}/attention/linear_1", f"{own}.encoder_attn.k_proj", f"{own}.encoder_attn.v_proj")
                linear(f"{layer}/attention/linear_2", f"{own}.encoder_attn.out_proj")
                norm(f"{layer}/attention/layer_norm", f"{own}.encoder_attn_layer_norm")
            linear(f"{layer}/ffn/linear_0", f"{own}.fc1")
            linear(f"{layer}/ffn/linear_1", f"{own}.fc2")
            norm(f"{layer}/ffn/layer_norm", f"{own}.final_layer_norm")
        norm(f"{stack}/layer_norm", f"model.{stack}.layer_norm")
        found[f"{stack}/position_encodings/encodings"] = state[f"model.{stack}.embed_positions.weight"]
        found[f"{stack}/num_heads"] = torch.tensor(2, dtype=torch.int16)
    for number in (1, 2):
        linear_name = f"encoder/conv{number}"
        found[f"{linear_name}/weight"] = state[f"model.encoder.conv{number}.weight"]
        found[f"{linear_name}/bias"] = state[f"model.encoder.conv{number}.bias"]
    found["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    found["decoder/activation"] = torch.tensor(3, dtype=torch.int8)
    return found


def quantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices as int8, with the factor of each row that its numbers were multiplied by."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or "encodings" in name:
            found[name] = tensor
            continue
        scale = 127 / tensor.abs().amax(1)
        found[name], found[f"{name}_scale"] = (tensor * scale[:, None]).round().to(torch.int8), scale
    return found


def write_folder(folder: Path, tensors: dict[str, Tensor], *, kind: str = "WhisperSpec") -> Path:
    folder.mkdir()

    def text(value: str) -> bytes:
        data = value.encode() + b"\0"
        return struct.pack("<H", len(data)) + data

    body = struct.pack("<I", 6) + text(kind) + struct.pack("<II", 3, len(tensors))
    for name, tensor in tensors.items():
        body += text(name) + struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)
        body += struct.pack("<BI", _CODES[tensor.dtype], tensor.nbytes) + tensor.contiguous().numpy().tobytes()
    (folder / "model.bin").write_bytes(body + struct.pack("<I", 0))
    added = [{"id": 50 + number, "content": token} for number, token in enumerate(_ADDED)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    stored = {"suppress_ids": [1, 2], "suppress_ids_begin": [3], "alignment_heads": [[0, 1]], "lang_ids": [52]}
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("is_quantized", [False, True])
def test_tensors_are_those_of_the_checkpoint(tmp_path: Path, is_quantized: bool) -> None:
    model = random_whisper()
    tensors = converted(model)
    folder = resolve_model(write_folder(tmp_path / "tiny", quantized(tensors) if is_quantized else tensors))
    found = dict(open_checkpoint(folder).tensors())
    expected = {name: each for name, each in model.state_dict().items() if name != "proj_out.weight"}
    assert set(found) == set(expected)
    for name, tensor in found.items():
        tolerance = expected[name].abs().max().item() / 127 * 0.51 if is_quantized else 0
        torch.testing.assert_close(tensor, expected[name], atol=tolerance, rtol=0)


def test_sizes_and_rules_are_read(tmp_path: Path) -> None:
    folder = resolve_model(write_folder(tmp_path / "tiny", converted(random_whisper())))
    config = ModelConfig.from_path(folder)
    assert (config.architecture, config.num_mel_bins) == ("WhisperForConditionalGeneration", 8)
    assert (config.max_encoder_len, config.max_model_len, config.vocab_size) == (20, 24, 60)
    assert (config.decoder_start_token_ids, config.eos_token_ids) == ((51,), (50,))
    rules = json.loads((folder / "generation_config.json").read_text())
    assert rules["suppress_tokens"] == [1, 2]
    assert rules["begin_suppress_tokens"] == [3]
    assert rules["alignment_heads"] == [[0, 1]]
    assert rules["no_timestamps_token_id"] == 55
    assert resolve_model(tmp_path / "tiny") == folder  # written once


def test_other_networks_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="TransformerSpec"):
        resolve_model(write_folder(tmp_path / "other", converted(random_whisper()), kind="TransformerSpec"))


def test_cut_off_files_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "cut", converted(random_whisper()))
    file = folder / "model.bin"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="download the file again"):
        resolve_model(folder)


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bare", converted(random_whisper()))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        resolve_model(folder)


def test_pickled_files_are_not_taken_for_it(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.bin")
    assert not is_ctranslate2(tmp_path)
