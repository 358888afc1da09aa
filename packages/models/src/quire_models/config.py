"""What a checkpoint's config.json says, checked, in one record. Free of torch.

Knows what planners and the engine ask of any network; how a family's fields are read, and what its network is, stands
in the family's file (`families/`). Does not know tensors, tokenizers or memory plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from quire_interfaces import (
    CheckpointError,
    ConfigError,
    Fields,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    read_json,
)
from quire_models.composite import INHERITED, TOWER_FIELDS, LanguageNames, language_names, language_part
from quire_models.config_fields import DTYPE_BYTES, stored_dtype
from quire_models.encoder_spec import start_token_ids
from quire_models.media_spec import MediaSpec, media_refusal, media_spec
from quire_models.overrides import check_overrides_read, overridden
from quire_models.pooling_decoder import as_pooling_decoder
from quire_models.pooling_heads import classifier_kind
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats import (
    QUANTIZATION_KEYS,
    parse_kv_cache,
    parse_quantization,
    quantization_beside,
    quantization_method,
)
from quire_models.registry import DUAL_ENCODERS, NATIVE_TYPES, architecture_entry, architecture_of
from quire_models.retrieval import as_retriever, retriever_config
from quire_models.rope_config import RopeConfig
from quire_models.size_bounds import check_sizes
from quire_models.spec import NetworkSpec, within
from quire_models.stored_linears import has_tensor, tower_parameters, with_files, with_stored_head
from quire_models.unsupported import no_config_error

__all__ = ["DTYPE_BYTES", "ModelConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checkpoint: what its network is (`network`), and what else config.json and the files beside it say.

    Sizes that planners and the engine ask for are those of the network. Of a network whose layers differ they are the
    first attention's.
    """

    architecture: str
    """The checkpoint's class name, for example "LlamaForCausalLM"."""
    model_type: str
    network: NetworkSpec
    """The description of the network. Of one that is run through Transformers, the attention alone."""
    text_architecture: str = ""
    """Class of the language model by itself, of a checkpoint of several modalities where Quire has a network of its own
    for it; empty otherwise."""
    media: MediaSpec | None = None
    """Its towers; None for a language model alone, and for towers that are not served."""
    media_refusal: str = ""
    """Why the media that it was made for are not served; empty where they are, or there are none."""
    language_names: LanguageNames | None = None
    """What the language model calls the tensors of a checkpoint of several modalities; None for a text-only one."""
    dtype: str
    """What the checkpoint's weights are kept in: "float32", "bfloat16" or "float16"."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """From generation_config.json and config.json, in this order, without repeats."""
    decoder_start_token_ids: tuple[int, ...] = ()
    """What the decoder of a network with an encoder begins with."""
    problem_type: str = ""
    """What its classes are, as config.json says: "regression", "single_label_classification" or
    "multi_label_classification"; empty where it does not."""
    quantization: QuantizationConfig | None = None
    """How the checkpoint stores the weights of linear layers; None as they are."""
    quantization_method: str = ""
    """`quant_method` of the checkpoint, as its project spells it today; empty where it says none."""
    stored_cache_dtype: str | None = None
    """What the checkpoint has scales of keys and values for, a name of `quire_interfaces.KV_CACHE_DTYPES`."""
    is_native: bool = True
    """Quire has a network of its own for it; otherwise Transformers' is run."""
    stored_parameters: int | None = None
    """Weights of the checkpoint, where its files are counted instead of the network."""
    stored_linears: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    """Name -> (outputs, inputs) of the linear layers in the files of such a checkpoint, LM head and routed experts
    aside."""
    has_own_head: bool = False
    """The checkpoint has an LM head of its own although config.json says that it is the embedding, and it is used."""
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of config.json that were replaced, as they were asked for."""

    @classmethod
    def from_path(
        cls, folder: str | Path, *, overrides: Mapping[str, Any] | None = None, trust_remote_code: bool = False
    ) -> ModelConfig:
        """Read config.json (and generation_config.json when there is one) of a checkpoint folder.

        Args:
            folder: The checkpoint's.
            overrides: Fields of config.json to replace; objects are merged, null takes a field away.
            trust_remote_code: Code that the checkpoint brings may be run, where Quire has no network of its own.

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
        values = read_json(path)
        is_said = any(values.get(name) is not None for name in QUANTIZATION_KEYS)
        beside = None if is_said else quantization_beside(folder)
        model = cls.from_dict(
            values,
            generation=generation,
            source=str(path),
            overrides=overrides,
            beside=beside,
            trust_remote_code=trust_remote_code,
        )
        if model.media is not None and model.language_names is not None:
            towers = tower_parameters(folder, model.language_names)
            model = dataclasses.replace(model, media=dataclasses.replace(model.media, num_parameters=towers))
        if not model.is_native:
            counts: Any = import_module("quire_models.transformers_backend.counts")
            counted: ModelConfig = counts.with_counts(model, folder)
            return counted
        rename = model.network.checkpoint.rename
        quantization = with_files(model.quantization, folder, model.language_names, rename)
        model = dataclasses.replace(model, quantization=quantization)
        if model.language_names is not None:
            return dataclasses.replace(model, network=with_stored_head(model.network, folder, model.language_names))
        if model.network.head.may_differ and model.tie_word_embeddings:
            return dataclasses.replace(model, has_own_head=has_tensor(folder, "lm_head.weight"))
        return model

    def with_towers(self, folder: Path) -> ModelConfig:
        """This language model with the towers of another checkpoint, which is made for its embeddings.

        Args:
            folder: Its folder; its language model's weights are not needed.

        Raises:
            CheckpointError: It has no towers, or their embeddings are of another width.
        """
        other = ModelConfig.from_path(folder)
        if other.media is None:
            raise CheckpointError(f"{folder} has no towers that are served; it is a {other.architecture}")
        if other.hidden_size != self.hidden_size:
            raise CheckpointError(
                f"the towers in {folder} are made for embeddings of {other.hidden_size}, and those of the language "
                f"model have {self.hidden_size}"
            )
        if other.media.cross_attention_layers or other.media.is_added:
            raise CheckpointError(f"the towers in {folder} are made for layers of their own language model")
        return dataclasses.replace(self, media=other.media, language_names=language_names(self.network))

    def with_tower_weights(self, linear_method: str) -> ModelConfig:
        """This network with weights of its towers kept in another form than the checkpoint's, whatever form those of
        its language model have.

        Args:
            linear_method: A name that `quire_quantization.linear_method` takes.

        Raises:
            ConfigError: It has no towers of Quire's own.
        """
        if self.media is None or self.media.tower is None:
            reason = "has no towers that are built" if self.media is None else "runs Transformers' towers"
            raise ConfigError(
                f"{self.architecture} {reason}, whose weights could be kept in {linear_method}; leave "
                "mm_encoder_quantization out",
                field="mm_encoder_quantization",
            )
        return dataclasses.replace(self, media=dataclasses.replace(self.media, linear_method=linear_method))

    @classmethod
    def from_dict(
        cls,
        values: dict[str, Any],
        *,
        generation: dict[str, Any] | None = None,
        source: str = "config.json",
        overrides: Mapping[str, Any] | None = None,
        beside: Fields | None = None,
        trust_remote_code: bool = False,
    ) -> ModelConfig:
        """As `from_path`, from the parsed files.

        Args:
            beside: What a file beside config.json says of the quantization, where config.json says nothing.
        """
        replaced = overridden(values, overrides or {})
        retriever = retriever_config(replaced, source)
        replaced = replaced if retriever is None else retriever.values
        config = Fields(replaced, f"{source} with hf_overrides" if overrides else source)
        check_sizes(replaced, config.source)
        part = language_part(replaced, config.source, NATIVE_TYPES)
        architecture = architecture_of(config) if part is None else str(replaced["architectures"][0])
        dual: Any = import_module("quire_models.dual_encoder") if architecture in DUAL_ENCODERS else None
        part = part if dual is None else dual.text_part(replaced, config.source)
        config = config if part is None else part.config
        entry = architecture_entry(architecture if part is None else part.architecture)
        quantization = parse_quantization(beside or config)
        network: NetworkSpec = entry.spec(config, trust_remote_code=trust_remote_code)
        outer = config if part is None else Fields(replaced, source)
        if retriever is not None:
            network = as_retriever(network, config, retriever.embedding_dim)
        elif part is not None and (head := classifier_kind(architecture)) is not None:
            network = as_pooling_decoder(network, outer, head)
        generation_source = source.replace("config.json", "generation_config.json")
        preferred = Fields(generation or {}, generation_source).token_ids("eos_token_id")
        start = network.decoder_start_token_ids
        if network.max_encoder_len and generation:
            start = start_token_ids(Fields(generation, generation_source), start)
        model = cls(
            architecture=architecture,
            model_type=entry.model_type,
            network=network,
            text_architecture="" if part is None else part.architecture,
            media=None
            if part is None
            else (media_spec if dual is None else dual.image_spec)(
                replaced, architecture, network.hidden_size, config, is_native=entry.is_native
            ),
            media_refusal="" if part is None else media_refusal(replaced),
            language_names=None if part is None else language_names(network),
            dtype=stored_dtype(config),
            bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
            eos_token_ids=tuple(dict.fromkeys(preferred + config.token_ids("eos_token_id"))),
            decoder_start_token_ids=start,
            problem_type=outer.text("problem_type", default=""),
            quantization=quantization,
            quantization_method=quantization_method(beside or config),
            stored_cache_dtype=parse_kv_cache(beside or config),
            is_native=entry.is_native,
            overrides=dict(overrides or {}),
        )
        if overrides and model.is_native:  # Transformers reads what it will; it is asked when it builds the network
            newer = {"rope_scaling", "rope_theta"} if "rope_parameters" in config.names_read else set()
            _check_overrides(overrides, config.names_read | newer, architecture, "" if part is None else part.field)
        return model

    def within(self, max_model_len: int) -> Self:
        """The network of an engine whose sequences have at most so many tokens; see `RopeConfig.within`."""
        return dataclasses.replace(self, network=within(self.network, max_model_len))

    def with_encoder_len(self, max_encoder_len: int) -> Self:
        """The network of an engine whose encoder reads at most so many tokens."""
        return dataclasses.replace(self, network=dataclasses.replace(self.network, max_encoder_len=max_encoder_len))

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the embedding has."""
        return self.network.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.network.hidden_size

    @property
    def intermediate_size(self) -> int:
        """Width of a feed-forward network, as config.json names it; 0 for none."""
        return self.network.intermediate_size

    @property
    def num_layers(self) -> int:
        """Number of layers, the decoder's in a network with an encoder."""
        return len(self.network.layers)

    @property
    def max_model_len(self) -> int:
        """Tokens of context, rope scaling included."""
        return self.network.max_model_len

    @property
    def max_encoder_len(self) -> int:
        """Most tokens that its encoder reads; 0 for a network without one."""
        return self.network.max_encoder_len

    @property
    def num_mel_bins(self) -> int:
        """Height of the spectrograms that its encoder reads; 0 where it reads tokens, or there is none."""
        return self.network.num_mel_bins

    @property
    def encoder_takes_audio(self) -> bool:
        """Its encoder reads sounds: spectrograms, frames, or samples."""
        return self.num_mel_bins > 0 or bool(self.network.sound_convolutions)

    @property
    def generates(self) -> bool:
        """It continues texts; otherwise it gives hidden states, or what a pooler makes of them."""
        return self.network.has_lm_head

    @property
    def is_encoder(self) -> bool:
        """It reads whole texts, in both directions, and keeps no cache."""
        return self.network.is_encoder

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes that its head tells apart, by number; empty without such a head."""
        return () if self.network.pooler is None else self.network.pooler.labels

    @property
    def num_labels(self) -> int:
        """Number of classes that its head tells apart; 0 without such a head."""
        return len(self.labels)

    @property
    def has_positions_without_end(self) -> bool:
        """Positions are distances only: `max_model_len` is what the network was trained for, and it runs beyond."""
        return self.network.has_positions_without_end

    @property
    def tie_word_embeddings(self) -> bool:
        """The LM head is the embedding."""
        return self.network.head.tied

    @property
    def num_heads(self) -> int:
        """Number of query heads; 0 without attention."""
        return self.network.attention.num_heads if self.network.attention else 0

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads; 0 without attention."""
        return self.network.attention.num_kv_heads if self.network.attention else 0

    @property
    def head_dim(self) -> int:
        """Dimensions of a head's keys; 0 without attention."""
        return self.network.attention.head_dim if self.network.attention else 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (the same as of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def rope(self) -> RopeConfig:
        """The rotation of layers without a window, or of the others where those have none."""
        rotated = [mixer for mixer in self.network.mixers if getattr(mixer, "rope", None) is not None]
        rotated.sort(key=lambda mixer: getattr(mixer, "sliding_window", None) is not None)
        return rotated[0].rope if rotated else RopeConfig()  # type: ignore[attr-defined]  # those with one

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Per mixer: window in tokens; None for full attention, and for none."""
        return tuple(getattr(mixer, "sliding_window", None) for mixer in self.network.mixers)

    @property
    def inner_width(self) -> int:
        """Most numbers that a part of a layer keeps per token while it runs, for planners."""
        return self.network.inner_width

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """Layer name -> what the layer keeps per block, in the order of the layers; see `NetworkSpec`.

        Where the tokens of a prompt all see one another, layers with a sliding window keep all of them, too.
        """
        specs = self.network.kv_cache_specs(block_size, dtype)
        if self.media is None or not self.media.is_prefix_lm:
            return specs
        kept = {name: spec for name, spec in specs.items() if isinstance(spec, SlidingWindowSpec)}
        return specs | {
            name: FullAttentionSpec(
                block_size=spec.block_size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=spec.dtype
            )
            for name, spec in kept.items()
        }


def _check_overrides(overrides: Mapping[str, Any], known: set[str], architecture: str, field: str) -> None:
    """Have each override make a difference; see `check_overrides_read`.

    Args:
        known: Fields that the network reads.
        field: Field of config.json in which they stand, with dots between objects; empty for the file itself.
    """
    outer, _, inner = field.partition(".")
    if not outer:
        check_overrides_read(overrides, known | set(TOWER_FIELDS), architecture)
        return
    rest = {name: value for name, value in overrides.items() if name != outer}
    of_classes = ("id2label", "num_labels", "problem_type") if classifier_kind(architecture) is not None else ()
    whole = {*INHERITED, *TOWER_FIELDS, *of_classes, "architectures", "tie_word_embeddings"}
    check_overrides_read(rest, whole, architecture)
    if isinstance(value := overrides.get(outer), Mapping):
        _check_overrides(value, known, architecture, inner)
