"""What torch.compile goes with. Decided from the settings and config.json, before anything is loaded."""

from __future__ import annotations

from quire.adapters import takes_adapters
from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_models.compilation import compilation_backend
from quire_models.config import ModelConfig
from quire_models.named_formats import resolved_linear_method

__all__ = ["chosen_compilation"]


def chosen_compilation(config: QuireConfig, model: ModelConfig) -> str | None:
    """The backend of torch.compile for a model; None where nothing is compiled, as by default.

    Raises:
        ConfigError: The network is Quire's own, or something else is set that compiled networks do not go with.
    """
    backend = compilation_backend(config.model.compilation_config)
    if backend is not None:
        _check_compilation(config, model)
    return backend


def _check_compilation(config: QuireConfig, model: ModelConfig) -> None:
    """Raises as `chosen_compilation`."""
    if model.is_native:
        raise ConfigError(
            f"compilation_config compiles networks that run through Transformers, but {model.architecture} is one of "
            "Quire's own, whose ops are compiled already; leave it out (or give -O0)",
            field="compilation_config",
        )
    if takes_adapters(config):
        raise ConfigError(
            "compilation_config does not go with adapters, which change from step to step; leave it out (or give -O0), "
            "or switch enable_lora off",
            field="compilation_config",
        )
    if model.quantization is not None or resolved_linear_method(config.model.quantization, model) != "plain":
        raise ConfigError(
            "compilation_config does not go with quantized weights, which Quire's own ops multiply with; leave it out "
            "(or give -O0), or serve the unquantized weights",
            field="compilation_config",
        )
