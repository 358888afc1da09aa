"""What the config.json of an MLP speculator says. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields, read_json
from quire_models.config import ModelConfig
from quire_models.config_fields import DTYPE_BYTES
from quire_models.draft_heads.target_values import values_of_target
from quire_models.spec import NetworkSpec

__all__ = ["MLPSpeculatorConfig", "read_mlp_speculator_config"]

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpeculatorSpec(NetworkSpec):
    """Heads keep nothing, so that there are no layers."""

    built_by: ClassVar[str] = "quire_models.draft_heads.mlp_speculator:MLPSpeculator"


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpeculatorConfig(ModelConfig):
    """The heads of a target, whose hidden size and vocabulary they have. `num_layers` is 0: they keep nothing."""

    num_heads_ahead: int
    """`n_predict`: head i (from 0) predicts the token i + 1 behind the last known one."""
    inner_size: int
    """`inner_dim`: width of the state that the heads hand on."""
    has_tied_heads: bool
    """`tie_weights`: all heads share embedding, norm and LM head, and all but the first their projection."""
    scales_input: bool
    """`scale_input`: the hidden state of the target is normalised first, and divided by the square root of 2."""

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all heads."""
        inner, heads = self.inner_size, self.num_heads_ahead
        tables = 2 * self.vocab_size * inner + 2 * inner
        later = min(heads - 1, 1) if self.has_tied_heads else heads - 1
        projections = self.hidden_size * inner + later * inner * inner
        return (tables * (1 if self.has_tied_heads else heads) + projections) * DTYPE_BYTES[dtype]


def read_mlp_speculator_config(folder: str | Path, target: ModelConfig) -> MLPSpeculatorConfig:
    """Read the config.json of an MLP speculator for `target`.

    Raises:
        CheckpointError: No such file, a drafter of another kind, a field that is missing or wrong, or heads for a model
            of other sizes.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is no folder of an MLP speculator")
    config = Fields(read_json(path), str(path))
    names = config.get("architectures")
    if names != [ARCHITECTURE] and config.get("model_type") != "mlp_speculator":
        raise CheckpointError(
            f"{path} is not the configuration of an MLP speculator (architectures {ARCHITECTURE}), but of {names!r}"
        )
    for name, field, ours in (
        ("vocabulary", "vocab_size", target.vocab_size),
        ("hidden size", "emb_dim", target.hidden_size),
    ):
        theirs = config.integer(field, minimum=1)
        if theirs != ours:
            raise CheckpointError(
                f"{path}: the speculator is for a model whose {name} is {theirs} ({field}), this one's is {ours}"
            )
    return MLPSpeculatorConfig(
        **values_of_target(target, "MLPSpeculator", MLPSpeculatorSpec),
        num_heads_ahead=config.integer("n_predict", minimum=1),
        inner_size=config.integer("inner_dim", default=0, minimum=0) or target.hidden_size,
        has_tied_heads=config.flag("tie_weights", default=False),
        scales_input=config.flag("scale_input", default=False),
    )
