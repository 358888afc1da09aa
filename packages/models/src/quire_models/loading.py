"""From a checkpoint folder to a network that can run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire_attention import AttentionBackend, select_attention_backend
from quire_distributed import Collectives
from quire_interfaces import FP8_DS_MLA, CheckpointError, ConfigError
from quire_interfaces.platforms import platform_of_type
from quire_lora import AdapterSlots
from quire_models.build import class_of
from quire_models.config import ModelConfig
from quire_models.config_fields import DTYPE_BYTES
from quire_models.layers.expert_parallel import ExpertParallel
from quire_models.layers.network import Network
from quire_models.layers.scope import Scope
from quire_models.layers.towers import Towers
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.module_adapters import place_adapters
from quire_models.named_formats import check_load_format, resolved_linear_method
from quire_models.stages import part_of_rank
from quire_models.stored_linears import check_towers
from quire_models.towers.native import load_native_towers
from quire_models.transformers_backend.towers import load_towers
from quire_models.weights import Progress, load_dummy_weights, load_weights
from quire_ops import OpRequest, ops, torch_device
from quire_quantization import head_method
from quire_quantization import linear_method as find_linear_method
from quire_quantization.kernels import check_kernel_names

__all__ = ["build_model", "load_media_towers", "load_model", "resolve_dtype"]


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig) -> torch.dtype:
    """The torch dtype for a name: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.

    Raises:
        ConfigError: Another name.
    """
    name = str(dtype).removeprefix("torch.")
    name = config.dtype if name == "auto" else name
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPE_BYTES)}, got {name!r}", field="dtype")
    found: torch.dtype = getattr(torch, name)
    return found


def build_model(
    config: ModelConfig,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    linear_method: str = "plain",
    attention_backend: AttentionBackend | str | None = None,
    kv_cache_dtype: str | None = None,
    block_size: int | None = None,
    max_loras: int = 0,
    max_lora_rank: int = 16,
    lora_dtype: str = "auto",
    disabled_linear_kernels: Collection[str] = (),
    join_products: bool | None = None,
    tp_group: Collectives | None = None,
    expert_parallel: ExpertParallel | None = None,
    pp_group: Collectives | None = None,
) -> Network:
    """The network without weights: `parameters` says what it needs. See `load_model` for the other arguments.

    Args:
        join_products: Layers that take the same input multiply in one product (`MergedLinear`); None for where weights
            are copied to a device, which then costs nothing.
    """
    tp_group = None if tp_group is None or tp_group.size == 1 else tp_group
    linear_method = resolved_linear_method(linear_method, config)
    check_kernel_names(disabled_linear_kernels)
    torch_dtype = resolve_dtype(dtype, config)
    device_of_torch = torch_device(device)
    platform_of_type(device_of_torch.type).use(str(device_of_torch))
    request = OpRequest(device=device_of_torch.type, dtype=torch_dtype)
    if attention_backend is None or isinstance(attention_backend, str):
        # A network without attention takes the backend that comes first; it is never called.
        heads, kv_heads = config.num_heads or 1, config.num_kv_heads or 1
        sizes = {"head_dim": config.head_dim or 64, "queries_per_kv_head": heads // kv_heads}
        if block_size is not None:
            sizes["block_size"] = block_size
        cache_dtype = None if kv_cache_dtype == FP8_DS_MLA else kv_cache_dtype  # of latents alone
        attention_backend = select_attention_backend(
            replace(request, sizes=sizes, cache_dtype=cache_dtype, features=_attention_features(config)),
            attention_backend,
        ).backend
    adapters = AdapterSlots(max_loras, max_lora_rank, torch_dtype, device_of_torch, lora_dtype) if max_loras else None
    scope = Scope(
        dtype=torch_dtype,
        device=device_of_torch,
        linear_method=find_linear_method(linear_method, request, disabled_linear_kernels),
        head_method=head_method(linear_method, request, disabled_linear_kernels),
        plain_method=find_linear_method("plain", request),
        attention_backend=attention_backend,
        cache_dtype=kv_cache_dtype,
        quantization=config.quantization,
        joins_products=device_of_torch.type != "cpu" if join_products is None else join_products,
        adapters=adapters,
        disabled_linear_kernels=frozenset(disabled_linear_kernels),
        tp_group=tp_group,
        expert_parallel=None if tp_group is None else expert_parallel,
        pp_group=pp_group,
    )
    if tp_group is not None or pp_group is not None:
        config = replace(config, network=part_of_rank(config.network, tp_group, pp_group))
    if adapters is not None:
        scope.op(ops.lora_linear)  # for the record of chosen backends
    network_class: type[Network] = class_of(config.network.built_by)
    if network_class.loads_itself and (config.quantization is not None or linear_method != "plain"):
        network_class = class_of("quire_models.transformers_backend.exchanged:exchanged")(network_class)
    return network_class(config, scope)


def _attention_features(config: ModelConfig) -> frozenset[str]:
    """What the network's attention has besides plain scores, as `OpRequest.features` names it."""
    attentions = [mixer for mixer in config.network.mixers if isinstance(mixer, SelfAttentionSpec)]
    features = {
        "sliding_window": any(window is not None for window in config.sliding_windows),
        "soft_cap": any(mixer.soft_cap is not None for mixer in attentions),
        "sinks": any(mixer.sinks for mixer in attentions),
        "alibi": any(mixer.alibi is not None for mixer in attentions),
    }
    return frozenset(name for name, present in features.items() if present)


def load_model(
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    linear_method: str = "plain",
    attention_backend: AttentionBackend | str | None = None,
    kv_cache_dtype: str | None = None,
    block_size: int | None = None,
    load_format: str = "auto",
    max_loras: int = 0,
    max_lora_rank: int = 16,
    lora_dtype: str = "auto",
    disabled_linear_kernels: Collection[str] = (),
    language_model_only: bool = False,
    towers_folder: str | Path | None = None,
    progress: Progress | None = None,
    tp_group: Collectives | None = None,
    expert_parallel: ExpertParallel | None = None,
    pp_group: Collectives | None = None,
) -> Network:
    """Build the network of `config` and fill it from the checkpoint in `folder`.

    Args:
        dtype: Compute dtype; "auto" for the checkpoint's. Weights of this dtype are mapped, not copied.
        device: As torch names it.
        max_loras: Adapters that steps may use at once: device slots; 0 for a network without.
        max_lora_rank: Largest rank of an adapter.
        lora_dtype: What adapters are kept in, as `AdapterSlots` takes it.
        linear_method: How linear layers and the LM head keep their weights: "plain", "int8", "int4", ...
        attention_backend: A backend, or the name of one; None for the best that can serve.
        kv_cache_dtype: What the KV cache is kept in, a name of `quire_interfaces.KV_CACHE_DTYPES`; None for the compute
            dtype. The caches that the network is run with must have it.
        block_size: Tokens of the cache's blocks, if that is known: some attention backends take few sizes.
        load_format: One of `quire_models.load_formats.LOAD_FORMATS`: "pt" for PyTorch's own files (tensors only),
            "dummy" for random ones, for which the folder needs no weights.
        disabled_linear_kernels: Ops that may not multiply with quantized weights.
        language_model_only: Build no towers: the network takes text alone.
        towers_folder: Where the towers are, if not in `folder`.
        progress: Called as tensors are placed with (bytes so far, bytes of all).
        tp_group: The tensor-parallel ranks that share the network, each of which calls this; None for one alone.
        expert_parallel: How these share out whole experts (`share_experts`); None where each has all of them.
        pp_group: The pipeline stages that the network is cut into, each of which calls this; None for one alone.

    Raises:
        ConfigError: A choice that does not exist or cannot serve.
        CheckpointError: Weights that cannot be read or do not fit the configuration.
    """
    check_load_format(load_format, config)
    linear_method = resolved_linear_method(linear_method, config)
    if not Path(folder).is_dir():
        raise CheckpointError(f"model folder {str(folder)!r} does not exist or is not a folder")
    model = build_model(
        config, dtype=dtype, device=device, linear_method=linear_method, attention_backend=attention_backend,
        kv_cache_dtype=kv_cache_dtype, block_size=block_size, max_loras=max_loras, max_lora_rank=max_lora_rank,
        lora_dtype=lora_dtype, disabled_linear_kernels=disabled_linear_kernels, tp_group=tp_group, pp_group=pp_group,
        expert_parallel=expert_parallel,
    )  # fmt: skip
    if model.loads_itself:
        _load_by_itself(model, folder, load_format, language_model_only)
    elif load_format == "dummy":
        load_dummy_weights(model)
    else:
        load_weights(model, folder, progress, load_format=load_format)
    if config.media is not None and not language_model_only:
        _add_towers(model, config, towers_folder or folder, is_dummy=load_format == "dummy")
    return model


def _add_towers(model: Network, config: ModelConfig, folder: str | Path, *, is_dummy: bool) -> None:
    """Build the towers of a network that has none yet, on the first pipeline stage. Raises as `load_model`."""
    _check_spans(model)
    if not model.loads_itself and model.config.network.is_first:
        model.towers = _towers(config, folder, model.dtype, model.device, model.attention_backend, dummy=is_dummy)


def load_media_towers(
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    load_format: str = "auto",
) -> Towers:
    """The towers of a checkpoint without its language model.

    Args:
        config: Of the whole checkpoint; its `media` is not None.
        folder: The checkpoint.
        dtype: Compute dtype; "auto" for the checkpoint's.
        device: As torch names it.
        load_format: "dummy" for random weights, for which the folder needs none.

    Raises:
        ConfigError: A dtype or a device that does not exist.
        CheckpointError: Weights that cannot be read, are quantized, or do not fit the configuration.
    """
    torch_dtype, device_of_torch = resolve_dtype(dtype, config), torch_device(device)
    request = OpRequest(
        device=device_of_torch.type, dtype=torch_dtype, sizes={"head_dim": 64, "queries_per_kv_head": 1}
    )
    backend = select_attention_backend(request, None).backend
    return _towers(config, folder, torch_dtype, device_of_torch, backend, dummy=load_format == "dummy")


def _towers(
    config: ModelConfig,
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    attention_backend: AttentionBackend,
    *,
    dummy: bool,
) -> Towers:
    """Quire's own where they are described, else Transformers'."""
    media, names = config.media, config.language_names
    assert media is not None
    assert names is not None
    if media.tower is None:
        return load_towers(config, folder, dtype, device, dummy=dummy)
    check_towers(Path(folder), names)
    return load_native_towers(media, names, folder, dtype, device, attention_backend, dummy=dummy)


def _check_spans(model: Network) -> None:
    """ConfigError: tokens of an image have to see those behind them, and something cannot compute that."""
    media = model.config.media
    assert media is not None
    if not media.is_bidirectional:
        return
    refusals = model.span_refusals
    if model.device.type != "cpu":  # kernels for trees there end with a tile's last token
        refusals = (f"attention backend {model.attention_backend.name} on {model.device.type}",)
    if refusals:
        raise ConfigError(
            f"tokens of an image of {model.config.architecture} see those behind them, which {', '.join(refusals)} "
            "cannot compute; build it for text alone (language_model_only)",
            field="language_model_only",
        )


def _load_by_itself(model: Any, folder: str | Path, load_format: str, language_model_only: bool) -> None:
    if load_format in ("pt", "runai_streamer"):
        raise ConfigError(
            f"{model.config.architecture} runs through Transformers, which is given safetensors only: "
            f"{'convert the checkpoint' if load_format == 'pt' else 'leave load_format runai_streamer out'}",
            field="load_format",
        )
    model.load(folder, dummy=load_format == "dummy", language_model_only=language_model_only)
    if model.adapters is not None:
        place_adapters(model._model, model._decoder, model.adapters, model._try)
