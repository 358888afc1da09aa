"""The one tree of settings: every component's configuration, filled from command line, file and environment.

A component declares its fields (`quire_interfaces.setting`); this module finds them, names their flags, converts text
to values and remembers where each value came from. Two components that declare the same flag mean the same setting
and are filled together. Knows no argparse and no server: front ends add their own section.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.environment import ENVIRONMENT, environment_values, variable_of, warn_unknown_variables
from quire.parallel.config import ParallelConfig
from quire.parallel.data_parallel import DataParallelConfig
from quire.parallel.hosts_config import HostsConfig
from quire.setting_fields import ConfigField, Origin, Sections, config_fields
from quire.setting_text import parse_items, parse_text
from quire.vllm_settings import VLLM_SETTINGS, is_settled, other_name
from quire_engine import EngineConfig
from quire_interfaces import (
    ALL_LOGPROBS,
    FP8_DS_MLA,
    KV_CACHE_DTYPES,
    MAX_LOGPROBS,
    ConfigError,
    Settings,
    at_least,
    between,
    one_of,
    setting,
)
from quire_kv_cache import KVCacheConfig
from quire_kv_transfer import KVTransferConfig
from quire_lora.config import LoraConfig
from quire_models.compilation import complaint_about
from quire_models.load_formats import LoadFormat
from quire_multimodal import MediaConfig
from quire_renderers import RendererConfig
from quire_runner.config import RunnerConfig
from quire_scheduler import SchedulerConfig
from quire_spec_decode import SpecDecodeConfig
from quire_structured_output import StructuredOutputConfig

__all__ = [
    "ENVIRONMENT",
    "LONGEST_THAT_FITS",
    "ModelSettings",
    "QuireConfig",
    "build_sections",
    "parse_text",
    "speculative_settings",
    "unknown_name_error",
]

KV_CACHE_ALIASES = {
    "fp8": "fp8_e4m3",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}
"""Other names of formats of the KV cache, as vLLM's command line has them."""

LONGEST_THAT_FITS = -1
"""`max_model_len` as the memory allows."""


def _no_length(value: Any) -> str | None:
    is_length = isinstance(value, int) and not isinstance(value, bool) and (value >= 1 or value == LONGEST_THAT_FITS)
    return None if value is None or is_length else "be a number of at least 1, or auto"


def _not_an_object(value: Any) -> str | None:
    return None if value is None or isinstance(value, dict) else "be an object"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(Settings):
    """Which model, and in which form its weights are held."""

    model: str | None = setting(
        None,
        help="Folder of a Hugging Face checkpoint, or its hub name; empty serves the embedded demo model.",
    )
    tokenizer: str | None = setting(None, help="Folder with another tokenizer than the model's own.")
    revision: str | None = setting(None, help="Branch, tag or commit of a hub model.")
    hf_overrides: dict[str, Any] | None = setting(  # noqa: RUF009  (the default is None)
        None,
        help="Fields of the model's config.json to replace, as JSON: objects are merged, null takes a field away, e.g. "
        '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}; one that the network does not read is an error.',
        check=_not_an_object,
    )
    generation_config: str = setting(
        "auto",
        help="Source of default sampling parameters: auto (the model's generation_config.json), vllm (none: what a "
        "request leaves out is neutral), or a folder with such a file.",
    )
    override_generation_config: dict[str, Any] | None = setting(  # noqa: RUF009  (the default is None)
        None,
        help="Default sampling parameters in place of those, as JSON: temperature, top_p, top_k, min_p and "
        'repetition_penalty, e.g. {"temperature": 0.6}; null makes one neutral.',
    )
    use_modelscope: bool = setting(
        False,
        help="Download models, drafts and adapters that are not local folders from ModelScope instead of the Hugging "
        "Face hub; needs the package modelscope-hub.",
    )
    trust_remote_code: bool = setting(
        False,
        help="Run the code that a checkpoint brings (auto_map of its config.json and tokenizer_config.json), where "
        "neither Quire nor Transformers has the network or the tokenizer. That code can do whatever you can; without "
        "this, such checkpoints are refused.",
    )
    load_format: str = setting(
        "auto",
        help="Where weights come from: the model's safetensors files or GGUF file (auto, hf; safetensors, bitsandbytes "
        "and gguf say which it is), Mistral's own files where there are others, too (mistral), safetensors files read "
        "by the library runai-model-streamer (runai_streamer), PyTorch's own (pt; tensors only), or random (dummy).",
        check=LoadFormat(),
    )
    dtype: str = setting(
        "auto",
        help="Data type of weights and activations; auto: that of the checkpoint.",
        check=one_of("auto", "float32", "bfloat16", "float16", "float", "half"),
    )
    quantization: str | None = setting(
        None,
        help="Weight format: int8, w8a8, int4, int4-g64, int4-g32, fp8, ptpc_fp8, mxfp8, and w8a8-g64, the fastest "
        "for encoders on CPUs; empty: that of the checkpoint, which may be named, too (awq, gptq, "
        "compressed-tensors, ...).",
    )
    disabled_linear_kernels: tuple[str, ...] = setting(
        (),
        help="Ops not to use for quantized weights: w8a8_linear, int8_linear, fp8_linear, grouped_linear, "
        "block_linear, linear (which widens any format), fused_moe (all experts in one call); the start-up report "
        "lists those in use.",
    )
    max_model_len: int | None = setting(
        None,
        help="Longest sequence, prompt and output together; empty: as long as the model allows; auto (or -1): as long "
        "as the memory for keys and values allows, up to that.",
        unit="tokens",
        check=_no_length,
    )
    language_model_only: bool = setting(
        False,
        help="Of a model that takes images, videos or sounds, build the language model alone: it serves texts, and "
        "takes less memory.",
    )
    mmproj: str | None = setting(
        None,
        help="Towers for a language model that has none: a folder with their config.json (of a class such as "
        "LlavaForConditionalGeneration), weights, processor, tokenizer and chat template; empty: the model's own.",
    )
    mm_encoder_only: bool = setting(
        False,
        help="Of a model that takes images, videos or sounds, build the towers alone: requests are answered with "
        "nothing when their media are encoded and kept in kv_disk_path, where servers of the whole model find them.",
    )
    mm_encoder_quantization: str | None = setting(
        None,
        help="Weight format of towers and their connectors, where they are Quire's own: int8, or w8a8, which "
        "rounds what their linear layers take, too; empty: that of the checkpoint, whatever --quantization says.",
        check=one_of(None, "int8", "w8a8"),
    )
    runner: str = setting(
        "auto",
        help="What the model is run for: generate (text), pooling (embeddings, classes and scores alone), or auto: "
        "pooling for encoders, sentence-transformers folders, cross-encoders and reward models, else generate.",
        check=one_of("auto", "generate", "pooling"),
    )
    convert: str = setting(
        "auto",
        help="What a model that generates is made into: embed, classify or reward (it pools then), none, or auto: what "
        "its files say, and embed where --runner pooling asks for a model that only generates.",
        check=one_of("auto", "none", "embed", "classify", "reward"),
    )
    pooler_config: dict[str, Any] | None = setting(  # noqa: RUF009 (its default is None)
        None,
        help="How hidden states are pooled where the model's files say otherwise, as JSON: pooling_type (CLS, LAST, "
        "MEAN, ...), use_activation, dimensions, enable_chunked_processing and others (docs/pooling.md).",
        check=_not_an_object,
    )
    attention_backend: str | None = setting(None, help="Attention backend by name; empty chooses the best available.")
    logits_processors: tuple[str, ...] = setting(
        (),
        help="Logits processors that requests may choose with logits_processors: names of plug-ins, or import paths "
        "package.module:name (docs/plugins.md).",
    )
    compilation_config: dict[str, Any] | None = setting(  # noqa: RUF009 (its default is None)
        None,
        help="torch.compile for a network that runs through Transformers: a JSON object with mode (1 compiles, 0 does "
        "not) and backend (inductor, aot_eager, eager); empty compiles nothing. Also -O0 to -O3.",
        check=complaint_about,
    )
    kv_cache_dtype: str = setting(
        "auto",
        help="Data type of keys and values; auto: fp8 where the checkpoint asks for it and brings scales "
        "(kv_cache_scheme), else that of the activations. fp8 is fp8_e4m3, and of latents (MLA) "
        "fp8_ds_mla; int8 and int4 scale each token and head by itself.",
        check=one_of("auto", *KV_CACHE_DTYPES, FP8_DS_MLA, *KV_CACHE_ALIASES),
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        help="Memory for the KV cache; empty derives it from the free memory.",
        unit="bytes",
        check=at_least(1),
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        help="Exact number of KV cache blocks, instead of a size in bytes.",
        unit="blocks",
        check=at_least(2),
    )
    max_logprobs: int = setting(
        20,
        help="Most log probabilities per token that a request may ask for; -1 for the whole vocabulary.",
        unit="tokens",
        check=between(ALL_LOGPROBS, MAX_LOGPROBS),
    )
    enable_return_routed_experts: bool = setting(
        False,
        help="Return with each completion which experts the routers chose for every token of prompt and output, as "
        "training by routing replay needs it; layers run op by op then.",
    )
    gpu_memory_utilization: float = setting(
        0.5,
        help="Share of the free memory that weights and KV cache together may take.",
        check=between(0.01, 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuireConfig:
    """Settings of a whole engine."""

    model: ModelSettings = field(default_factory=ModelSettings)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    speculative: SpecDecodeConfig = field(default_factory=SpecDecodeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    renderer: RendererConfig = field(default_factory=RendererConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    structured_output: StructuredOutputConfig = field(default_factory=StructuredOutputConfig)

    @staticmethod
    def sections() -> dict[str, type[Settings]]:
        """Section name -> configuration class."""
        hints = typing.get_type_hints(QuireConfig)
        return {spec.name: hints[spec.name] for spec in dataclasses.fields(QuireConfig)}

    @classmethod
    def of(cls, **values: Any) -> QuireConfig:
        """A configuration from plain keyword values, e.g. `QuireConfig.of(model="...", max_num_seqs=8)`.

        Raises:
            ConfigError: for an unknown name (with the nearest known one) or a value that fails its check.
        """
        built, _ = build_sections(cls.sections(), [("argument", values)])
        return cls(**built)

    @classmethod
    def from_environment(cls, **values: Any) -> QuireConfig:
        """As `of`, with QUIRE_ environment variables for what `values` does not say; warns of unknown ones.

        Raises:
            ConfigError: as `of`.
        """
        sections = cls.sections()
        fields = config_fields(sections)
        warn_unknown_variables(fields)
        built, _ = build_sections(sections, [(ENVIRONMENT, environment_values(fields)), ("argument", values)])
        return cls(**built)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section -> field -> value; plain data, for the engine process."""
        return {spec.name: dataclasses.asdict(getattr(self, spec.name)) for spec in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> QuireConfig:
        """Inverse of `to_dict`; lists become tuples again where the field holds one."""
        sections = cls.sections()
        built: dict[str, Any] = {name: sections[name](**_tuples(values)) for name, values in data.items()}
        return cls(**built)


def build_sections(
    sections: Sections, sources: list[tuple[str, Mapping[str, Any]]]
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Make every section's configuration from several sources; later sources win.

    Args:
        sections: Section name -> configuration class.
        sources: (where from, name -> value) in rising priority; text values are converted to the field's type.

    Returns:
        Section name -> configuration, and name -> where its value came from (defaults included).
        Settings of vLLM's that ask for what is so anyway are left out (`quire.vllm_settings`).

    Raises:
        ConfigError: unknown name (with the nearest known one), unreadable text, or a value that fails its check.
    """
    fields = config_fields(sections)
    origins = {name: Origin(spec.default, "default") for name, spec in fields.items()}
    for source, values in sources:
        for raw_name, value in _without_speculative_config(values).items():
            name = other_name(raw_name.removeprefix("--").replace("-", "_"))
            if name not in fields:
                if is_settled(name, value, source):
                    continue
                raise unknown_name_error(raw_name, fields, source)
            if name == "max_model_len" and value == "auto":
                value = LONGEST_THAT_FITS
            elif isinstance(value, str):
                value = parse_text(fields[name], value, source)
            elif isinstance(value, (list, tuple)):
                value = parse_items(fields[name], value, source)
            if fields[name].nonempty and value in (None, (), ""):
                where = _place(fields[name], source)
                raise ConfigError(f"{where} is set, but empty; give a value or leave it out", field=name)
            origins[name] = Origin(value, source)
    arguments: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for name, origin in origins.items():
        if origin.source != "default":
            for section, field_name in fields[name].owners:
                # How long the longest is, only the planner finds out; it tells the scheduler.
                is_open = name == "max_model_len" and origin.value == LONGEST_THAT_FITS and section != "model"
                arguments[section][field_name] = None if is_open else origin.value
    built = {name: _built(owner, arguments[name], fields, origins) for name, owner in sections.items()}
    return built, origins


def _built(
    owner: type[Settings], arguments: dict[str, Any], fields: Mapping[str, ConfigField], origins: Mapping[str, Origin]
) -> Settings:
    """The configuration; an error of a secret, which does not show it, says where it was set."""
    try:
        return owner(**arguments)
    except ConfigError as error:
        spec = fields.get(error.field or "")
        if spec is None or not spec.secret:
            raise
        place = _place(spec, origins[spec.name].source)
        raise ConfigError(f"{error} (from {place})", field=error.field) from None


def _place(spec: ConfigField, source: str) -> str:
    """Where a setting was set, as its user wrote it there."""
    if source == ENVIRONMENT:
        return variable_of(spec)
    return spec.flag if source == "command line" else f"{spec.name} ({source})"


def speculative_settings(value: Any) -> dict[str, Any]:
    """vLLM's `speculative_config`, an object or its JSON, as settings of their own.

    Raises:
        ConfigError: it is no such object.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"speculative_config is not JSON: {error}", field="speculative_config") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config must be a JSON object, got {value!r}", field="speculative_config")
    value = dict(value)
    if value.get("model") is not None:
        value.setdefault("method", "draft_model")  # as vLLM understands it
    # Names that mean something else elsewhere have a prefix there.
    specs = dataclasses.fields(SpecDecodeConfig)
    prefixed = {spec.name for spec in specs if str(spec.metadata.get("flag")).startswith("--speculative-")}
    return {(f"speculative_{name}" if name in prefixed else name): each for name, each in value.items()}


def _without_speculative_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with those of a `speculative_config` in its place; beside it, a setting's own name wins."""
    key = next((name for name in values if name.replace("-", "_") == "speculative_config"), None)
    if key is None:
        return values
    others = {name: value for name, value in values.items() if name != key}
    return others if values[key] is None else speculative_settings(values[key]) | others


def unknown_name_error(name: str, fields: Mapping[str, ConfigField], source: str) -> ConfigError:
    """The error for a setting nobody declares, with the nearest names; spelled as flags for a command line."""
    plain = name.lstrip("-").replace("-", "_")
    nearest = difflib.get_close_matches(plain, fields, n=3, cutoff=0.5)
    nearest += difflib.get_close_matches(plain, VLLM_SETTINGS, n=1, cutoff=0.9)
    # One that is much nearer than the others is meant; the others would only distract.
    best = max((_likeness(plain, each) for each in nearest), default=0.0)
    nearest = [each for each in nearest if _likeness(plain, each) >= best - (0.0 if best > 0.9 else 0.05)]
    is_flag = source == "command line"
    suggestions = [f"--{each.replace('_', '-')}" if is_flag else repr(each) for each in nearest]
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else "`quire explain` lists all settings"
    text = f"there is no flag {name}" if is_flag else f"unknown setting {name!r} ({source})"
    return ConfigError(f"{text}; {hint}", field=name)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
