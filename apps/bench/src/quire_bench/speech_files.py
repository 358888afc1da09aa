"""A Whisper in the formats that other engines read: a folder of Transformers and one of CTranslate2 in float32, and a
file of whisper.cpp, whose matrices are in float16.

Knows the names and headers of these formats. Vocabulary and rules come from the checkpoint's own tokenizer.json and
generation_config.json.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models.checkpoint_files import open_checkpoint
from quire_speech.features import NUM_FFT, mel_filters

__all__ = ["SPEECH_FORMATS", "write_speech_files"]

SPEECH_FORMATS = {"transformers": "transformers", "faster-whisper": "ctranslate2", "whisper.cpp": "ggml.bin"}
"""Peer -> the file or folder that it reads."""
_ACTIVATIONS = {"relu": 0, "gelu_new": 1, "swish": 2, "silu": 2, "gelu": 3}
"""By their numbers in CTranslate2."""
_CODES = {torch.float32: 0, torch.int8: 1, torch.int16: 2}
_BIN_VERSION, _BIN_REVISION = 6, 3
_GGML_MAGIC = 0x67676D6C
_OPENAI_PARTS = {
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
}
"""Part of a layer -> its name in OpenAI's own network, which whisper.cpp has."""
_OPENAI_OUTSIDE = {
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias",
    "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}


def write_speech_files(folder: Path, to: Path) -> None:
    """Write all formats.

    Args:
        folder: A checkpoint that Quire reads, with a tokenizer.json.
        to: A folder, which gets the names of `SPEECH_FORMATS`.

    Raises:
        CheckpointError: no Whisper, or no tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "whisper":
        raise CheckpointError(f"{folder} is no Whisper ({config.get('model_type')}): speech is measured with a Whisper")
    for name in ("tokenizer.json", "generation_config.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}, which other engines need")
    state = {name: tensor.float().contiguous() for name, tensor in open_checkpoint(folder).tensors()}
    state = {name: tensor for name, tensor in state.items() if name != "proj_out.weight"}
    _write_transformers(folder, to / SPEECH_FORMATS["transformers"], config, state)
    _write_ctranslate2(folder, to / SPEECH_FORMATS["faster-whisper"], config, state)
    _write_ggml(folder, to / SPEECH_FORMATS["whisper.cpp"], config, state)


def _write_transformers(folder: Path, to: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    to.mkdir()
    (to / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copyfile(folder / name, to / name)
    (to / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    save_file(state, to / "model.safetensors", {"format": "pt"})


def _write_ctranslate2(folder: Path, to: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    to.mkdir()
    generation = json.loads((folder / "generation_config.json").read_text())
    stored = {
        "suppress_ids": generation.get("suppress_tokens") or [],
        "suppress_ids_begin": generation.get("begin_suppress_tokens") or [],
        "alignment_heads": generation.get("alignment_heads") or [[config["decoder_layers"] - 1, 0]],
        "lang_ids": sorted((generation.get("lang_to_id") or {}).values()),
    }
    (to / "config.json").write_text(json.dumps(stored))
    shutil.copyfile(folder / "tokenizer.json", to / "tokenizer.json")
    (to / "vocabulary.json").write_text(json.dumps(_vocabulary(folder, config["vocab_size"])))
    (to / "preprocessor_config.json").write_text(json.dumps({"feature_size": config["num_mel_bins"]}))
    tensors = dict(_ctranslate2_tensors(config, state))

    def text(value: str) -> bytes:
        data = value.encode() + b"\0"
        return struct.pack("<H", len(data)) + data

    with (to / "model.bin").open("wb") as file:
        file.write(struct.pack("<I", _BIN_VERSION) + text("WhisperSpec"))
        file.write(struct.pack("<II", _BIN_REVISION, len(tensors)))
        for name, tensor in sorted(tensors.items()):
            file.write(text(name) + struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape))
            file.write(struct.pack("<BI", _CODES[tensor.dtype], tensor.nbytes))
            file.write(tensor.contiguous().numpy().tobytes())
        file.write(struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight"))


def _ctranslate2_tensors(config: dict[str, Any], state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a WhisperSpec: matrices that take the same are one."""

    def linear(name: str, *modules: str) -> Iterator[tuple[str, Tensor]]:
        weights = [state[f"{module}.weight"] for module in modules]
        biases = [state.get(f"{module}.bias", torch.zeros(len(weights[0]))) for module in modules]
        yield f"{name}/weight", torch.cat(weights)
        yield f"{name}/bias", torch.cat(biases)

    def norm(name: str, module: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}/gamma", state[f"{module}.weight"]
        yield f"{name}/beta", state[f"{module}.bias"]

    for stack in ("encoder", "decoder"):
        for number in range(config[f"{stack}_layers"]):
            layer, own = f"{stack}/layer_{number}", f"model.{stack}.layers.{number}"
            yield from linear(f"{layer}/self_attention/linear_0", *(f"{own}.self_attn.{each}_proj" for each in "qkv"))
            yield from linear(f"{layer}/self_attention/linear_1", f"{own}.self_attn.out_proj")
            yield from norm(f"{layer}/self_attention/layer_norm", f"{own}.self_attn_layer_norm")
            if stack == "decoder":
                cross = f"{own}.encoder_attn"
                yield from linear(f"{layer}/attention/linear_0", f"{cross}.q_proj")
                yield from linear(f"{layer}/attention/linear_1", f"{cross}.k_proj", f"{cross}.v_proj")
                yield from linear(f"{layer}/attention/linear_2", f"{cross}.out_proj")
                yield from norm(f"{layer}/attention/layer_norm", f"{own}.encoder_attn_layer_norm")
            yield from linear(f"{layer}/ffn/linear_0", f"{own}.fc1")
            yield from linear(f"{layer}/ffn/linear_1", f"{own}.fc2")
            yield from norm(f"{layer}/ffn/layer_norm", f"{own}.final_layer_norm")
        yield from norm(f"{stack}/layer_norm", f"model.{stack}.layer_norm")
        yield f"{stack}/position_encodings/encodings", state[f"model.{stack}.embed_positions.weight"]
        yield f"{stack}/num_heads", torch.tensor(config[f"{stack}_attention_heads"], dtype=torch.int16)
    for number in (1, 2):
        for kind in ("weight", "bias"):
            yield f"encoder/conv{number}/{kind}", state[f"model.encoder.conv{number}.{kind}"]
    yield "decoder/embeddings/weight", state["model.decoder.embed_tokens.weight"]
    act = _ACTIVATIONS[config.get("activation_function", "gelu")]
    scales = int(config.get("scale_embedding", False))
    flags = {"activation": act, "alibi": 0, "pre_norm": 1, "scale_embeddings": scales, "start_from_zero_embedding": 0}
    for name, value in flags.items():
        yield f"decoder/{name}", torch.tensor(value, dtype=torch.int8)
    yield "decoder/alignment_heads", torch.tensor(1, dtype=torch.int16)
    yield "decoder/alignment_layer", torch.tensor(-1, dtype=torch.int16)


def _write_ggml(folder: Path, to: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Sizes, filters of mel bins, tokens as bytes, then tensors, the last dimension first."""
    sizes = [
        config["vocab_size"],
        *(
            config[f"{name}"]
            for name in ("max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers")
        ),
        *(
            config[f"{name}"]
            for name in ("max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers")
        ),
        config["num_mel_bins"],
        1,  # matrices and convolutions in float16: it computes convolutions of no others
    ]
    filters = np.ascontiguousarray(mel_filters(config["num_mel_bins"]).T, np.float32)
    generation = json.loads((folder / "generation_config.json").read_text())
    end = int(generation.get("eos_token_id", config["eos_token_id"]))
    tokens = [_bytes_of(token) for token in _vocabulary(folder, config["vocab_size"])[:end]]
    with to.open("wb") as file:
        file.write(struct.pack("<12i", _GGML_MAGIC, *sizes))
        file.write(struct.pack("<2i", config["num_mel_bins"], NUM_FFT // 2 + 1) + filters.tobytes())
        file.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<i", len(token)) + token)
        for name, tensor in state.items():
            own = _openai_name(name.removeprefix("model."))
            if own in ("encoder.conv1.bias", "encoder.conv2.bias"):
                tensor = tensor[:, None]
            elif tensor.ndim > 1 and not own.endswith("positional_embedding"):
                tensor = tensor.half()
            label = own.encode()
            file.write(struct.pack("<3i", tensor.ndim, len(label), int(tensor.dtype == torch.float16)))
            file.write(struct.pack(f"<{tensor.ndim}i", *reversed(tensor.shape)) + label + tensor.numpy().tobytes())


def _openai_name(name: str) -> str:
    if name in _OPENAI_OUTSIDE:
        return _OPENAI_OUTSIDE[name]
    stack, layers, *rest = name.split(".")
    if layers != "layers":
        return name
    number, *part, kind = rest
    return f"{stack}.blocks.{number}.{_OPENAI_PARTS['.'.join(part)]}.{kind}"


def _vocabulary(folder: Path, size: int) -> list[str]:
    """All tokens by their ids, those without a name by their number."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = {int(token_id): token for token, token_id in tokenizer["model"]["vocab"].items()}
    names |= {int(token["id"]): token["content"] for token in tokenizer.get("added_tokens", [])}
    return [names.get(token_id, f"<|{token_id}|>") for token_id in range(size)]


def _bytes_of(token: str) -> bytes:
    """What a token of a byte-level vocabulary stands for."""
    return b"".join(bytes([_BYTES[each]]) if each in _BYTES else each.encode() for each in token)


def _byte_letters() -> dict[str, int]:
    """Letter -> byte: printable bytes are themselves, the others letters from 256 on (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_letters()
