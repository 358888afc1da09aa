"""What an operator may set about structured output. Flags carry vLLM's manner of naming."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Settings, at_least, between, one_of, setting

__all__ = ["StructuredOutputConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputConfig(Settings):
    """Constraints on the form of outputs: which library, and what one request may cost the others."""

    backend: str = setting(
        "auto",
        help="Library that turns schemas, patterns and grammars into token masks; auto takes llguidance.",
        check=one_of("auto", "llguidance", "outlines"),
        flag="--structured-output-backend",
    )
    timeout_s: float = setting(
        5.0,
        help="A schema, pattern or grammar that is not compiled within this time is refused.",
        unit="seconds",
        check=between(0.05, 600),
        flag="--structured-output-timeout",
    )
    max_bytes: int = setting(
        1 << 18,
        help="Largest schema, pattern or grammar, as text and as it is sent; a larger one is refused at once.",
        unit="bytes",
        check=at_least(64),
        flag="--structured-output-max-bytes",
    )
    cache_size: int = setting(
        256,
        help="Compiled grammars that are kept for further requests with the same content.",
        unit="grammars",
        check=at_least(1),
        flag="--structured-output-cache-size",
    )
    num_workers: int = setting(
        2,
        help="Threads that compile, at low priority, beside the engine's loop; as many again for what takes long, "
        "and half as many for what takes longest.",
        unit="threads",
        check=between(1, 64),
        flag="--structured-output-workers",
    )
    max_jump_tokens: int = setting(
        32,
        help="Most tokens computed in one step where the grammar leaves no choice of text; 0 samples each of them.",
        unit="tokens",
        check=between(0, 64),
        flag="--structured-output-max-jump-tokens",
    )
