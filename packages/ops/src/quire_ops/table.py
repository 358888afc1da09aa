"""The table of ops and their backends: who supports what is data, and one backend is chosen when a model is built.

Knows nothing about any particular op: declarations are in `declarations.py`, functions in `reference.py` and the
`torch_*.py` modules, further backends come through the entry point group `quire.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from quire_interfaces import ConfigError
from quire_ops.kernel_builds import KernelBuilder

__all__ = ["Op", "OpBackend", "OpChoice", "OpFunction", "OpRequest", "OpTable", "SizeRule"]

OpFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRequest:
    """What an op will be used for: the facts that decide whether a backend can serve."""

    device: str = "cpu"
    """Device type as torch names it: "cpu", "cuda"."""
    dtype: torch.dtype = torch.float32
    """Compute dtype of the op's main input."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Named sizes known when the model is built, for example {"head_dim": 128, "block_size": 16}."""
    cache_dtype: str | None = None
    """What keys and values are kept in, a name of `quire_interfaces.KV_CACHE_DTYPES`; None for the compute dtype."""
    features: frozenset[str] = frozenset()
    """Of attention, what it has besides: some of "sliding_window", "soft_cap", "sinks", "alibi"."""


class SizeRule(NamedTuple):
    """Which values of one named size a backend takes."""

    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1
    one_of: frozenset[int] | None = None

    def refusal(self, name: str, value: int) -> str | None:
        """Why `value` is not taken, or None."""
        if value < self.minimum:
            return f"{name} must be at least {self.minimum}, is {value}"
        if self.maximum is not None and value > self.maximum:
            return f"{name} must be at most {self.maximum}, is {value}"
        if value % self.multiple_of:
            return f"{name} must be a multiple of {self.multiple_of}, is {value}"
        if self.one_of is not None and value not in self.one_of:
            return f"{name} must be one of {', '.join(map(str, sorted(self.one_of)))}, is {value}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpBackend:
    """One implementation of one op, and the data that says when it can be used."""

    op: str
    name: str
    """Name of the backend, shared by its implementations of all ops ("reference", "torch", ...)."""
    function: OpFunction
    priority: int = 0
    """The available backend with the highest priority is chosen; the reference has -100, torch's fused operators 0."""
    devices: frozenset[str] | None = None
    """Device types; None for every device."""
    dtypes: frozenset[torch.dtype] | None = None
    """Compute dtypes; None for every dtype."""
    sizes: Mapping[str, SizeRule] = field(default_factory=dict)
    cache_dtypes: frozenset[str] | None = None
    """What keys and values may be kept in, besides the compute dtype; None for everything, or where there are none."""
    features: frozenset[str] | None = None
    """Which of `OpRequest.features` it knows; None for all."""
    batch_invariant: bool = False
    """A row's result is the same to the bit whatever rows are beside it and however a sequence is cut into steps."""
    device_lengths: bool = False
    """Of an op that gets a `PagedLayout`: what it launches depends on the layout's shapes, on `query_lens`, and on
    `kv_lens` as bounds; how long sequences are it reads on the device. So a graph that was captured stays right. Of op
    `lora_linear`: it takes `LoraTokens.is_fixed`."""
    trees: bool = False
    """Of an op that gets a `PagedLayout`: it reads the layout's `paths`."""
    builder: KernelBuilder | None = None
    """Builds this package's kernels ahead of time; None where there is nothing to build."""
    unavailable: str | None = None
    """Why the backend cannot work in this process at all (a missing compiler, library or instruction set)."""

    def refusal(self, request: OpRequest) -> str | None:
        """Why this backend cannot serve `request`, or None when it can."""
        if self.unavailable is not None:
            return self.unavailable
        if self.devices is not None and request.device not in self.devices:
            return f"runs on {', '.join(sorted(self.devices))}, not on {request.device}"
        if self.dtypes is not None and request.dtype not in self.dtypes:
            return f"takes {_dtype_names(self.dtypes)}, not {_dtype_name(request.dtype)}"
        cache_dtype = request.cache_dtype or _dtype_name(request.dtype)
        if self.cache_dtypes is not None and cache_dtype not in (_dtype_name(request.dtype), *self.cache_dtypes):
            return f"reads no {cache_dtype} KV cache"
        if self.features is not None and (unknown := request.features - self.features):
            return f"knows no {', '.join(sorted(unknown))}"
        for name, rule in self.sizes.items():
            if name in request.sizes and (reason := rule.refusal(name, request.sizes[name])) is not None:
                return reason
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """The declaration of an op: what every backend has to compute."""

    name: str
    signature: str
    """Arguments with shapes and dtypes, then what comes back."""
    description: str


class OpChoice(NamedTuple):
    """One line of the report of an op."""

    op: str
    backend: str
    """The backend that serves."""
    refused: dict[str, str]
    """Every other backend -> why it does not serve."""


class OpTable:
    """Ops by name, and for each its backends."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self._ops = {op.name: op for op in ops}
        self._backends: dict[str, dict[str, OpBackend]] = {name: {} for name in self._ops}

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every declared op."""
        return tuple(self._ops.values())

    def backends(self, op: str) -> tuple[OpBackend, ...]:
        """The backends of `op`, the most preferred first."""
        if op not in self._ops:
            raise ConfigError(f"there is no op {op!r}; the ops are {', '.join(sorted(self._ops))}")
        return tuple(sorted(self._backends[op].values(), key=lambda backend: -backend.priority))

    def add(self, backend: OpBackend) -> OpBackend:
        """Add a backend and return it.

        Raises:
            ConfigError: The op is not declared, or has a backend of this name.
        """
        if backend.op not in self._ops:
            choices = ", ".join(sorted(self._ops))
            raise ConfigError(f"backend {backend.name!r} serves op {backend.op!r}; the declared ops are {choices}")
        if backend.name in self._backends[backend.op]:
            raise ConfigError(f"op {backend.op!r} already has a backend called {backend.name!r}; rename one of them")
        self._backends[backend.op][backend.name] = backend
        return backend

    def choose(self, op: str, request: OpRequest, *, backend: str | None = None) -> tuple[OpBackend, OpChoice]:
        """The backend that serves `request`, and why the others do not.

        Args:
            backend: Take this backend or fail, whatever the priorities say.

        Raises:
            ConfigError: Unknown op or backend, or nothing can serve the request; the message lists every reason.
        """
        candidates = self.backends(op)
        if backend is not None and backend not in self._backends[op]:
            choices = ", ".join(candidate.name for candidate in candidates)
            raise ConfigError(f"op {op!r} has no backend {backend!r}; choose one of {choices}")
        chosen: OpBackend | None = None
        refused: dict[str, str] = {}
        for candidate in candidates:
            reason = candidate.refusal(request)
            if reason is None and backend is not None and candidate.name != backend:
                reason = f"{backend} was asked for"
            if reason is None and chosen is not None:
                reason = f"{chosen.name} comes first (priority {chosen.priority} over {candidate.priority})"
            if reason is None:
                chosen = candidate
            else:
                refused[candidate.name] = reason
        if chosen is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise ConfigError(f"no backend can serve op {op!r} on {request.device} in this use ({reasons})")
        return chosen, OpChoice(op, chosen.name, refused)

    def bind(self, op: str, request: OpRequest, *, backend: str | None = None) -> OpFunction:
        """The function that serves `request`: look it up once, call it often. Raises as `choose` does."""
        return self.choose(op, request, backend=backend)[0].function

    def report(self, request: OpRequest, *, backends: Mapping[str, str] | None = None) -> list[OpChoice]:
        """For each op: the backend that serves `request`, and why each other one does not.

        Args:
            backends: Op -> backend that was asked for by name.
        """
        asked = backends or {}
        return [self.choose(name, request, backend=asked.get(name))[1] for name in self._ops]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(_dtype_name(dtype) for dtype in dtypes))
