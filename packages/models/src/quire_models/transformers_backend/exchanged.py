"""Networks of Transformers whose linear layers are Quire's: quantized checkpoints, and weights that are quantized while
they are loaded.

A quantized checkpoint is read twice: by Transformers, which is shown it without its `quantization_config` and builds no
weight for layers that are exchanged, and by Quire, which reads these layers in their own form (`stored_linear.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from quire_interfaces import CheckpointError, read_json
from quire_models.config import ModelConfig
from quire_models.layers.module_linear import ExchangedLinear
from quire_models.layers.scope import Packed, Parameter, Scope
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats import QUANTIZATION_KEYS
from quire_models.stored_linears import is_router
from quire_models.transformers_backend.model import TransformersLM
from quire_models.weights import fill_parameters, fill_with_dummies

__all__ = ["ExchangedLM", "exchanged"]

METHOD = "quire"
"""Name of the quantizer in Transformers' table."""


class ExchangedLM(TransformersLM):
    """A network of Transformers with Quire's linear layers."""

    _is_loading = False

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        self._folder, self._is_dummy = Path(), False
        self._layers: dict[str, ExchangedLinear] = {}
        self._parameters: list[Parameter] = []
        self._finishers: list[Callable[[], None]] = []

    def load(self, folder: str | Path, *, dummy: bool = False, language_model_only: bool = False) -> None:
        """See `TransformersLM.load`.

        Raises:
            CheckpointError: Besides, a quantized layer whose module cannot be exchanged, or tensors of a layer that are
                missing or of another shape.
        """
        self._folder, self._is_dummy = Path(folder), dummy
        self._is_loading = True
        if self.config.quantization is None:
            super().load(folder, dummy=dummy, language_model_only=language_model_only)
            return
        with _shown_plain(self._folder, self) as plain:
            super().load(plain, dummy=dummy, language_model_only=language_model_only)

    def find_class(self, folder: Path) -> Any:
        """See `ChosenClassLM.find_class`. Code comes from the checkpoint's own folder: Transformers keeps a copy of it
        for each folder that it is loaded from, and the one that it is shown is another one each time."""
        own: Any = super()
        return own.find_class(self._folder)

    @property
    def device(self) -> torch.device:
        """Where the weights are: on the host until each layer has its own form."""
        return torch.device("cpu") if self._is_loading else super().device

    def exchange_stored(self, model: nn.Module) -> None:
        """Take the place of the layers that the checkpoint holds quantized. Before the network has weights."""
        quantization = self.config.quantization
        assert quantization is not None
        scope = replace(self._scope, adapters=None, parameters=self._parameters, finishers=self._finishers)
        tied = _tied_modules(model)
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and name not in tied and _is_stored_quantized(quantization, name):
                self._layers[name] = ExchangedLinear(scope / name, module)
                _set_module(model, name, self._layers[name])
        held = {name for name, stored in quantization.held.items() if not getattr(stored, "is_plain", True)}
        if left := sorted(name for name in held if name not in self._layers and not _is_scale(name, held)):
            raise CheckpointError(
                f"the checkpoint holds {left[0]} quantized ({quantization.held[left[0]]}; {len(left)} such layers), "
                f"but {_why_kept(model, left[0], tied)}, and of {self.config.architecture}, which runs through "
                "Transformers, only plain torch.nn.Linear layers can hold quantized weights; use the unquantized "
                "checkpoint, with quantization int8 or int4"
            )

    def _exchange_loaded(self) -> None:
        """Have the linear method make its own form of the weights of all linear layers of the language model, routers,
        experts and LM head aside. Layer by layer: the device never has more than one of them as it was loaded."""
        scope = replace(self._scope, adapters=None, quantization=None)
        for name in self._rounded_layers():
            module = self._model.get_submodule(name)
            own = replace(scope, parameters=[], finishers=[])
            exchanged = ExchangedLinear(own / name, module)
            for part, parameter in exchanged.linear.parameters.items():
                tensor: Tensor = parameter.part_of(getattr(module, part).detach())
                parameter.tensor = tensor.to(self.device, parameter.dtype or self.dtype).contiguous()
            for finish in own.finishers:
                finish()
            self._layers[name] = exchanged
            _set_module(self._model, name, exchanged)

    def _rounded_layers(self) -> list[str]:
        """Names of the layers that a linear method takes."""
        decoder = self._model.get_decoder() if self.config.language_names is not None else self._model
        within, head = set(decoder.modules()), self._model.get_output_embeddings()
        linears = [name for name, module in self._model.named_modules()
                   if type(module) is nn.Linear and module in within and module is not head]  # fmt: skip
        return [name for name in linears if not is_router(name) and ".experts." not in name]

    def _check(self) -> None:
        """The network is there: give its layers their weights, and put what is left of it on the device."""
        self._is_loading = False
        if self.config.quantization is None:
            self._exchange_loaded()
        else:
            if not self._layers:  # nobody asks the quantizer of a network that starts at random
                self.exchange_stored(self._model)
            self._fill()
        self._model.to(self.device)
        super()._check()

    def _fill(self) -> None:
        """Read the layers that the checkpoint holds quantized."""
        holder = _Holder(self)
        if self._is_dummy:
            fill_with_dummies(holder)
            trim = None
        else:
            filling = fill_parameters(holder, self._folder, lambda name, tensor: [(name, tensor)])
            if filling.missing or filling.wrong:
                missing = [f"{', '.join(filling.missing)} missing"] if filling.missing else []
                raise CheckpointError(
                    f"the quantized layers in {self._folder} do not fit its config.json "
                    f"({'; '.join([*missing, *filling.wrong])}); use files of one checkpoint"
                )
            trim = filling.trim
        for finish in self._finishers:
            finish()
            if trim is not None:
                trim()
        self._parameters.clear()
        self._finishers.clear()


def exchanged(network_class: type[TransformersLM]) -> type[TransformersLM]:
    """The class of the same networks with Quire's linear layers."""
    return type(f"Exchanged{network_class.__name__}", (ExchangedLM, network_class), {})


class _Holder:
    """The layers of a network that are exchanged, as a loader sees them."""

    def __init__(self, network: ExchangedLM) -> None:
        self.dtype, self.device = network.dtype, network.device
        self.parameters = network._parameters
        self.packs: dict[str, Packed] = {}


def _is_stored_quantized(quantization: QuantizationConfig, name: str) -> bool:
    """Whether the checkpoint holds the layer of this name quantized; what the configuration says, without files."""
    if quantization.held:
        module = quantization.held.get(name)
        return module is not None and not module.is_plain
    return name != "lm_head" and quantization.of_layer(name) is not None


def _is_scale(name: str, held: Collection[str]) -> bool:
    """Whether what looks like a module is a part of one: "q_proj.weight" of bitsandbytes' nested names."""
    return any(name.startswith(f"{other}.") for other in held)


def _why_kept(model: nn.Module, name: str, tied: Collection[str]) -> str:
    """Why the module of this name keeps its class."""
    module = dict(model.named_modules()).get(name)
    if module is None:
        return "Transformers' network has no layer of this name (its experts may be one tensor)"
    if name in tied:
        return "its weight is the embedding's"
    return f"Transformers has a {type(module).__name__} there"


def _tied_modules(model: Any) -> set[str]:
    """Names of modules whose weight is an embedding's."""
    return {name.rpartition(".")[0] for name in getattr(model, "all_tied_weights_keys", None) or ()}


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


_LOADING: dict[int, ExchangedLM] = {}
"""Number in the configuration that Transformers reads -> the network that it is loaded for. Ranks may be threads."""
_NUMBERS = count()


@contextmanager
def _shown_plain(folder: Path, network: ExchangedLM) -> Iterator[Path]:
    """The checkpoint as Transformers is shown it: links to its files, and a config.json that names our quantizer."""
    _register_quantizer()
    number = next(_NUMBERS)
    _LOADING[number] = network
    values = read_json(folder / "config.json")
    for key in QUANTIZATION_KEYS:
        values.pop(key, None)
    for part in [values, *(part for part in values.values() if isinstance(part, dict))]:
        for key in QUANTIZATION_KEYS:
            part.pop(key, None)
    values["quantization_config"] = {"quant_method": METHOD, "number": number}
    try:
        with TemporaryDirectory(prefix="quire-") as place:
            for file in folder.iterdir():
                if file.name != "config.json":
                    (Path(place) / file.name).symlink_to(file.resolve())
            (Path(place) / "config.json").write_text(json.dumps(values), encoding="utf-8")
            yield Path(place)
    finally:
        del _LOADING[number]


@cache
def _register_quantizer() -> None:
    """Enter our quantizer into Transformers' table: it exchanges layers before weights are read, and ignores theirs."""
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class Config(QuantizationConfigMixin):
        def __init__(self, number: int, **_: Any) -> None:
            own: Any = self  # Transformers' own methods are members of an enumeration
            own.quant_method, own.number = METHOD, number

    @register_quantizer(METHOD)
    class Quantizer(HfQuantizer):
        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            config: Any = self.quantization_config
            network = _LOADING[config.number]
            network.exchange_stored(model)
            ignored = {rf"^{re.escape(name)}\." for name in network._layers}
            model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}
            return model

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False
