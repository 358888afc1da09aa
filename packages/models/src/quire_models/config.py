"""What a checkpoint's config.json says about the network, checked, in one record. Free of torch.

Knows the fields of Llama, Mistral, Qwen2 (also 2.5) and Qwen3; does not know tensors, tokenizers or memory plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire_models.fields import Fields, read_json
from quire_models.registry import ARCHITECTURES
from quire_models.rope_config import RopeConfig, parse_rope

__all__ = ["DTYPE_BYTES", "ModelConfig"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

HIDDEN_ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
"""config.json's activation names -> which gated activation op is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A network, as far as its shape decides."""

    architecture: str
    """The checkpoint's class name, for example "LlamaForCausalLM"."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    """ "silu" or "gelu" (tanh approximation)."""
    rope: RopeConfig
    qkv_bias: bool
    """Query, key and value projections have a bias."""
    attention_out_bias: bool
    """The attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are RMS-normalised per head before they are rotated (Qwen3)."""
    tie_word_embeddings: bool
    """The LM head is the embedding."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: window in tokens, None for full attention."""
    max_model_len: int
    """Tokens of context, rope scaling included."""
    dtype: str
    """Of the checkpoint: "float32", "bfloat16" or "float16"."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """From generation_config.json and config.json, in this order, without repeats."""

    @classmethod
    def from_path(cls, folder: str | Path) -> ModelConfig:
        """Read config.json (and generation_config.json when there is one) of a checkpoint folder.

        Raises:
            CheckpointError: Files missing or broken, an architecture that is not supported, a field that is missing or
                wrong. The message names the file, the field and the value.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"model folder {str(folder)!r} does not exist or is not a folder")
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{str(folder)!r} has no config.json, so it is not a model folder in HF format")
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(read_json(path), generation=generation, source=str(path))

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], *, generation: dict[str, Any] | None = None, source: str = "config.json"
    ) -> ModelConfig:
        """As `from_path`, from the parsed files."""
        config = Fields(values, source)
        architecture = _architecture(config)
        model_type = ARCHITECTURES[architecture].model_type
        if config.get("quantization_config") is not None:
            raise CheckpointError(
                f"{source}: the checkpoint is quantized (quantization_config); use the unquantized checkpoint, "
                "and quantize while loading if wanted (quantization 'int8')"
            )
        heads = config.integer("num_attention_heads", minimum=1)
        kv_heads = config.integer("num_key_value_heads", default=heads, minimum=1)
        if heads % kv_heads:
            raise CheckpointError(
                f"{source}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
            )
        hidden_size = config.integer("hidden_size", minimum=1)
        layers = config.integer("num_hidden_layers", minimum=1)
        positions = config.integer("max_position_embeddings", minimum=1)
        rope = parse_rope(config, max_position_embeddings=positions)
        head_dim = _head_dim(config, model_type, hidden_size, heads)
        if rope.kind == "dynamic" and head_dim == 2:
            raise CheckpointError(f"{source}: dynamic rope scaling needs a head_dim greater than 2")
        qkv_bias, out_bias = _attention_biases(config, model_type)
        return cls(
            architecture=architecture,
            model_type=model_type,
            vocab_size=config.integer("vocab_size", minimum=1),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size", minimum=1),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.number("rms_norm_eps", default=1e-6, minimum=0.0),
            hidden_act=_hidden_act(config),
            rope=rope,
            qkv_bias=qkv_bias,
            attention_out_bias=out_bias,
            mlp_bias=model_type == "llama" and config.flag("mlp_bias", default=False),
            qk_norm=model_type == "qwen3",
            tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
            sliding_windows=_SLIDING_WINDOWS[model_type](config, layers),
            max_model_len=rope.context_length(positions),
            dtype=_dtype(config),
            bos_token_id=_token_ids(config, "bos_token_id")[0] if config.get("bos_token_id") is not None else None,
            eos_token_ids=_eos_token_ids(config, generation or {}),
        )

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (the same as of all value heads)."""
        return self.num_kv_heads * self.head_dim

    def kv_cache_specs(self, block_size: int, dtype_bytes: int) -> dict[str, KVCacheSpec]:
        """Layer name -> what the layer keeps per block, in the order of the layers."""
        specs: dict[str, KVCacheSpec] = {}
        for layer, window in enumerate(self.sliding_windows):
            if window is None:
                specs[f"model.layers.{layer}"] = FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    dtype_bytes=dtype_bytes,
                )
            else:
                specs[f"model.layers.{layer}"] = SlidingWindowSpec(
                    block_size=block_size,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    dtype_bytes=dtype_bytes,
                    sliding_window=window,
                )
        return specs


def _architecture(config: Fields) -> str:
    architectures = config.get("architectures")
    supported = ", ".join(sorted(ARCHITECTURES))
    if architectures is None:
        for name, entry in ARCHITECTURES.items():
            if entry.model_type == config.get("model_type"):
                return str(name)
        raise CheckpointError(
            f"{config.source}: architectures is missing and model_type is {config.get('model_type')!r}; "
            f"supported architectures: {supported}"
        )
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{config.source}: architectures must be a list of names, is {architectures!r}")
    for name in architectures:
        if name in ARCHITECTURES:
            return str(name)
    raise CheckpointError(
        f"{config.source}: architecture {', '.join(architectures) or '(none)'} is not supported; "
        f"supported architectures: {supported}"
    )


def _head_dim(config: Fields, model_type: str, hidden_size: int, heads: int) -> int:
    # Qwen3's class has a default of its own; the others divide the hidden size.
    default = 128 if model_type == "qwen3" else hidden_size // heads
    head_dim = config.integer("head_dim", default=default, minimum=1)
    if config.get("head_dim") is None and model_type != "qwen3" and hidden_size % heads:
        raise CheckpointError(
            f"{config.source}: head_dim is not given, and hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({heads})"
        )
    if head_dim % 2:
        raise CheckpointError(f"{config.source}: head_dim must be even for rotary embedding, is {head_dim}")
    return head_dim


def _attention_biases(config: Fields, model_type: str) -> tuple[bool, bool]:
    if model_type == "qwen2":
        return True, False
    if model_type == "mistral":
        return False, False
    bias = config.flag("attention_bias", default=False)
    return bias, bias


def _hidden_act(config: Fields) -> str:
    name = config.text("hidden_act", default="silu")
    if name not in HIDDEN_ACTS:
        raise CheckpointError(
            f"{config.source}: hidden_act {name!r} is not supported; supported: {', '.join(HIDDEN_ACTS)}"
        )
    return HIDDEN_ACTS[name]


def _no_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _mistral_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
    if config.get("sliding_window") is None:
        return (None,) * layers
    return (config.integer("sliding_window", minimum=1),) * layers


def _qwen_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
    if not config.flag("use_sliding_window", default=False) or config.get("sliding_window") is None:
        return (None,) * layers
    window = config.integer("sliding_window", minimum=1)
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", default=28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layer_types must name {' or '.join(known)} for each of {layers} layers, is {kinds!r}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_SLIDING_WINDOWS: dict[str, Callable[[Fields, int], tuple[int | None, ...]]] = {
    "llama": _no_windows,
    "mistral": _mistral_windows,
    "qwen2": _qwen_windows,
    "qwen3": _qwen_windows,
}


def _dtype(config: Fields) -> str:
    name = config.text("dtype", default=config.text("torch_dtype", default="float32")).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"{config.source}: dtype {name!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return name


def _token_ids(config: Fields, name: str) -> tuple[int, ...]:
    value = config.get(name)
    values = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in values):
        raise CheckpointError(f"{config.source}: {name} must be a token id or a list of token ids, is {value!r}")
    return tuple(values)


def _eos_token_ids(config: Fields, generation: dict[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    generation_fields = Fields(generation, config.source.replace("config.json", "generation_config.json"))
    for fields in (generation_fields, config):
        if fields.get("eos_token_id") is not None:
            found.update(dict.fromkeys(_token_ids(fields, "eos_token_id")))
    return tuple(found)
