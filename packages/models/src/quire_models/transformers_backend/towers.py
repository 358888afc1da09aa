"""Towers of Transformers: what turns images, videos and sounds into embeddings for a language model of any kind.

The class of the whole network is built without its language model, and Transformers reads the weights of the rest, with
all the names that it knows for them.

Shape legend: N embeddings of an item, W width of an embedding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire_interfaces import VIDEO_AUDIO_RUNS, CheckpointError, ConfigError, Modality
from quire_models.config import ModelConfig
from quire_models.media_spec import MediaSpec
from quire_models.stored_linears import check_towers
from quire_models.transformers_backend.class_encoders import CLASS_ENCODERS

__all__ = ["TransformersTowers", "load_towers"]

_ENCODERS = {
    Modality.IMAGE: ("get_image_features",),
    Modality.VIDEO: ("get_video_features", "get_image_features"),
    Modality.AUDIO: ("get_audio_features",),
}
"""Modality -> functions that encode it, the first that a class has; frames of a video may be images to it."""
_LANGUAGE = ("lm_head", "language_model", "text_model", "model.language_model", "model.text_model")
"""Modules that are no towers."""
_IN_EMBEDDING = "embed_tokens_extend"
"""Module of a body that is the language model itself, in which its towers stand (Phi-4 multimodal)."""


class TransformersTowers:
    """The towers of a network, with their connectors."""

    def __init__(self, model: Any, spec: MediaSpec, dtype: torch.dtype) -> None:
        """Args:
        model: Network of Transformers, whose language model is not used.
        dtype: What floating-point inputs and embeddings are in.

        Raises:
            CheckpointError: Its class has no function for any modality.
        """
        self._spec, self._dtype, self._device = spec, dtype, next(model.parameters()).device
        encoders = {kind: _encoder(model, kind) for kind in spec.modalities}
        self._encoders = {kind: encoder for kind, encoder in encoders.items() if encoder is not None}
        if not self._encoders:
            names = " and no ".join(_ENCODERS[kind][0] for kind in encoders)
            raise CheckpointError(
                f"Transformers' {type(model).__name__} has no {names}: "
                "its media are not served; build it for text alone (language_model_only)"
            )
        self._num_parameters = sum(parameter.numel() for tower in _towers(model) for parameter in tower.parameters())

    @property
    def num_parameters(self) -> int:
        """Weights of all towers, connectors included."""
        return self._num_parameters

    @torch.inference_mode()
    def encode(self, modality: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Embeddings of each item, [N, W].

        Args:
            modality: A value of `quire_interfaces.Modality`.
            items: Arrays of each item under the names of the processor's outputs; others than the tower's are left
                out.

        Raises:
            ConfigError: There is no tower for this modality.
        """
        encoder = self._encoders.get(Modality(modality))
        if encoder is None:
            names = ", ".join(self._encoders)
            raise ConfigError(f"{self._spec.architecture} takes {names}, and no {modality}", field="media")
        return [self._with_sound(self._encode(encoder, item), item) for item in items]

    def _with_sound(self, embeds: Tensor, item: Mapping[str, Tensor]) -> Tensor:
        """The embeddings of a video with those of its sound between them, where it has one."""
        runs = item.get(VIDEO_AUDIO_RUNS)
        if runs is None:
            return embeds
        sound = self._encode(self._encoders[Modality.AUDIO], item)
        counts = runs.T.tolist()
        pairs = zip(embeds.split(counts[0]), sound.split(counts[1]), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def _encode(self, encoder: Callable[..., Any], item: Mapping[str, Tensor]) -> Tensor:
        known = inspect.signature(encoder).parameters
        inputs: dict[str, Any] = {name: self._placed(value) for name, value in item.items() if name in known}
        if "kwargs" in known:
            inputs["return_dict"] = True
        out = encoder(**inputs)
        embeds = _flat(_embeddings(out))
        deep = getattr(out, "deepstack_features", None) or ()
        if not deep and embeds.shape[-1] < self._spec.width:  # sounds have none where images do
            deep = [torch.zeros_like(embeds)] * len(self._spec.deepstack_layers)
        result = torch.cat([embeds, *(_flat(features) for features in deep)], dim=-1).to(self._dtype)
        assert result.shape[-1] == self._spec.width, f"embeddings are {result.shape[-1]} wide, not {self._spec.width}"
        return result

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self._device, self._dtype if value.is_floating_point() else value.dtype)


def load_towers(
    config: ModelConfig, folder: str | Path, dtype: torch.dtype, device: torch.device, *, dummy: bool = False
) -> TransformersTowers:
    """The towers of a checkpoint, with their weights.

    Args:
        config: Of the whole checkpoint.
        dtype: Compute dtype.
        dummy: Leave the weights as the class starts them.

    Raises:
        CheckpointError: Transformers has no such class, cannot read the files, or lacks weights, which are named; or
            the towers are quantized.
    """
    spec = config.media
    assert spec is not None
    assert config.language_names is not None
    check_towers(Path(folder), config.language_names)
    import transformers

    cls: Any = getattr(transformers, spec.architecture, None)
    if cls is None:
        raise CheckpointError(f"the installed Transformers has no class {spec.architecture}, whose towers are wanted")
    try:
        hf_config = cls.config_class.from_pretrained(folder, local_files_only=True)
        if hasattr(hf_config, "quantization_config"):
            del hf_config.quantization_config  # of the language model
        cls = without_language_model(cls)
        if dummy:
            return TransformersTowers(cls._from_config(hf_config, dtype=dtype).to(device).eval(), spec, dtype)
        model, info = cls.from_pretrained(
            folder, config=hf_config, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (ValueError, OSError, RuntimeError, KeyError, ImportError) as error:
        raise CheckpointError(f"Transformers cannot read the towers in {folder}: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of its towers: {', '.join(missing)}")
    return TransformersTowers(model.to(device).eval(), spec, dtype)


def without_language_model(cls: Any) -> Any:
    """The class of a whole network without its language model; the name stays, by which Transformers finds how weights
    are called."""

    def build(self: Any, config: Any, *args: Any, **options: Any) -> None:
        cls.__init__(self, config, *args, **options)
        for owner, name in _language(self):
            setattr(owner, name, nn.Module())

    members = {
        "__init__": build,
        "_tied_weights_keys": None,
        "_keys_to_ignore_on_load_unexpected": [".*"],
        "__module__": cls.__module__,
        "config_class": cls.config_class,
    }
    return type(cls.__name__, (cls,), members | {"tie_weights": _no_ties, "get_input_embeddings": _no_embeddings})


def drop_towers(model: Any) -> None:
    """Let go of everything in a whole network that its language model does not need."""
    for owner, name in _places(model):
        if _is_tower(model, getattr(owner, name)):
            setattr(owner, name, nn.Module())


def _towers(model: Any) -> list[nn.Module]:
    modules = (getattr(owner, name) for owner, name in _places(model))
    return [module for module in modules if _is_tower(model, module)]


def _places(model: Any) -> list[tuple[Any, str]]:
    """Where towers may be: beside the body, or in it; nowhere in a network whose language model stands in no module of
    its own."""
    body = getattr(model, "model", model)
    if all(name == "lm_head" for _, name in _language(model)):
        return []
    owners = [model] if body is model else [model, body]
    return [(owner, name) for owner in owners for name, _ in owner.named_children()]


def _is_tower(model: Any, module: nn.Module) -> bool:
    parts = {getattr(owner, name) for owner, name in _language(model)}
    return not any(part in parts for part in module.modules())


def _language(model: Any) -> list[tuple[Any, str]]:
    """Where the parts of the language model are: their owners, and the names that they have there."""
    body: Any = getattr(model, "model", None)
    places = [(_owner(model, name), name.rpartition(".")[2]) for name in _LANGUAGE]
    if hasattr(body, _IN_EMBEDDING):
        places += [(body, name) for name, _ in body.named_children() if name != _IN_EMBEDDING]
    return [(owner, name) for owner, name in places if isinstance(getattr(owner, name, None), nn.Module)]


def _owner(model: Any, name: str) -> Any:
    """The module that has the module of this name."""
    owner = name.rpartition(".")[0]
    return getattr(model, owner, None) if owner else model


def _no_ties(self: Any, *args: Any, **options: Any) -> None:
    """Embedding and LM head are not there."""


def _no_embeddings(self: Any) -> None:
    """The embedding is not there."""


def _encoder(model: Any, modality: Modality) -> Callable[..., Any] | None:
    """What encodes an item of this modality in a network; None where nothing does."""
    if (own := CLASS_ENCODERS.get((type(model).__name__, modality))) is not None:
        return own(model)
    for name in _ENCODERS[modality]:
        for module in (getattr(model, "model", None), model):
            if (encoder := getattr(module, name, None)) is not None:
                return encoder  # type: ignore[no-any-return]
    return None


def _embeddings(out: Any) -> Any:
    """What a tower gives for the language model: `pooler_output`, or the last hidden state where nothing is pooled."""
    if not hasattr(out, "pooler_output"):
        return out
    return out.last_hidden_state if out.pooler_output is None else out.pooler_output


def _flat(features: Any) -> Tensor:
    """[N, W]: features of one item, which classes give as a tensor of two or three dimensions, or several of them."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([_flat(part) for part in features])
