"""Numbers of a GGUF file's network that a file may give for each layer, and sizes held against its tensors.

Free of torch.
"""

from __future__ import annotations

from typing import Any

from quire_interfaces import CheckpointError
from quire_models.gguf.header import GgufHeader

__all__ = ["check_shapes", "number_of_layers", "of_all_layers", "shape_of"]


def shape_of(header: GgufHeader, name: str) -> tuple[int, ...]:
    """Of a tensor that every such file has.

    Raises:
        CheckpointError: The file does not have it.
    """
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} has no tensor {name}; convert the model again")
    return header.tensors[name].shape


def number_of_layers(header: GgufHeader, architecture: str) -> int:
    """The file's block count, before anything is made for each of them.

    Raises:
        CheckpointError: It is no number, or the file has fewer tensors than layers.
    """
    key = f"{architecture}.block_count"
    count = header.fields.integer(key, minimum=1)
    if count > len(header.tensors):
        raise CheckpointError(
            f"{header.path}: {key} is {count}, but there are only {len(header.tensors)} tensors; convert the model "
            "again"
        )
    return count


def of_all_layers(header: GgufHeader, key: str, default: int | None = None) -> int:
    """A whole number above 0 that all layers have in common, given once or as a list with one for each layer.

    Raises:
        CheckpointError: It is missing and has no default, is no such number, or differs from layer to layer.
    """
    value = header.fields.get(key)
    if isinstance(value, list):
        count = number_of_layers(header, key.partition(".")[0])
        if len(value) != count:
            raise CheckpointError(f"{header.path}: {key} has {len(value)} numbers for {count} layers")
        if any(each != value[0] for each in value):
            listed = ", ".join(str(each) for each in dict.fromkeys(value))
            raise CheckpointError(
                f"{header.path}: {key} differs from layer to layer ({listed}), which is not read from GGUF files; use "
                "the model's safetensors checkpoint"
            )
        value = value[0]
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{header.path}: metadata {key} must be a whole number above 0, is {value!r}; convert the model again"
        )
    return value


def check_shapes(header: GgufHeader, values: dict[str, Any]) -> None:
    """Hold the sizes of config.json against the first layer's tensors, before memory is taken for a network.

    Raises:
        CheckpointError: A size is not the tensor's.
    """
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    queries = values["num_attention_heads"] * values["head_dim"]
    keys = values["num_key_value_heads"] * values["head_dim"]
    wanted = {
        "token_embd.weight": (1, hidden, "embedding_length"),
        "blk.0.attn_q.weight": (0, queries, "attention.head_count times attention.key_length"),
        "blk.0.attn_k.weight": (0, keys, "attention.head_count_kv times attention.key_length"),
        "blk.0.attn_v.weight": (0, keys, "attention.head_count_kv times attention.key_length"),
        "blk.0.ffn_up.weight": (0, inner, "feed_forward_length"),
        "blk.0.ffn_up_exps.weight": (0, values.get("num_experts"), "expert_count"),
    }
    if values["model_type"].startswith("deepseek"):  # queries come from other sizes, experts not in the first layers
        wanted = {"token_embd.weight": wanted["token_embd.weight"]}
    for name, (axis, size, what) in wanted.items():
        tensor = header.tensors.get(name)
        if tensor is None or size is None:
            continue
        if len(tensor.shape) <= axis or tensor.shape[axis] != size:
            raise CheckpointError(
                f"{header.path}: {what} is {size}, but {name} has the shape {list(tensor.shape)}; convert the model "
                "again"
            )
