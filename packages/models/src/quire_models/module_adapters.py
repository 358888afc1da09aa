"""Adapters on the linear layers of a network that is made of torch modules, as Transformers' are.

Knows modules and slots; does not know whose network it is, or how its steps run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quire_interfaces import ConfigError
from quire_lora import AdapterSlots
from quire_models.layers.module_linear import ExchangedLinear
from quire_ops import LoraWeights

__all__ = ["place_adapters"]

ROUTED = ".experts."
"""In the names of layers that see some of a step's tokens, in an order of their own."""


def place_adapters(model: nn.Module, body: nn.Module, slots: AdapterSlots, run_tokens: Callable[[], None]) -> None:
    """Register the linear layers of a body under their full names, and add to what they give.

    Quire's own layers in the place of torch's are among them (`ExchangedLinear`), whatever form their weights have.

    Layers count that see each token of a step once, in order: what some tokens show of a layer, and its name, decide
    it. Embeddings and heads take no adapters here.

    Args:
        model: What names count from, as PEFT counts them.
        body: The part of it that runs on the tokens of a step, as many as its `position_ids` [..., T] have.
        run_tokens: Calls the body, once or more often, without adapters.
    """
    within = set(body.modules())
    sites = {
        name: _Site(name, module, slots)
        for name, module in model.named_modules()
        if module in within and _is_linear(module, slots) and ROUTED not in name
    }
    calls: list[int] = []
    counter = body.register_forward_pre_hook(
        lambda _, __, inputs: calls.append(inputs["position_ids"].shape[-1]), prepend=True, with_kwargs=True
    )
    for site in sites.values():
        site.calls = calls
    run_tokens()
    counter.remove()
    for site in sites.values():
        site.decide()


def _is_linear(module: nn.Module, slots: AdapterSlots) -> bool:
    return type(module) in (nn.Linear, ExchangedLinear) and module.weight.dtype == slots.dtype


class _Site:
    """One linear layer: first it is watched, then it adds adapters, or is left alone."""

    def __init__(self, name: str, module: nn.Linear | ExchangedLinear, slots: AdapterSlots) -> None:
        self._name, self._module, self._slots = name, module, slots
        self.calls: list[int] = []
        """Tokens of each call of the body so far, this one included."""
        self._fits: list[bool] = []
        """Of each call of the layer, whether it was given as many rows as the body tokens."""
        self._weights: LoraWeights | None = None
        self._handle = module.register_forward_hook(self._after)

    def decide(self) -> None:
        if self._fits and all(self._fits):
            outputs, inputs = self._module.out_features, self._module.in_features
            self._weights = self._slots.linear(self._name, outputs, inputs, self._base, self._plain)
        else:
            self._handle.remove()

    def _plain(self) -> Tensor | None:
        if isinstance(self._module, ExchangedLinear):
            return self._module.linear.plain()
        return self._module.weight.detach()

    def _base(self) -> tuple[Tensor, Tensor | None]:
        if isinstance(self._module, ExchangedLinear):
            return self._module.linear.base()
        bias: Tensor | None = self._module.bias
        return self._module.weight.detach().float(), None if bias is None else bias.detach().float()

    def _after(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        x: Tensor = args[0]
        rows = x.shape[:-1].numel()
        if self._weights is None:
            self._fits.append(rows == self.calls[-1])
            return
        tokens = self._slots.tokens
        if tokens is None:
            return
        if rows != len(tokens.slots):
            raise ConfigError(
                f"{self._name} was given {rows} rows in a step of {len(tokens.slots)} tokens, so that no adapter can "
                "be put on it; serve this model with enable_lora off",
                field="enable_lora",
            )
        self._slots.add(out.view(rows, -1), x.reshape(rows, -1), self._weights, tokens)
