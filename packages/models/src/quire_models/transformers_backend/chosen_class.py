"""Networks whose class is not just Transformers' of that name: the checkpoint's own code, or one that keeps states."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn

from quire_interfaces import CheckpointError
from quire_models.transformers_backend.media_inputs import MediaInputs
from quire_models.transformers_backend.model import (
    IMPLEMENTATION,
    TransformersLM,
    _body_of,
    _no_mask,
    _overridden_config,
    paged_attention,
)
from quire_models.transformers_backend.shared_linears import share_linears

__all__ = ["ChosenClassLM"]


class ChosenClassLM(TransformersLM):
    """A language model of a class that `find_class` finds. It takes text alone."""

    def find_class(self, folder: Path) -> Any:
        """The class, of Transformers' kind.

        Raises:
            CheckpointError: There is none.
        """
        raise NotImplementedError

    def load(self, folder: str | Path, *, dummy: bool = False, language_model_only: bool = False) -> None:
        """See `TransformersLM.load`."""
        try:
            import transformers
        except ImportError as error:
            raise CheckpointError(
                f"{self.config.architecture} runs through Transformers, which is not installed: install "
                "quire-models[transformers]"
            ) from error
        cls = self.find_class(Path(folder))
        transformers.AttentionInterface.register(IMPLEMENTATION, paged_attention)
        transformers.AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
        options: dict[str, Any] = {"attn_implementation": IMPLEMENTATION, "dtype": self.dtype}
        try:
            hf_config = _overridden_config(cls.config_class, folder, self.config.overrides)
            if dummy:
                model = cls._from_config(hf_config or cls.config_class.from_pretrained(folder), **options)
            else:
                options |= {"config": hf_config} if hf_config is not None else {}
                model = cls.from_pretrained(folder, local_files_only=True, use_safetensors=True, **options)
        except (ValueError, OSError, RuntimeError, KeyError, ImportError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{self.config.architecture} cannot read {folder}: {error}") from error
        self._model = model.to(self.device).eval()
        self._check()
        self._owner, self._body_name = _body_of(self._model)
        self._decoder = self._body
        self._media_inputs = MediaInputs(self._model, self._decoder, (), self.config.hidden_size)
        for module in self._decoder.modules():
            if hasattr(module, "layer_idx"):
                self.place_layer(module)
        if "position_ids" not in inspect.signature(type(self._decoder).forward).parameters:
            self._place_positions()
        if self._scope.tp_group is not None:
            plan = getattr(self._decoder.config, "base_model_tp_plan", None) or {}
            self._num_shared = share_linears(self._model, self._decoder, plan, self._scope.tp_group)
        self._try()

    def place_layer(self, module: nn.Module) -> None:
        """Tell a part of a layer, which has its number, where its attention finds the cache."""
        own: Any = module
        own.quire_attention, own.quire_layer = self._paged, own.layer_idx
