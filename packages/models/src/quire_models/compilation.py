"""torch.compile for networks that run through Transformers: what may be asked for, and doing it.

The settings are plain data and read without torch; only `compile_network` imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire_interfaces import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quire_models.transformers_backend.model import TransformersLM

__all__ = ["COMPILATION_BACKENDS", "compilation_backend", "compile_network", "complaint_about"]

COMPILATION_BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of torch.compile that may be asked for; the first is the default. The others look for errors."""

_MODES = {0: False, "NONE": False, 1: True, "STOCK_TORCH_COMPILE": True}
"""Of vLLM's modes those that mean here what they mean there -> whether anything is compiled. 2 and 3 are passes of
vLLM's own."""

_IMPLEMENTATION = "quire_uncompiled"
"""Name, in Transformers' table, of Quire's attention where the network around it is compiled."""


def complaint_about(values: Any) -> str | None:
    """What a `compilation_config` must be and is not, as the end of "compilation_config must ..."; None if it is."""
    if not isinstance(values, Mapping):
        return "be a table with mode and backend"
    if values.keys() - {"mode", "backend"}:
        return "have no keys but mode and backend"
    mode = values.get("mode", 1)
    if isinstance(mode, bool) or not isinstance(mode, (int, str)) or mode not in _MODES:
        return f"have one of {', '.join(map(str, _MODES))} as mode"
    if values.get("backend", COMPILATION_BACKENDS[0]) not in COMPILATION_BACKENDS:
        return f"have one of {', '.join(COMPILATION_BACKENDS)} as backend"
    return None


def compilation_backend(values: Mapping[str, Any] | None) -> str | None:
    """The backend of torch.compile that a valid `compilation_config` asks for; None where nothing is compiled."""
    if values is None or not _MODES[values.get("mode", 1)]:
        return None
    return str(values.get("backend", COMPILATION_BACKENDS[0]))


def compile_network(network: TransformersLM, backend: str) -> None:
    """Compile the layers of a loaded network, in place, and run one token through it.

    Attention stays as it is: it reads lengths on the host and asks each layer for its number, for which torch would
    compile every layer anew. The number of tokens is a symbol, so that steps of one token and steps of several are the
    two shapes that are compiled.

    Args:
        network: Loaded, without adapters.
        backend: One of `COMPILATION_BACKENDS`.

    Raises:
        ConfigError: The network does not compile, or not run when it is compiled.
    """
    import torch
    import transformers

    from quire_models.transformers_backend import model as backend_module

    uncompiled: Any = torch.compiler.disable(backend_module.paged_attention)
    transformers.AttentionInterface.register(_IMPLEMENTATION, uncompiled)
    transformers.AttentionMaskInterface.register(_IMPLEMENTATION, backend_module._no_mask)
    try:
        network._model.set_attn_implementation(_IMPLEMENTATION)
        network._body.compile(backend=backend, dynamic=True)
        network._try()
    except (CheckpointError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{network.config.architecture} does not run when {backend} has compiled it; leave compilation_config out "
            f"(or give -O0): {error}",
            field="compilation_config",
        ) from error
