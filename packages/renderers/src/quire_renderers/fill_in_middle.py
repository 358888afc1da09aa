"""Fill in the middle: how a model that was trained for it is told what stands before and behind a gap.

Knows the marker tokens by which families of models do it, as their model cards show them, and finds the family by the
tokenizer's vocabulary. Knows nothing of a model that does it with plain text.
"""

from __future__ import annotations

from typing import NamedTuple

from quire_interfaces import RequestError, Tokenizer

__all__ = ["FillInMiddle"]


class FillInMiddle(NamedTuple):
    """One family's markers. `suffix_first` is the order suffix, prefix; else prefix, suffix."""

    prefix: str
    suffix: str
    middle: str
    """Ends the prompt; empty where the last part does that itself."""
    suffix_first: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillInMiddle | None:
        """The family whose markers this tokenizer has, each as one token; None for none."""
        return next((each for each in _FAMILIES if each._is_known(tokenizer)), None)

    def prompt(self, before: str, behind: str) -> str:
        """The prompt that asks for what stands between two texts.

        Raises:
            RequestError: a text holds a marker, so that it could not be told where the gap is.
        """
        for name, text in (("prompt", before), ("suffix", behind)):
            for marker in filter(None, (self.prefix, self.suffix, self.middle)):
                if marker in text:
                    raise RequestError(
                        f"{name} holds {marker!r}, which marks the parts of a text with a gap; leave it out, or send "
                        "the whole prompt in the model's own format without suffix",
                        param=name,
                    )
        if self.suffix_first:
            return f"{self.suffix}{behind}{self.prefix}{before}{self.middle}"
        return f"{self.prefix}{before}{self.suffix}{behind}{self.middle}"

    def _is_known(self, tokenizer: Tokenizer) -> bool:
        return all(
            len(tokenizer.encode(marker, add_special_tokens=False)) == 1
            for marker in (self.prefix, self.suffix, self.middle)
            if marker
        )


_FAMILIES = (
    FillInMiddle("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3, CodeGemma, Granite 4
    FillInMiddle("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StableCode, Granite
    FillInMiddle("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInMiddle("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, DeepSeek-V3
    FillInMiddle("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4, CodeGeeX4
    FillInMiddle("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    FillInMiddle("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
    FillInMiddle("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
