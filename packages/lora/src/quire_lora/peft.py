"""Reading PEFT's adapters: names of its tensors, and what they become for a network's layers.

Knows adapter_model.safetensors and how LoRA (Hu et al. 2021), rsLoRA, DoRA (Liu et al. 2024) and trained biases are
written there. What a network calls its layers comes from `AdapterSlots`; how it takes fused matrices apart, from the
network itself.

Shape legend: r rank, E experts, I inputs, O outputs, V vocabulary, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_lora.adapter import Adapter, ExpertAdapter, LinearAdapter, TableAdapter, narrowed, stack_experts
from quire_lora.peft_config import PeftConfig
from quire_lora.slots import AdapterSlots, LinearSite

__all__ = ["WEIGHTS", "Rename", "read_adapter"]

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."
_PARTS = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_magnitude_vector(?:\.weight)?"
    r"|lora_embedding_A|lora_embedding_B|(?:base_layer\.)?weight|(?:base_layer\.)?bias)"
)
_SCALES = ("lora_A.weight_scale", "lora_B.weight_scale")
_LAYER = re.compile(r"\.(?:layers|h|blocks|layer)\.(\d+)\.")

Rename = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""(name in the checkpoint, tensor) -> names and tensors of the network's parameters; see
`quire_models.Network.parameter_tensors`."""


@dataclass(slots=True)
class _Module:
    """Tensors of one module, by what they are."""

    name: str
    parts: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    """[rows] float32: what a part is multiplied with."""

    def widen(self) -> None:
        """Multiply the parts with their scales."""
        for part, scale in self.scales.items():
            self.parts[part] = self.parts[part] * scale[:, None]
        self.scales.clear()


def read_adapter(
    folder: str | Path,
    slots: AdapterSlots,
    rename: Rename = lambda name, tensor: [(name, tensor)],
    *,
    pause: Callable[[], None] = lambda: None,
) -> Adapter:
    """Read an adapter for a network.

    Args:
        folder: With adapter_config.json and adapter_model.safetensors.
        slots: The network's layers, as they registered.
        rename: How the network calls what the checkpoint brings.
        pause: Called between a tensor and the next, and between a module and the next: other threads may want to run.

    Raises:
        CheckpointError: what cannot be applied here, or weights that are missing, not known or of the wrong shape: all
            of them are listed in one message.
    """
    folder = Path(folder)
    config = PeftConfig.from_folder(folder)
    return _Reader(folder, config, slots, rename, pause).read()


class _Reader:
    def __init__(
        self, folder: Path, config: PeftConfig, slots: AdapterSlots, rename: Rename, pause: Callable[[], None]
    ) -> None:
        self._folder, self._config, self._slots, self._rename, self._pause = folder, config, slots, rename, pause
        self._missing: list[str] = []
        self._unknown: list[str] = []
        self._wrong: list[str] = []
        self._infinite: list[str] = []
        """Of those that are to be narrow."""

    def read(self) -> Adapter:
        modules = self._modules()
        own = {name: module for name, module in modules.items() if not self._slots.is_elsewhere(name)}
        is_elsewhere, modules = len(own) < len(modules), own
        linears = self._stacked_experts(modules)
        tables: dict[str, TableAdapter] = {}
        outer = {"embedding": self._slots.embedding, "lm_head": self._slots.lm_head}
        for module in modules.values():
            self._pause()
            for role, known in outer.items():
                if known is not None and module.name == known[0]:
                    module.widen()
                    tables[role] = self._table(module, known[1], embedding=role == "embedding")
                    break
            else:
                linears |= self._linears(module)
        self._find_missing(modules, linears)
        self._complain()
        if not linears and not tables and not is_elsewhere:
            raise CheckpointError(f"the adapter in {self._folder} is empty")
        return Adapter(experts=self._experts(linears), linears=linears, **tables)

    def _modules(self) -> dict[str, _Module]:
        path = self._folder / WEIGHTS
        if not path.is_file():
            pickled = (self._folder / PICKLED).is_file()
            instead = f", but {PICKLED}, a format that can run code when it is read" if pickled else ""
            raise CheckpointError(
                f"{str(self._folder)!r} has no {WEIGHTS}{instead}; load the adapter with PEFT and save it with "
                "save_pretrained(folder, safe_serialization=True)"
            )
        modules: dict[str, _Module] = {}
        tensors = dict(self._tensors(path))
        scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_SCALES)}
        for name, stored in tensors.items():
            found = _PARTS.fullmatch(name.removeprefix(PREFIX))
            scale = self._scale(name, stored, scales.pop(f"{name}_scale", None))
            if found is None or (scale is None and not stored.is_floating_point()):
                self._unknown.append(name)
                continue
            part = found["part"].removesuffix(".weight") if "magnitude" in found["part"] else found["part"]
            module = modules.setdefault(found["module"], _Module(found["module"]))
            module.parts[part] = stored.float()
            if scale is not None:
                module.scales[part] = scale
        self._unknown += scales
        return modules

    def _scale(self, name: str, tensor: Tensor, scale: Tensor | None) -> Tensor | None:
        """[rows] float32 of int8 or fp8 with a scale for each row, or one for all, as compressed-tensors has them. None
        without one: fp8 alone, as adapters are saved that were kept in it, or numbers that are not narrow."""
        if scale is None:
            return None
        if tensor.dtype not in (torch.int8, torch.float8_e4m3fn) or scale.numel() not in (1, len(tensor)):
            self._wrong.append(
                f"{name} is {list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')} and its scale "
                f"{list(scale.shape)}, should be int8 or float8_e4m3fn with a scale for each row or one"
            )
            return torch.ones(len(tensor))
        return scale.float().flatten().expand(len(tensor))

    def _tensors(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    self._pause()
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    def _complain(self) -> None:
        lists = (("missing", self._missing), ("not known", self._unknown), ("of the wrong shape", self._wrong),
                 ("with numbers that are not finite", self._infinite))  # fmt: skip
        parts = [f"{len(names)} {kind}: {', '.join(names)}" for kind, names in lists if names]
        if parts:
            raise CheckpointError(
                f"the adapter in {self._folder} does not fit this network ({'; '.join(parts)}); use an adapter of this "
                "model, whose target_modules are linear layers, routed experts, the embedding or the LM head"
            )

    def _find_missing(self, modules: dict[str, _Module], linears: dict[str, LinearAdapter]) -> None:
        """Layers that the configuration names and the file does not have."""
        for site in self._slots.experts.values():  # whether they are meant at all, the file says
            for names in (site.gate, site.up, site.down):
                if any(name in linears for name in names):
                    self._missing += [f"{name}.lora_A.weight" for name in names if name not in linears]
        for name, linear in self._slots.linears.items():
            if linear.expert is not None:
                continue
            layer = _LAYER.search(f".{name}.")
            if name not in linears and self._config.targets(name, None if layer is None else int(layer[1])):
                broken = any(name in (module, *self._unknown) for module in modules)
                if not broken:
                    self._missing.append(f"{name}.lora_A.weight")

    # A linear layer, or several that the checkpoint keeps as one.

    def _linears(self, module: _Module) -> dict[str, LinearAdapter]:
        parts = dict(module.parts)
        a, b = parts.pop("lora_A.weight", None), parts.pop("lora_B.weight", None)
        bias = parts.pop("bias", parts.pop("base_layer.bias", None))
        magnitude, lora_bias = parts.pop("lora_magnitude_vector", None), parts.pop("lora_B.bias", None)
        if parts or (a is None and b is None and bias is None):
            self._unknown += [f"{module.name}.{part}" for part in module.parts]
            return {}
        for name, present in (("lora_A.weight", a), ("lora_B.weight", b)):
            if present is None and (a is not None or b is not None):
                self._missing.append(f"{module.name}.{name}")
                return {}
        if a is None or b is None:
            sites = self._split(module.name, bias[:, None]) if bias is not None else None
            if sites is None:
                self._unknown.append(f"{module.name}.bias")
                return {}
            return {name: self._only_bias(site, piece[:, 0]) for name, (site, piece) in sites.items()}
        if not self._fits(module.name, a, b):
            return {}
        pieces = self._split(module.name, b)
        if pieces is None:
            self._unknown.append(f"{module.name}.lora_A.weight")
            return {}
        outputs = len(next(iter(pieces.values()))[1]) if len(pieces) == 1 else sum(len(p) for _, p in pieces.values())
        for what, vector in (("lora_magnitude_vector", magnitude), ("lora_B.bias", lora_bias), ("bias", bias)):
            if vector is not None and vector.numel() != outputs:
                self._wrong.append(f"{module.name}.{what} is {list(vector.shape)}, should be {[outputs]}")
                return {}
        a_scale, b_scale = module.scales.get("lora_A.weight"), module.scales.get("lora_B.weight")
        vectors = {
            what: {} if vector is None else self._split(module.name, vector.reshape(-1, 1)) or {}
            for what, vector in (
                ("magnitude", magnitude), ("lora_bias", lora_bias), ("bias", bias), ("b_scale", b_scale)
            )
        }  # fmt: skip
        found = {}
        for name, (site, piece) in pieces.items():
            if site.shape != (len(piece), a.shape[1]):
                self._wrong.append(
                    f"{module.name}.lora_B.weight times lora_A.weight is {[len(piece), a.shape[1]]}, should be "
                    f"{list(site.shape)}"
                )
                continue
            own = {what: sites[name][1][:, 0] if sites else None for what, sites in vectors.items()}
            if site.outputs is not None:  # of a layer that ranks share out, the rank's own
                piece = piece[site.outputs]
                own = {what: None if vector is None else vector[site.outputs] for what, vector in own.items()}
            found[name] = self._linear(module.name, site, a, piece, a_scale=a_scale, **own)
        return found

    def _fits(self, module: str, a: Tensor, b: Tensor) -> bool:
        rank = self._config.rank_of(module)
        if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank:
            self._wrong.append(
                f"{module}: lora_A is {list(a.shape)} and lora_B is {list(b.shape)}, should be of rank {rank}"
            )
            return False
        self._check_rank(rank, module)
        return True

    def _check_rank(self, rank: int, module: str) -> None:
        if rank > self._slots.max_rank:
            raise CheckpointError(
                f"the adapter in {self._folder} has rank {rank} at {module}, this server takes {self._slots.max_rank} "
                f"at most; start it with --max-lora-rank {rank}"
            )

    def _split(self, module: str, b: Tensor) -> dict[str, tuple[LinearSite, Tensor]] | None:
        """[O, x] of a module -> per layer of the network its site and its outputs' part; None when it knows none."""
        pieces = self._pieces(f"{module}.weight", b)
        if pieces is not None:
            return pieces
        # One layer under its own name: its size is somebody else's to check.
        site = self._slots.linears.get(module)
        return None if site is None else {module: (site, b)}

    def _pieces(self, name: str, b: Tensor) -> dict[str, tuple[LinearSite, Tensor]] | None:
        """[..., O, x] under a name of the checkpoint -> the same; None where parts are not what the network has, or
        nothing is: the name of a tower."""
        for candidate in (b, b.mT.contiguous()):  # some checkpoints keep matrices transposed
            try:
                parts = list(self._rename(name, candidate))
            except (RuntimeError, ValueError, IndexError):
                continue
            named = {part.removesuffix(".weight"): piece for part, piece in parts}
            sites = {part: self._slots.linears.get(part) for part in named}
            shapes = {part: (site.shape[0], b.shape[-1]) for part, site in sites.items() if site is not None}
            if named and shapes == {part: tuple(piece.shape) for part, piece in named.items()}:
                return {part: (site, named[part]) for part, site in sites.items() if site is not None}
        return None

    def _linear(
        self,
        module: str,
        site: LinearSite,
        a: Tensor,
        b: Tensor,
        *,
        magnitude: Tensor | None = None,
        lora_bias: Tensor | None = None,
        bias: Tensor | None = None,
        a_scale: Tensor | None = None,
        b_scale: Tensor | None = None,
    ) -> LinearAdapter:
        """a [r, I] and b [O, r], and what their rows are multiplied with; None for ones."""
        rows = torch.ones(len(a)) if a_scale is None else a_scale
        factor = (torch.ones(len(b)) if b_scale is None else b_scale) * self._config.scaling_of(module)
        scale: Tensor | None = None
        shift = torch.zeros(len(b))
        weight, own_bias = site.base() if magnitude is not None or bias is not None else (None, None)
        if lora_bias is not None:
            shift += lora_bias * self._config.scaling_of(module)
        if magnitude is not None:
            assert weight is not None
            # What is read is on the host, the layer may not be.
            change = (b * factor[:, None]).to(weight.device) @ (a * rows[:, None]).to(weight.device)
            norms = torch.linalg.vector_norm(weight + change, dim=1)
            scale = magnitude / norms.to(magnitude.device)  # Liu et al. 2024, eq. 5
            factor = factor * scale
            if lora_bias is not None:
                shift *= scale
        kept = torch.zeros(len(b)) if own_bias is None else own_bias.to(b.device)
        after = kept if bias is None else bias
        shift += after - (kept if scale is None else kept * scale)
        dtype = self._slots.narrow_dtype if site.weights is not None else None
        shift_or_none = shift if scale is not None or shift.any() else None
        if dtype is None:
            wide_a, wide_b = (a * rows[:, None]).to(self._slots.dtype), (b * factor[:, None]).to(self._slots.dtype)
            return LinearAdapter(a=wide_a, b=wide_b.T.contiguous(), scale=scale, shift=shift_or_none)
        for what, matrix, factors in (("lora_A", a, rows), ("lora_B", b, factor)):
            if not (matrix.isfinite().all() and factors.isfinite().all()):
                self._infinite.append(f"{module}.{what}.weight")
        (a, rows), (b, factor) = narrowed(a, rows, dtype), narrowed(b, factor, dtype)
        return LinearAdapter(
            a=a, b=b.T.contiguous(), scale=scale, shift=shift_or_none, a_scale=rows, b_scale=factor
        )  # fmt: skip

    # Routed experts.

    def _stacked_experts(self, modules: dict[str, _Module]) -> dict[str, LinearAdapter]:
        """Adapters of stacked weights (PEFT's `target_parameters`), expert by expert. Their modules are taken out."""
        wrapped: dict[str, list[_Module]] = {}
        for module in list(modules.values()):
            name = module.name
            while name.endswith(".base_layer"):
                name = name.removesuffix(".base_layer")
            if self._config.parameters_of(name):
                module.widen()
                wrapped.setdefault(name, []).append(modules.pop(module.name))
        found: dict[str, LinearAdapter] = {}
        for name, layers in wrapped.items():
            # A module is wrapped for one parameter after the other, in its own order, which is gate and up before down:
            # the first one lies innermost.
            parameters = sorted(self._config.parameters_of(name), key=lambda own: own.startswith("down"))
            layers.sort(key=lambda module: -len(module.name))
            self._missing += [f"{name}.{own} (lora_A, lora_B)" for own in parameters[len(layers) :]]
            self._unknown += [module.name for module in layers[len(parameters) :]]
            for own, module in zip(parameters, layers, strict=False):
                self._pause()
                found |= self._stacked(f"{name}.{own}", module)
        return found

    def _stacked(self, parameter: str, module: _Module) -> dict[str, LinearAdapter]:
        """A [E r, I] and B [O, r E] of one stacked weight, as PEFT's ParamWrapper lays them out."""
        a, b, rank = (
            module.parts.get("lora_A.weight"),
            module.parts.get("lora_B.weight"),
            self._config.rank_of(parameter),
        )
        if a is None or b is None or len(module.parts) > 2:
            self._unknown += [f"{module.name}.{part}" for part in module.parts]
            return {}
        self._check_rank(rank, parameter)
        if a.ndim == b.ndim == 2 and len(a) % rank == 0 and b.shape[1] == len(a):
            num = len(a) // rank
            down, up = a.view(num, rank, -1), b.view(len(b), rank, num).permute(2, 0, 1)  # [E, r, I], [E, O, r]
            # PEFT takes weights for [E, O, I] unless their module says otherwise; some are not, and do not say so.
            for inputs, outputs in ((down, up), (up.mT, down.mT)):
                pieces = self._pieces(parameter, outputs) or {}
                if pieces and all(site.shape[1] == inputs.shape[2] for site, _ in pieces.values()):
                    return {
                        name: self._linear(parameter, site, inputs[site.expert or 0], piece)
                        for name, (site, piece) in pieces.items()
                    }
        self._wrong.append(
            f"{parameter}: lora_A is {list(a.shape)} and lora_B is {list(b.shape)}, which is not rank {rank} for each "
            "of its experts"
        )
        return {}

    def _experts(self, linears: dict[str, LinearAdapter]) -> dict[str, ExpertAdapter]:
        """What `linears` has for routed experts, which is taken out."""
        found = {}
        for name, site in self._slots.experts.items():
            roles = {"gate": site.gate, "up": site.up, "down": site.down}
            stacked = {
                role: stack_experts([linears.pop(each, None) for each in names]) for role, names in roles.items()
            }
            if any(part is not None for part in stacked.values()):
                found[name] = ExpertAdapter(**stacked)
        return found

    def _only_bias(self, site: LinearSite, bias: Tensor) -> LinearAdapter:
        _, own = site.base()
        dtype, (outputs, inputs) = self._slots.dtype, site.shape
        return LinearAdapter(
            a=torch.zeros(0, inputs, dtype=dtype),
            b=torch.zeros(0, outputs, dtype=dtype),
            shift=bias if own is None else bias - own.to(bias.device),
        )

    # The embedding and the LM head.

    def _table(self, module: _Module, shape: tuple[int, int], *, embedding: bool) -> TableAdapter:
        parts = dict(module.parts)
        weight = parts.pop("weight", parts.pop("base_layer.weight", None))
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        a, b = (parts.pop(name, None) for name in names)
        self._unknown += [f"{module.name}.{part}" for part in parts]
        if (a is None) != (b is None):
            self._missing.append(f"{module.name}.{names[0] if a is None else names[1]}")
            return TableAdapter()
        vocab_size, hidden = shape
        if weight is not None and tuple(weight.shape) != shape:
            self._wrong.append(f"{module.name}.weight is {list(weight.shape)}, should be {list(shape)}")
        dtype = self._slots.dtype
        if a is None or b is None:
            return TableAdapter(weight=None if weight is None else weight.to(dtype))
        rank = self._config.rank_of(module.name)
        ends = (vocab_size, hidden) if embedding else (hidden, vocab_size)
        if tuple(a.shape) != (rank, ends[0]) or tuple(b.shape) != (ends[1], rank):
            self._wrong.append(
                f"{module.name}: {names[0]} is {list(a.shape)} and {names[1]} is {list(b.shape)}, should be "
                f"{[rank, ends[0]]} and {[ends[1], rank]}"
            )
            return TableAdapter()
        return TableAdapter(
            weight=None if weight is None else weight.to(dtype),
            a=(a.T if embedding else a).to(dtype).contiguous(),
            b=(b * self._config.scaling_of(module.name)).T.to(dtype).contiguous(),
        )
