"""Random checkpoints in the Hugging Face format, made offline: config.json, safetensors, a real BPE tokenizer, a chat
template. For benchmarks (true shapes, meaningless text) and for tests (tiny shapes).

Knows the weight names of the Llama-shaped families (`checkpoint_families.py` those of others); imports neither torch
nor transformers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_interfaces import ConfigError
from quire_testkit.checkpoint_families import (
    MOE_FAMILIES,
    RECURRENT_FAMILIES,
    moe_fields,
    moe_shapes,
    recurrent_fields,
    recurrent_shapes,
)
from quire_testkit.tokenizers import write_tokenizer

__all__ = ["DTYPES", "FAMILIES", "SIZES", "checkpoint_config", "make_checkpoint", "parameter_shapes"]

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000.0},
    **MOE_FAMILIES,
    **RECURRENT_FAMILIES,
}

_SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(_SHAPE, (64, 176, 2, 4, 2, 16, 1024, 2048, True), strict=True)),
    "60m": dict(zip(_SHAPE, (512, 1536, 8, 8, 4, 64, 32768, 8192, True), strict=True)),
    "0.6b": dict(zip(_SHAPE, (1024, 3072, 28, 16, 8, 128, 151936, 40960, True), strict=True)),
    "1b": dict(zip(_SHAPE, (2048, 8192, 16, 32, 8, 64, 128256, 131072, True), strict=True)),
    "8b": dict(zip(_SHAPE, (4096, 14336, 32, 32, 8, 128, 128256, 131072, False), strict=True)),
}

DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
"""Name -> (code in a safetensors header, bytes)."""
_CHUNK_ELEMENTS = 1 << 22


def checkpoint_config(like: str, size: str, dtype: str = "bfloat16", **overrides: Any) -> dict[str, Any]:
    """The config.json of a random checkpoint.

    Args:
        like: Family, a key of `FAMILIES`.
        size: Shape, a key of `SIZES`; "0.6b" is Qwen3-0.6B's, "8b" is Llama-3.1-8B's.
        dtype: float32, float16 or bfloat16.
        **overrides: Fields of config.json to replace.

    Raises:
        ConfigError: unknown family, size or dtype (the message lists the known ones), or overrides that make no model.
    """
    for name, value, known in (("like", like, FAMILIES), ("size", size, SIZES), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}", field=name)
    config = {
        **SIZES[size],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "dtype": dtype,
        "bos_token_id": None,
        **FAMILIES[like],
        **(moe_fields(like, {**SIZES[size], **overrides}) if like in MOE_FAMILIES else {}),
        **(recurrent_fields(like, {**SIZES[size], **overrides}) if like in RECURRENT_FAMILIES else {}),
        **overrides,
    }
    _check_shape(config)
    return {**config, "eos_token_id": config["vocab_size"] - 1}


def _check_shape(config: dict[str, Any]) -> None:
    for name in _SHAPE[:-1]:
        if type(config[name]) is not int or config[name] < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {config[name]!r}", field=name)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})",
            field="num_key_value_heads",
        )


def parameter_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight, in the order they are stored."""
    if any(config["model_type"] == family["model_type"] for family in RECURRENT_FAMILIES.values()):
        yield from recurrent_shapes(config)
        return
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv_bias = config["model_type"] == "qwen2" or config["attention_bias"]
    has_experts = any(config["model_type"] == family["model_type"] for family in MOE_FAMILIES.values())
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, hidden)
            if qkv_bias:
                yield f"{at}self_attn.{name}_proj.bias", (rows,)
        yield f"{at}self_attn.o_proj.weight", (hidden, query)
        if config["attention_bias"]:
            yield f"{at}self_attn.o_proj.bias", (hidden,)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            yield f"{at}self_attn.q_norm.weight", (head_dim,)
            yield f"{at}self_attn.k_norm.weight", (head_dim,)
        if has_experts:
            yield from moe_shapes(config, at)
        else:
            yield f"{at}mlp.gate_proj.weight", (inner, hidden)
            yield f"{at}mlp.up_proj.weight", (inner, hidden)
            yield f"{at}mlp.down_proj.weight", (hidden, inner)
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def make_checkpoint(
    folder: Path | str,
    *,
    like: str = "llama",
    size: str = "tiny",
    dtype: str = "bfloat16",
    seed: int = 0,
    max_shard_bytes: int = 2 << 30,
    progress: Progress | None = None,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint with a trained tokenizer that covers the whole vocabulary.

    Args:
        folder: Where to write; made if missing, must be empty otherwise.
        like, size, dtype, overrides: See `checkpoint_config`.
        seed: Same seed, same bytes.
        max_shard_bytes: A file is closed before its weights grow beyond this; a larger weight gets its own file.
        progress: Called as weights are made.

    Returns:
        The folder.

    Raises:
        ConfigError: bad arguments, or the folder holds something already.
    """
    folder = Path(folder)
    config = checkpoint_config(like, size, dtype, **overrides)
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}", field="seed")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}", field="max_shard_bytes")
    _make_folder(folder)
    write_tokenizer(folder, vocab_size=config["vocab_size"], seed=seed)
    _write_weights(folder, config, dtype, seed, max_shard_bytes, progress)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    # Last, so that a folder with a config.json is a complete checkpoint.
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = next(folder.iterdir(), None)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; choose another folder", field="folder"
        ) from None
    if occupied is not None:
        raise ConfigError(
            f"{folder} is not empty, it holds {occupied.name}; choose another folder or delete it", field="folder"
        )


def _write_weights(
    folder: Path,
    config: dict[str, Any],
    dtype: str,
    seed: int,
    max_shard_bytes: int,
    progress: Progress | None,
) -> None:
    code, item_bytes = DTYPES[dtype]
    shapes = list(parameter_shapes(config))
    shards = _shards(shapes, item_bytes, max_shard_bytes)
    total = sum(math.prod(shape) * item_bytes for _, shape in shapes)
    generator, done, weight_map = np.random.default_rng(seed), 0, {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with open(folder / file, "wb") as out:
            out.write(_safetensors_header(shard, code, item_bytes))
            for name, shape in shard:
                weight_map[name] = file
                for part in _random_weight(generator, name, shape, dtype, config["initializer_range"]):
                    out.write(part)
                    done += len(part)
                if progress is not None:
                    progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(
    shapes: list[tuple[str, tuple[int, ...]]], item_bytes: int, max_shard_bytes: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in shapes:
        size = math.prod(shape) * item_bytes
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += size
    return shards


def _safetensors_header(shard: list[tuple[str, tuple[int, ...]]], code: str, item_bytes: int) -> bytes:
    """The head of a safetensors file: length (little-endian u64), then JSON padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shard:
        end = start + math.prod(shape) * item_bytes
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _random_weight(
    generator: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str, std: float
) -> Iterator[bytes]:
    """Norm weights around one, the rest around zero, with deviation `std`; in chunks so that memory stays small."""
    mean = 1.0 if name.endswith("norm.weight") else 0.0
    left = math.prod(shape)
    while left > 0:
        count = min(left, _CHUNK_ELEMENTS)
        values = generator.standard_normal(count, dtype=np.float32) * np.float32(std) + np.float32(mean)
        yield _encode(values, dtype)
        left -= count


def _encode(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "float32":
        return values.tobytes()
    if dtype == "float16":
        return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32)
    # bfloat16 is the upper half of float32, rounded to nearest even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
