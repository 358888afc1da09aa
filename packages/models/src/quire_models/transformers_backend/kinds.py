"""Which kind of network the backend makes of a config.json. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.pooling_decoder import fallback_body_spec
from quire_models.pooling_heads import HeadKind
from quire_models.spec import NetworkSpec, recast
from quire_models.transformers_backend.config import FallbackSpec, fallback_spec
from quire_models.transformers_backend.recurrent_config import STATES, recurrent_spec

__all__ = ["CAUSAL", "RemoteSpec", "backend_spec"]

CAUSAL = "AutoModelForCausalLM"
"""Key of `auto_map` whose class continues texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSpec(FallbackSpec):
    """Of a network whose code comes with the checkpoint."""

    brings_code: ClassVar[bool] = True
    built_by: ClassVar[str] = "quire_models.transformers_backend.remote:RemoteCodeLM"


def backend_spec(
    config: Fields, head: HeadKind | None, *, is_renamed: bool = False, trust_remote_code: bool = False
) -> NetworkSpec:
    """The network of a config.json that Transformers runs.

    Args:
        head: What the class has in place of an LM head; None for an LM head.
        is_renamed: Transformers has the class under another name.
        trust_remote_code: Code that the checkpoint brings may be run, where Transformers has no class of its name.

    Raises:
        CheckpointError: A field that is missing, wrong, or of a mechanism that is not run; code that may not be run.
    """
    code = config.get("auto_map")
    if code is not None and (is_renamed or _transformers_has(config.get("architectures"))):
        code = None
    plain = config.named(auto_map="-")
    if code is not None and not trust_remote_code:
        raise CheckpointError(
            f"{config.source}: the network is code of its own that comes with the checkpoint (auto_map), which runs "
            "with --trust-remote-code (trust_remote_code=True) alone; read that code first: it can do whatever you can"
        )
    if code is not None:
        if head is not None or not isinstance(code, dict) or not _is_name(code.get(CAUSAL)):
            raise CheckpointError(
                f"{config.source}: auto_map must name a file of this folder and a class for {CAUSAL}, as "
                f"'modeling_x.XForCausalLM', is {code!r}"
            )
        return recast(RemoteSpec, fallback_spec(plain))
    if head is not None:
        return fallback_body_spec(plain, head)
    if config.get("model_type") in STATES:
        return recurrent_spec(plain)
    return fallback_spec(plain)


def _transformers_has(names: object) -> bool:
    """Whether the installed Transformers has a class of one of these names. Imports no network."""
    try:
        import transformers
    except ImportError:
        return False
    return isinstance(names, list) and not set(dir(transformers)).isdisjoint(map(str, names))


def _is_name(name: object) -> bool:
    """Whether it is "module.Class" of the folder itself; "repository--module.Class" would be fetched."""
    return isinstance(name, str) and "--" not in name and name.count(".") == 1
