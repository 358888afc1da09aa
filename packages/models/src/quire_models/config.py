"""What a checkpoint's config.json says about the network, checked, in one record. Free of torch.

Knows what planners and the engine ask of any network; how the fields of a family are read stands in the family's folder
(`<model_type>/config.py`). Does not know tensors, tokenizers or memory plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from quire_interfaces import CheckpointError, Fields, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, read_json
from quire_models.overrides import check_overrides_read, overridden
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats import (
    QUANTIZATION_KEYS,
    parse_kv_cache,
    parse_quantization,
    quantization_beside,
    quantization_method,
)
from quire_models.registry import architecture_entry, architecture_of
from quire_models.rope_config import RopeConfig
from quire_models.size_bounds import check_sizes
from quire_models.stored_linears import has_tensor, stored_linears, with_files
from quire_models.unsupported import no_config_error

__all__ = ["DTYPE_BYTES", "ModelConfig", "start_token_ids"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A network, as far as its shape decides. Families with more to say have a record of their own kind.

    Fields with a default describe what most networks do not have.
    """

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
    """Of every norm, layer norms included."""
    hidden_act: str
    """A name of `quire_models.config_fields.HIDDEN_ACTS`, right-hand side."""
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
    embedding_size: int = 0
    """Width of the embedding and of what the LM head takes; 0 where it is the hidden size."""
    rotary_dim: int = 0
    """Dimensions of a head that are rotated, from the first; 0 for positions that come another way."""
    attention_matrices: tuple[tuple[int, int], ...] = ()
    """(outputs, inputs) of every linear layer of an attention; empty for queries, keys, values and output by heads."""
    mlp_gated: bool = True
    """The feed-forward network has a gate: three matrices instead of two."""
    norms_per_layer: int = 2
    """Norms of the hidden size in a layer."""
    norm_bias: bool = False
    """Norms have a bias (layer norms)."""
    max_encoder_len: int = 0
    """Most tokens that its encoder reads; 0 for a network without one."""
    decoder_start_token_ids: tuple[int, ...] = ()
    """What the decoder of a network with an encoder begins with."""
    generates: bool = True
    """It continues texts; otherwise it is an encoder alone, which reads them."""
    has_positions_without_end: bool = False
    """Positions are distances only: `max_model_len` is what the network was trained for, and it runs beyond."""
    attention_sinks: bool = False
    """Each head has a score that takes attention and gives nothing (see op `paged_attention`)."""
    alibi: bool = False
    """Positions come as ALiBi slopes of the attention scores."""
    quantization: QuantizationConfig | None = None
    """How the checkpoint stores the weights of linear layers; None as they are."""
    quantization_method: str = ""
    """`quant_method` of the checkpoint, as its project spells it today; empty where it says none."""
    stored_cache_dtype: str | None = None
    """What the checkpoint has scales of keys and values for, a name of `quire_interfaces.KV_CACHE_DTYPES`."""
    is_native: bool = True
    """Quire has a network of its own for it; otherwise Transformers' is run."""
    stored_parameters: int | None = None
    """Weights of the checkpoint, where they are counted instead of derived."""
    stored_linears: tuple[tuple[int, int], ...] = ()
    """(outputs, inputs) of the linear layers in the files of such a checkpoint, LM head and routed experts aside."""
    other_parameters: int = 0
    """Weights that none of the fields above counts: learned positions, unusual norms, a bias of the LM head."""
    has_own_head: bool = False
    """The checkpoint has an LM head of its own although config.json says that it is the embedding, and it is used."""
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of config.json that were replaced, as they were asked for."""

    head_may_differ: ClassVar[bool] = False
    """The network takes an LM head of the checkpoint even where config.json says that it is the embedding."""

    @classmethod
    def from_path(cls, folder: str | Path, *, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read config.json (and generation_config.json when there is one) of a checkpoint folder.

        Args:
            folder: The checkpoint's.
            overrides: Fields of config.json to replace; objects are merged, null takes a field away.

        Raises:
            ConfigError: An override that the network does not read.
            CheckpointError: Files missing or broken, an architecture that is not supported, a field that is missing or
                wrong. The message names the file, the field and the value.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"model folder {str(folder)!r} does not exist or is not a folder")
        path = folder / "config.json"
        if not path.is_file():
            raise no_config_error(folder)
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        values, beside = read_json(path), None
        if not any(values.get(name) is not None for name in QUANTIZATION_KEYS):
            beside = quantization_beside(folder)
        model = cls.from_dict(values, generation=generation, source=str(path), overrides=overrides, beside=beside)
        if not model.is_native:
            counted = import_module("quire_models.transformers_backend.config").stored_parameters(folder)
            linears = stored_linears(folder, model.vocab_size)
            return dataclasses.replace(model, stored_parameters=counted, stored_linears=linears)
        model = dataclasses.replace(model, quantization=with_files(model.quantization, folder))
        if model.head_may_differ and model.tie_word_embeddings:
            return dataclasses.replace(model, has_own_head=has_tensor(folder, "lm_head.weight"))
        return model

    @classmethod
    def from_dict(
        cls,
        values: dict[str, Any],
        *,
        generation: dict[str, Any] | None = None,
        source: str = "config.json",
        overrides: Mapping[str, Any] | None = None,
        beside: Fields | None = None,
    ) -> ModelConfig:
        """As `from_path`, from the parsed files.

        Args:
            beside: What a file beside config.json says of the quantization, where config.json says nothing.
        """
        replaced = overridden(values, overrides or {})
        config = Fields(replaced, f"{source} with hf_overrides" if overrides else source)
        check_sizes(replaced, config.source)
        model_type = architecture_entry(architecture_of(config)).model_type
        quantization = parse_quantization(beside or config)
        model: ModelConfig = import_module(f"quire_models.{model_type}.config").read_config(config)
        generation_source = source.replace("config.json", "generation_config.json")
        preferred = Fields(generation or {}, generation_source).token_ids("eos_token_id")
        eos_token_ids = tuple(dict.fromkeys(preferred + model.eos_token_ids))
        start = model.decoder_start_token_ids
        if model.max_encoder_len and generation:
            start = start_token_ids(Fields(generation, generation_source), start)
        stored_cache_dtype = parse_kv_cache(beside or config)
        if overrides and model.is_native:  # Transformers reads what it will; it is asked when it builds the network
            newer = {"rope_scaling", "rope_theta"} if "rope_parameters" in config.names_read else set()
            check_overrides_read(overrides, config.names_read | newer, model.architecture)
        return dataclasses.replace(
            model,
            quantization=quantization,
            quantization_method=quantization_method(beside or config),
            stored_cache_dtype=stored_cache_dtype,
            eos_token_ids=eos_token_ids,
            decoder_start_token_ids=start,
            overrides=dict(overrides or {}),
        )

    def within(self, max_model_len: int) -> Self:
        """The network of an engine whose sequences have at most so many tokens; see `RopeConfig.within`."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        ropes: dict[str, Any] = {
            name: rope.within(max_model_len) for name, rope in values if isinstance(rope, RopeConfig)
        }
        return dataclasses.replace(self, **ropes)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (the same as of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_width(self) -> int:
        """Width of the embedding and of what the LM head takes."""
        return self.embedding_size or self.hidden_size

    @property
    def inner_width(self) -> int:
        """Numbers that a feed-forward network keeps for each token at once, for planners."""
        return 3 * self.intermediate_size

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """Layer name -> what the layer keeps per block, in the order of the layers.

        Args:
            dtype: What keys and values are kept in: a name of `quire_interfaces.KV_CACHE_DTYPES`.
        """
        specs: dict[str, KVCacheSpec] = {}
        for layer, window in enumerate(self.sliding_windows):
            if window is None:
                specs[f"model.layers.{layer}"] = FullAttentionSpec(
                    block_size=block_size,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    dtype=dtype,
                )
            else:
                specs[f"model.layers.{layer}"] = SlidingWindowSpec(
                    block_size=block_size,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    dtype=dtype,
                    sliding_window=window,
                )
        return specs


def start_token_ids(config: Fields, default: tuple[int, ...]) -> tuple[int, ...]:
    """What a decoder begins with: its start token, then the token that generation is made to begin with, if there is
    one.

    Args:
        config: Of the network, or of generation.
        default: The same where `config` does not say; its first token is the start token.
    """
    forced = config.token_ids("forced_bos_token_id")[:1]
    return (config.token_ids("decoder_start_token_id") or default)[:1] + (forced or default[1:])
