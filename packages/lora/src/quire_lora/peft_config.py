"""`PeftConfig`: what adapter_config.json says, checked. Free of torch.

Knows the fields of PEFT's `LoraConfig` (PEFT 0.21, `peft.tuners.lora.config`), which of them matter when an adapter is
applied, and which ask for what is not done here. Does not know weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, Fields, read_json

__all__ = ["PeftConfig"]

TRAINING_FIELDS = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config fan_in_fan_out inference_mode layers_pattern "
    "lora_dropout lora_ga_config loftq_config megatron_config megatron_core peft_type peft_version qalora_group_size "
    "revision runtime_config task_type velora_config".split()
)
"""Fields that say how an adapter was made, not how it is applied, or (`layers_pattern`) what layers are called, whose
numbers are known here."""

CONVERTED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that change the network's own weights: what is added to the published ones is something else then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """How an adapter is applied."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    target_modules: str | tuple[str, ...] = ()
    """A pattern for whole names, "all-linear", or names and ends of names."""
    exclude_modules: str | tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    """Ends of names of stacked weights, such as experts.gate_up_proj."""
    modules_to_save: tuple[str, ...] = ()
    layers_to_transform: frozenset[int] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> PeftConfig:
        """Read adapter_config.json.

        Raises:
            CheckpointError: it is missing, broken, of another kind of adapter, or asks for what is not done here.
        """
        path = folder / "adapter_config.json"
        if not path.is_file():
            raise CheckpointError(f"{str(folder)!r} has no adapter_config.json, so it is no adapter in PEFT's format")
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "adapter_config.json") -> PeftConfig:
        """As `from_folder`, from the parsed file."""
        fields = Fields(values, source)
        kind = fields.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(f"{source}: peft_type is {kind!r}; only LORA adapters are served")
        fields.skip(*TRAINING_FIELDS)
        config = cls._checked(fields, source)
        start = fields.get("init_lora_weights")
        fields.refuse_unread("merge the adapter into its model with PEFT, or train it without")
        if isinstance(start, str) and start.lower().startswith(CONVERTED_INITS):
            raise CheckpointError(
                f"{source}: init_lora_weights is {start!r}, which changes the network's own weights; convert the "
                "adapter with PEFT (path_initial_model_for_weight_conversion)"
            )
        return config

    @classmethod
    def _checked(cls, values: Fields, source: str) -> PeftConfig:
        def patterns(name: str) -> dict[str, float]:
            found = values.get(name) or {}
            if not isinstance(found, dict) or not all(_is_positive(value) for value in found.values()):
                raise CheckpointError(f"{source}: {name} must map names to numbers above 0, got {found!r}")
            return found

        def names(name: str) -> str | tuple[str, ...]:
            found = values.get(name) or ()
            if isinstance(found, str):
                _check_pattern(found, name, source)
                return found
            if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
                raise CheckpointError(f"{source}: {name} must be a name or a list of names, got {found!r}")
            return tuple(found)

        rank, alpha = values.get("r"), values.get("lora_alpha")
        alpha = 8 if alpha is None else alpha
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise CheckpointError(f"{source}: r must be a whole number of at least 1, got {rank!r}")
        if not _is_positive(alpha):
            raise CheckpointError(f"{source}: lora_alpha must be a number above 0, got {alpha!r}")
        bias = values.get("bias") or "none"
        if bias not in ("none", "all", "lora_only"):
            raise CheckpointError(f"{source}: bias must be none, all or lora_only, got {bias!r}")
        saved, layers = names("modules_to_save"), values.get("layers_to_transform")
        parameters = names("target_parameters")
        return cls(
            r=rank,
            lora_alpha=alpha,
            use_rslora=bool(values.get("use_rslora")),
            use_dora=bool(values.get("use_dora")),
            lora_bias=bool(values.get("lora_bias")),
            bias=bias,
            target_modules=names("target_modules"),
            exclude_modules=names("exclude_modules"),
            target_parameters=(parameters,) if isinstance(parameters, str) else parameters,
            modules_to_save=(saved,) if isinstance(saved, str) else saved,
            layers_to_transform=None if layers is None else frozenset([layers] if isinstance(layers, int) else layers),
            rank_pattern={name: int(value) for name, value in patterns("rank_pattern").items()},
            alpha_pattern=patterns("alpha_pattern"),
        )

    def rank_of(self, module: str) -> int:
        """Rank of a module by its full name."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scaling_of(self, module: str) -> float:
        """Factor of what is added: alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023)."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def parameters_of(self, module: str) -> list[str]:
        """Which parameters of a module, by their own names, are in the adapter."""
        return sorted({name.rpartition(".")[2] for name in self.target_parameters if _is_of(module, name)})

    def targets(self, module: str, layer: int | None) -> bool:
        """Whether a linear layer of this full name, in this decoder layer, should be in the adapter."""
        if layer is not None and self.layers_to_transform is not None and layer not in self.layers_to_transform:
            return False
        if _matches(self.exclude_modules, module):
            return False
        if self.target_modules == "all-linear":
            return layer is not None
        return _matches(self.target_modules, module)


def _matches(wanted: str | tuple[str, ...], module: str) -> bool:
    if isinstance(wanted, str):
        return bool(wanted) and re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _is_of(module: str, parameter: str) -> bool:
    """Whether a module "a.b" may have a parameter "b.c"."""
    end = parameter.rpartition(".")[0]
    return not end or f".{module}".endswith(f".{end}")


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_pattern(pattern: str, name: str, source: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{source}: {name} is no regular expression: {error}") from None
