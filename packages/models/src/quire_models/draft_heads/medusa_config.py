"""What the config.json of Medusa heads says. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields, read_json
from quire_models.config import ModelConfig
from quire_models.config_fields import DTYPE_BYTES
from quire_models.draft_heads.target_values import values_of_target
from quire_models.spec import NetworkSpec

__all__ = ["MedusaConfig", "read_medusa_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec(NetworkSpec):
    """Heads keep nothing, so that there are no layers."""

    built_by: ClassVar[str] = "quire_models.draft_heads.medusa:MedusaHeads"


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(ModelConfig):
    """The heads of a target, of whose sizes they are. `num_layers` is 0: they keep nothing."""

    medusa_heads: int
    """Head i (from 0) says the token i + 2 behind the last one that was computed."""
    medusa_layers: int
    """Residual blocks of a head."""

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all heads."""
        block = self.hidden_size * (self.hidden_size + 1)
        of_head = self.medusa_layers * block + self.vocab_size * self.hidden_size
        return self.medusa_heads * of_head * DTYPE_BYTES[dtype]


def read_medusa_config(folder: str | Path, target: ModelConfig) -> MedusaConfig:
    """Read the config.json of heads for `target`: its own names (`medusa_num_heads`, `medusa_num_layers`), or those of
    converted ones (`num_heads`, `num_hidden_layers`).

    Raises:
        CheckpointError: No such file, a field that is missing or wrong, or heads for another vocabulary.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is no folder of Medusa heads")
    config = Fields(read_json(path), str(path))
    own = config.get("medusa_num_heads") is not None
    heads = config.integer("medusa_num_heads" if own else "num_heads", minimum=1)
    layers = config.integer("medusa_num_layers" if own else "num_hidden_layers", default=1, minimum=1)
    for name, ours in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        theirs = config.integer(name, default=ours, minimum=1)
        if theirs != ours:
            raise CheckpointError(f"{path}: the heads are for a model whose {name} is {theirs}, this one's is {ours}")
    if config.integer("truncated_vocab_size", default=target.vocab_size, minimum=1) != target.vocab_size:
        raise CheckpointError(f"{path}: heads for a part of the vocabulary (truncated_vocab_size) are not read")
    values = values_of_target(target, "MedusaHeads", MedusaSpec)
    return MedusaConfig(**values, medusa_heads=heads, medusa_layers=layers)
