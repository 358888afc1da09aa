"""The table of ops and their backends: who supports what is data, and one backend is chosen when a model is built.

Knows nothing about any particular op: ops are listed in `ops.py`, and further backends come through the entry point
group `quire.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, cast

import torch

from quire_interfaces import ConfigError
from quire_ops.kernel_builds import KernelBuilder
from quire_ops.op import Op, P, R

__all__ = ["BackendSet", "OpBackend", "OpReport", "OpRequest", "OpTable", "SizeRule", "torch_backend_for"]


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
    """What attention has besides plain scores: some of "sliding_window", "soft_cap", "sinks", "alibi"."""


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
class OpBackend(Generic[P, R]):
    """One implementation of one op, and the data that says when it can be used."""

    op: Op[P, R]
    name: str
    """Name of the backend, shared by its implementations of all ops ("reference", "torch", ...)."""
    function: Callable[P, R]
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
    """Whether what an op with a `PagedLayout` launches depends on the layout's shapes, on `query_lens`, and on
    `kv_lens` as bounds; how long sequences are it reads on the device. So a graph that was captured stays right. Of op
    `lora_linear`: it takes `LoraTokens.is_fixed`."""
    device_query_lens: bool = False
    """Whether `query_lens` are only bounds to it, too: of few tokens (at most `FEW_TOKENS` of
    quire_interfaces) and of many, for as many sequences as
    there are; where each begins it reads on the device. So a graph of prompts beside decodes stays right."""
    trees: bool = False
    """Whether an op with a `PagedLayout` reads the layout's `paths`."""
    planes: bool = False
    """Whether it takes weights in blocks with their bytes in planes (`block_formats.in_planes`), and no others."""
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


class BackendSet:
    """The backends of one name as they are written: `@backend_for(op, ...)` holds a function to its op and keeps it.

    Args:
        name: `OpBackend.name` of all.
        facts: Further fields of `OpBackend`, unless a function says otherwise.
    """

    def __init__(self, name: str, **facts: Any) -> None:
        self._name, self._facts = name, facts
        self._backends: list[OpBackend[..., Any]] = []

    def __call__(self, op: Op[P, R], **facts: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator that adds a function as the backend of `op` and gives it as it is.

        Args:
            facts: Fields of `OpBackend` that differ from those of the others.
        """

        def add(function: Callable[P, R]) -> Callable[P, R]:
            self._backends.append(OpBackend(op=op, name=self._name, function=function, **{**self._facts, **facts}))
            return function

        return add

    def records(self, *, unavailable: str | None = None) -> list[OpBackend[..., Any]]:
        """All of them, with the reason why they cannot work in this process, if there is one."""
        return [replace(backend, unavailable=unavailable) for backend in self._backends]


torch_backend_for = BackendSet("torch", dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}))
"""What this package has besides references: each op through torch's own operators."""


class OpReport(NamedTuple):
    """Which backend serves an op, and why no other one does."""

    op: str
    backend: str
    """The backend that serves."""
    refused: dict[str, str]
    """Every other backend -> why it does not serve."""


class OpTable:
    """Ops, and for each its backends."""

    def __init__(self, ops: Iterable[Op[..., Any]]) -> None:
        self._ops = {op.name: op for op in ops}
        self._backends: dict[str, dict[str, OpBackend[..., Any]]] = {name: {} for name in self._ops}

    @property
    def ops(self) -> tuple[Op[..., Any], ...]:
        """Every op of the table."""
        return tuple(self._ops.values())

    def backends(self, op: Op[P, R]) -> tuple[OpBackend[P, R], ...]:
        """The backends of `op`, the most preferred first."""
        by_name = cast("dict[str, OpBackend[P, R]]", self._backends[op.name])
        return tuple(sorted(by_name.values(), key=lambda backend: -backend.priority))

    def named(self, op: Op[P, R], name: str) -> OpBackend[P, R]:
        """The backend of `op` called `name`, whether it can serve here or not.

        Raises:
            ConfigError: There is none; the message lists the names.
        """
        candidates = self.backends(op)
        for candidate in candidates:
            if candidate.name == name:
                return candidate
        choices = ", ".join(candidate.name for candidate in candidates)
        raise ConfigError(f"op {op.name!r} has no backend {name!r}; choose one of {choices}")

    def add(self, backend: OpBackend[P, R]) -> OpBackend[P, R]:
        """Add a backend and return it.

        Raises:
            ConfigError: The op is not in the table, or has a backend of this name.
        """
        name = backend.op.name
        if name not in self._ops:
            choices = ", ".join(sorted(self._ops))
            raise ConfigError(f"backend {backend.name!r} serves op {name!r}; the declared ops are {choices}")
        if backend.name in self._backends[name]:
            raise ConfigError(f"op {name!r} already has a backend called {backend.name!r}; rename one of them")
        self._backends[name][backend.name] = backend
        return backend

    def choose(self, op: Op[P, R], request: OpRequest, *, backend: str | None = None) -> OpBackend[P, R]:
        """The backend that serves `request`.

        Args:
            backend: Take this backend or fail, whatever the priorities say.

        Raises:
            ConfigError: Unknown backend, or nothing can serve the request; the message lists every reason.
        """
        return self._judge(op, request, backend)[0]

    def bind(self, op: Op[P, R], request: OpRequest, *, backend: str | None = None) -> Callable[P, R]:
        """The function that serves `request`: look it up once, call it often. Raises as `choose` does."""
        return self.choose(op, request, backend=backend).function

    def report(self, op: Op[P, R], request: OpRequest, *, backend: str | None = None) -> OpReport:
        """The backend that serves `request`, and why each other one does not. Arguments and errors as `choose`."""
        chosen, refused = self._judge(op, request, backend)
        return OpReport(op.name, chosen.name, refused)

    def _judge(self, op: Op[P, R], request: OpRequest, backend: str | None) -> tuple[OpBackend[P, R], dict[str, str]]:
        if backend is not None:
            self.named(op, backend)
        chosen: OpBackend[P, R] | None = None
        refused: dict[str, str] = {}
        for candidate in self.backends(op):
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
            raise ConfigError(f"no backend can serve op {op.name!r} on {request.device} in this use ({reasons})")
        return chosen, refused


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(_dtype_name(dtype) for dtype in dtypes))
