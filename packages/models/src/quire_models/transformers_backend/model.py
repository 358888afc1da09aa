"""Any decoder of Transformers whose attention can be exchanged, with Quire's paged attention in its place.

Transformers builds the network, reads its weights and runs its layers; keys and values go into Quire's cache, where
scheduler, prefix cache and preemption find them. Steps are one sequence of tokens to the network, with a position each.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire_attention import ForwardBatch
from quire_interfaces import CheckpointError, read_json
from quire_models.config import ModelConfig
from quire_models.layers.network import Network
from quire_models.layers.scope import Scope
from quire_models.layers.whole_spans import with_whole_spans
from quire_models.overrides import check_overrides_read, overridden
from quire_models.transformers_backend.cross_attention import MediaCrossAttention
from quire_models.transformers_backend.media_inputs import MediaInputs
from quire_models.transformers_backend.shared_linears import share_linears
from quire_models.transformers_backend.towers import TransformersTowers, drop_towers
from quire_ops import LoraTokens, PagedLayout, kv_cache_shape

__all__ = ["TransformersLM"]

IMPLEMENTATION = "quire"
"""Name of the attention in Transformers' table."""

KNOWN = frozenset({"position_ids", "s_aux", "cache_position"})
"""Tensors given to attention functions that are understood, or do not matter."""


class TransformersLM(Network):
    """A network of Transformers. Reads its checkpoint itself (`load`)."""

    loads_itself = True

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        self._model: Any = None
        self._owner: Any = None
        self._body_name = ""
        self._decoder: Any = None
        """What runs the layers: the body, or the language model inside the body of a network with towers."""
        self._paged = PagedAttention(config, scope)
        self._media_inputs: MediaInputs | None = None
        self._cross_attention: MediaCrossAttention | None = None
        self._num_shared = 0
        """Linear layers that tensor-parallel ranks share."""

    def load(self, folder: str | Path, *, dummy: bool = False, language_model_only: bool = False) -> None:
        """Build the network and read its weights.

        Args:
            dummy: Leave the weights as the class starts them.
            language_model_only: Keep no towers.

        Raises:
            CheckpointError: Transformers has no such class, cannot exchange its attention, or cannot read it.
        """
        architecture = self.config.architecture
        try:
            import transformers
        except ImportError as error:
            raise CheckpointError(
                f"Quire has no network of its own for {architecture}, and Transformers, which may have one, is not "
                "installed: install quire-models[transformers]"
            ) from error
        cls: Any = getattr(transformers, architecture, None)
        if reason := _refusal(architecture, cls):
            raise CheckpointError(f"{reason}; Quire has no network of its own for it either (docs/models.md)")
        transformers.AttentionInterface.register(IMPLEMENTATION, paged_attention)
        transformers.AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
        options: dict[str, Any] = {"attn_implementation": IMPLEMENTATION, "dtype": self.dtype}
        if self.config.language_names is not None:
            options["attn_implementation"] = _implementations(cls)
        try:
            hf_config = _overridden_config(cls.config_class, folder, self.config.overrides)
            if dummy:
                hf_config = hf_config or transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
                model = cls._from_config(hf_config, **options)
            else:
                options |= {"config": hf_config} if hf_config is not None else {}
                model = cls.from_pretrained(folder, local_files_only=True, use_safetensors=True, **options)
        except (ValueError, OSError, RuntimeError, KeyError, ImportError) as error:
            if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
                # The class has a table of attentions of its own, without those that are registered.
                cause = f"Transformers' {architecture} does not let its attention be exchanged"
                raise CheckpointError(f"{cause}; Quire has no network of its own for it (docs/models.md)") from error
            cause = f"it wants {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"Transformers cannot read {folder}: {cause}") from error
        self._model = model.to(self.device).eval()
        self._check()
        self._owner, self._body_name = _body_of(self._model)
        self._decoder = self._body
        if self.config.language_names is not None:
            self._decoder = self._model.get_decoder()
            if language_model_only or self.config.media is None:
                drop_towers(self._model)
            else:
                self.towers = TransformersTowers(self._model, self.config.media, self.dtype)
        layers = () if self.config.media is None or language_model_only else self.config.media.deepstack_layers
        self._media_inputs = MediaInputs(self._model, self._decoder, layers, self.config.hidden_size)
        attending = [index for index, layer in enumerate(self.config.network.layers) if layer.mixers]
        places = {index: place for place, index in enumerate(attending)}
        for module in self._decoder.modules():
            if hasattr(module, "layer_idx"):
                module.quire_attention = self._paged
                module.quire_layer = places.get(module.layer_idx, module.layer_idx)
                if "cycle_offset" in inspect.signature(module.forward).parameters:
                    module.register_forward_pre_hook(_place_cycle, with_kwargs=True)
        if self.config.media is not None and self.config.media.cross_attention_layers:
            self._cross_attention = MediaCrossAttention(self._decoder, self.config.media.cross_attention_layers)
        if "position_ids" not in inspect.signature(type(self._decoder).forward).parameters:
            self._place_positions()
        if self._scope.tp_group is not None:
            plan = getattr(self._decoder.config, "base_model_tp_plan", None) or {}
            self._num_shared = share_linears(self._model, self._decoder, plan, self._scope.tp_group)
        self._try()

    @property
    def shared_parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parts that tensor-parallel ranks share out, and parts that each of them has whole."""
        return (f"{self._num_shared} linear layers", "the LM head"), ("embedding", "norms", "heads and their KV cache")

    @property
    def _body(self) -> Any:
        return getattr(self._owner, self._body_name)

    def _place_positions(self) -> None:
        """Give the positions of a step to embeddings that would count them: bodies of BART's kind take none."""

        def place(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            assert self._paged.batch is not None, "a step without a batch"
            return args, {**options, "position_ids": self._paged.batch.positions}

        for module in self._decoder.modules():
            if {"past_key_values_length", "position_ids"} <= inspect.signature(module.forward).parameters.keys():
                module.register_forward_pre_hook(place, with_kwargs=True)

    def _try(self) -> None:
        """One token through the network: what cannot work is said at the start, not by the first request."""
        config = self.config
        shape = kv_cache_shape(2, 1, config.num_kv_heads, config.head_dim)
        num_attentions = len(config.network.mixers)
        caches = tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(num_attentions))
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        metadata = PagedLayout(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=self.device),
            seq_lens=one,
            block_table=one[None],
            slot_mapping=one.long(),
            block_size=1,
            query_lens=[1],
            kv_lens=[1],
        )
        batch = ForwardBatch(
            input_ids=one.long(),
            positions=torch.zeros(1, dtype=torch.int64, device=self.device),
            attention=(metadata,),
            group_of_layer=(0,) * num_attentions,
            kv_caches=caches,
        )
        try:
            self.compute_logits(self.forward(batch))
        except (CheckpointError, TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            raise CheckpointError(
                f"Transformers' {config.architecture} does not run with Quire's attention: {error}"
            ) from error
        if not self._paged.layers:
            raise CheckpointError(f"Transformers' {config.architecture} does not let its attention be exchanged")
        if missing := set(range(num_attentions)) - self._paged.layers:
            raise CheckpointError(
                f"Transformers' {config.architecture} does not call the attention it is given in layers "
                f"{', '.join(map(str, sorted(missing)))}"
            )

    def _check(self) -> None:
        """What planners have read of config.json is what Transformers has."""
        found = self._model.config.get_text_config(decoder=True)
        for name, planned in (
            ("num_hidden_layers", self.config.num_layers),
            ("num_attention_heads", self.config.num_heads),
            ("hidden_size", self.config.hidden_size),
            ("vocab_size", self.config.vocab_size),
        ):
            if name.startswith("num_") and hasattr(found, "decoder_layers"):
                continue  # what a former encoder had stands under these names; trying shows the decoder's
            if getattr(found, name, planned) != planned:
                raise CheckpointError(
                    f"{self.config.architecture}: {name} is {planned} in config.json, but {getattr(found, name)} to "
                    "Transformers; this architecture cannot be planned for"
                )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `Network.forward`."""
        self.use_adapters(batch.lora)
        assert self._media_inputs is not None, "a network without weights"
        media, inputs = self.config.media, self._media_inputs.of(batch.input_ids, batch.media)
        if media is not None and media.is_bidirectional:
            batch = with_whole_spans(batch, self.config.sliding_windows, media)
        if self._cross_attention is not None:
            inputs |= self._cross_attention.arguments(batch, self.dtype)
        self._paged.batch = batch
        self._paged.layers.clear()
        positions = batch.positions.unsqueeze(-2) + _first_position(self._decoder)
        out = self._decoder(**inputs, position_ids=positions, use_cache=False)
        self._paged.batch = None
        self._media_inputs.clear()
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """See `Network.compute_logits`: whatever the class does behind its body, scales and caps included."""
        body = self._body
        setattr(self._owner, self._body_name, _Computed(hidden, body))
        try:
            logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            setattr(self._owner, self._body_name, body)
        return logits.float()


def _overridden_config(config_class: Any, folder: str | Path, overrides: Mapping[str, Any]) -> Any:
    """Transformers' configuration with the user's fields in it; None without any.

    Raises:
        ConfigError: a field that the class does not know.
    """
    if not overrides:
        return None
    known = config_class()
    names = {*known.to_dict(), *known.attribute_map, "rope_scaling", "rope_theta", "architectures"}
    check_overrides_read(overrides, names, f"Transformers' {config_class.__name__}")
    return config_class.from_dict(overridden(read_json(Path(folder) / "config.json"), overrides))


class PagedAttention:
    """What the attention modules of a network find the step's cache with."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        self._backend = scope.attention_backend
        self._config = config
        self.batch: ForwardBatch | None = None
        """Of the step that runs."""
        self.layers: set[int] = set()
        """Those that have attended in this step."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Args:
            query: [1, Hq, T, Dk].
            key: [1, H, T, Dk], Dk <= D and H a divisor of Hkv.
            value: [1, H, T, Dv], Dv <= D.

        Returns:
            [1, T, Hq, Dv].
        """
        assert self.batch is not None, "attention outside of a step"
        config, value_dim = self._config, value.shape[-1]
        heads, largest = key.shape[1], max(key.shape[-1], value_dim)
        if largest > config.head_dim or config.num_kv_heads % heads or value.shape[1] != heads:
            raise CheckpointError(
                f"{config.architecture} has keys of {list(key.shape[1::2])} and values of {list(value.shape[1::2])} "
                f"(heads, dimensions), but its config.json says {[config.num_kv_heads, config.head_dim]}; this "
                "attention is not supported"
            )
        if window is not None and window >= config.max_model_len:
            window = None
        if window != config.sliding_windows[layer]:
            raise CheckpointError(
                f"layer {layer} of {config.architecture} has a window of {window}, but its config.json says "
                f"{config.sliding_windows[layer]}; this attention is not supported"
            )
        if layer in self.layers:
            raise CheckpointError(f"layer {layer} of {config.architecture} attends twice in a step")
        self.layers.add(layer)
        kv_cache, metadata = self.batch.of_layer(layer)
        key, value = (part.repeat_interleave(config.num_kv_heads // heads, dim=1) for part in (key, value))
        key, value, query = (self._of_cache(part) for part in (key, value, query))
        self._backend.write_kv_cache(key, value, kv_cache, metadata.slot_mapping)
        out = self._backend.paged_attention(
            query,
            kv_cache,
            metadata,
            scale=scale,
            sliding_window=None if metadata.paths_have_windows else window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        return out[None, ..., :value_dim]

    def _of_cache(self, part: Tensor) -> Tensor:
        """[1, H, T, d] -> [T, H, D]. The cache has one size for all; zeros add nothing to scores and outputs."""
        part = part[0].transpose(0, 1)
        missing = self._config.head_dim - part.shape[-1]
        return nn.functional.pad(part, (0, missing)) if missing else part.contiguous()


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An entry of Transformers' table of attention functions."""
    if attention_mask is not None:
        raise CheckpointError("its attention has a mask of its own, which Quire's has not")
    if not getattr(module, "is_causal", True) and not getattr(module, "is_decoder", False):
        raise CheckpointError("its attention also looks at later tokens, which Quire's does not")
    if unknown := [name for name, value in options.items() if isinstance(value, Tensor) and name not in KNOWN]:
        raise CheckpointError(f"its attention has {', '.join(unknown)}, which Quire's has not")
    scale = options.get("scaling")
    out = module.quire_attention(
        module.quire_layer,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    return out, None


class _Computed(nn.Module):
    """In the place of a body: hidden states that are there already. Heads may read what else a body has."""

    def __init__(self, hidden: Tensor, body: Any) -> None:
        super().__init__()
        self._hidden, self._bodies = hidden, (body,)  # in a tuple, it is no part of this module

    def forward(self, *args: Any, **options: Any) -> _Output:
        return _Output(self._hidden[None])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_bodies"][0], name)


class _Output:
    """What a head asks of its body: hidden states, and None for whatever else bodies may give."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _place_cycle(module: Any, args: Any, options: dict[str, Any]) -> None:
    """A layer that is run again and again in a step has a cache for each time."""
    module.quire_layer = module.layer_idx + options.get("cycle_offset", 0)


def _implementations(cls: Any) -> dict[str, str | None]:
    """Field of the configuration -> attention: Quire's in the language model, Transformers' choice in towers, some of
    which know one alone."""
    towers = (name for name in cls.config_class.sub_configs if name != "text_config")
    return {"": IMPLEMENTATION, "text_config": IMPLEMENTATION, **dict.fromkeys(towers)}


def _body_of(model: Any) -> tuple[Any, str]:
    """What holds the layers of a class with a head on top: its owner, and under which name.

    Decoders that come from behind an encoder stand in a module that holds nothing else.
    """
    owner, name = model, model.base_model_prefix
    if not hasattr(model, name):
        name = "model"  # of text models that also stand in larger ones, under the prefix
    inner = list(getattr(owner, name).named_children())
    if len(inner) == 1:
        owner, name = getattr(owner, name), inner[0][0]
    return owner, name


def _first_position(body: Any) -> int:
    """Of a sequence: RoBERTa and its relatives count from behind the padding token."""
    embeddings = getattr(body, "embeddings", None)
    return embeddings.padding_idx + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") else 0


def _no_mask(*args: Any, **options: Any) -> None:
    """Attention over a paged cache knows from positions what a token may see."""


def _refusal(architecture: str, cls: Any) -> str | None:
    """Why the class cannot run here, or None."""
    if cls is None:
        return f"the installed Transformers has no class {architecture}"
    if getattr(cls, "_is_stateful", False):
        return f"Transformers' {architecture} keeps a state between tokens that is not a KV cache"
    return None
