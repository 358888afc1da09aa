"""What an operator may set about speculative decoding. The names are vLLM's (`--speculative-config`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import ConfigError, Drafter, Settings, between, one_of, setting
from quire_spec_decode.ngram import NgramDrafter

__all__ = ["SpecDecodeConfig", "make_drafter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeConfig(Settings):
    """Speculative decoding of a served model."""

    method: str = setting(
        "none",
        help="How draft tokens are found: none, or ngram (look the last tokens up in the request's own text).",
        check=one_of("none", "ngram"),
        flag="--speculative-method",
    )
    num_speculative_tokens: int = setting(
        4, help="Most draft tokens per request and step.", unit="tokens", check=between(1, 64)
    )
    prompt_lookup_min: int = setting(
        2, help="Shortest n-gram that counts as a match (method ngram).", unit="tokens", check=between(1, 64)
    )
    prompt_lookup_max: int = setting(
        4, help="Longest n-gram that is looked up, tried first (method ngram).", unit="tokens", check=between(1, 64)
    )

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number, got {value!r}", field=name)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min must not exceed prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}",
                field="prompt_lookup_min",
            )


def make_drafter(config: SpecDecodeConfig) -> Drafter | None:
    """The drafter that `config` asks for; None for method "none"."""
    if config.method == "none":
        return None
    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
