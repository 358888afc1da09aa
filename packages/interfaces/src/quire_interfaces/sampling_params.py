"""How one request wants its tokens chosen. Names and meanings follow the OpenAI API and vLLM.

Knows ranges and contradictions; knows no tokenizer (token ids are checked against the vocabulary by the engine client).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any

from quire_interfaces.errors import RequestError
from quire_interfaces.sampling_bounds import MAX_TOKEN_ID, are_biases, are_token_ids, check_bounds
from quire_interfaces.structured_outputs import StructuredOutputsParams

__all__ = ["ALL_LOGPROBS", "MAX_LOGPROBS", "MAX_LOGPROB_TOKEN_IDS", "SamplingParams"]

ALL_LOGPROBS = -1
"""logprobs or prompt_logprobs of the whole vocabulary."""
MAX_LOGPROBS = 1 << 24
"""Largest number of logprobs and prompt_logprobs, which no vocabulary reaches; a server sets a bound of its own."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Largest number of logprob_token_ids."""


_EXTRA_RANGES = (
    ("dry_multiplier", 0, 100),
    ("dry_base", 1, 10),
    ("top_n_sigma", -1, 1e6),
    ("dynatemp_range", 0, 100),
    ("dynatemp_exponent", 0, 100),
    ("xtc_probability", 0, 1),
    ("xtc_threshold", 0, 1),
    ("mirostat_tau", 0, 64),
    ("mirostat_eta", 0, 1),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Positional arguments come in vLLM's order.

    Order of application: structured_outputs, allowed_token_ids, bad words, minimum tokens, logit bias, penalties, DRY
    and top_n_sigma on the raw logits; then temperature (fixed or dynamic), min_p, top_k, top_p, XTC; then the draw.
    Mirostat takes the place of min_p, top_k, top_p and XTC. temperature == 0 is greedy and ignores everything from
    top_n_sigma on.

    Raises:
        RequestError: with `param` set, when a value is out of range or two values contradict each other.
    """

    n: int = 1
    """Independent completions of the same prompt, 1 to 128."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of each token in the output; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output (CTRL, sec. 4.1); 0.01 to 100."""
    temperature: float = 1.0
    """0 to 100; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; in [0, 1]."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch; None draws a fresh one."""
    stop: tuple[str, ...] = ()
    """Strings that end the output, wherever token borders fall. One string, a list and None are taken, too."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    max_tokens: int | None = None
    """Most tokens to generate; None means up to the context's end. 0 scores the prompt, which may fill the context."""
    min_tokens: int = 0
    """No stop token (eos or stop_token_ids) is sampled before this many tokens."""
    logprobs: int | None = None
    """Log probabilities of this many most likely tokens, and of the sampled one; 0 gives the sampled one only."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Log probabilities of these token ids, in their order, in place of the most likely ones; at most 128, whatever the
    server's bound on `logprobs`. `logprobs` is their number then, and may be left out."""
    _: KW_ONLY
    best_of: int | None = None
    """Compute this many completions and give the n of the largest probability; at least n. None computes n."""
    dry_multiplier: float = 0.0
    """Strength of DRY, which holds off repetitions of whole sequences; 0 switches it off."""
    dry_base: float = 1.75
    """The penalty grows by this factor with each token of the repeated sequence; at least 1."""
    dry_allowed_length: int = 2
    """Longest sequence, in tokens, that may be repeated without a penalty; at least 1."""
    dry_range: int = 0
    """How many of the latest tokens DRY looks at; 0 looks at all."""
    dry_sequence_breakers: tuple[str | int, ...] = ("\n", ":", '"', "*")
    """Texts or token ids over which no sequence reaches. A text stands for the last token of "a" and the text."""
    top_n_sigma: float = 0.0
    """Keep tokens whose logit is at most this many standard deviations below the largest; 0 or -1 keeps all."""
    dynatemp_range: float = 0.0
    """The temperature moves by as much up and down, with the entropy of the distribution; 0 fixes it."""
    dynatemp_exponent: float = 1.0
    """The entropy's share of its largest value is raised to this; above 0."""
    xtc_probability: float = 0.0
    """How likely XTC is to act on a token; in [0, 1]."""
    xtc_threshold: float = 0.1
    """Where XTC acts, all tokens of at least this probability but the least likely of them go; in [0, 1]."""
    mirostat_mode: int = 0
    """1 and 2 are the versions of Mirostat, which steers the surprise of the output; 0 is off."""
    mirostat_tau: float = 5.0
    """The surprise per token to be held, in bits; above 0."""
    mirostat_eta: float = 0.1
    """How fast Mirostat learns; above 0, at most 1."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; each -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these token ids may be sampled; not empty."""
    bad_words: tuple[str, ...] = ()
    """Words that may not be generated, at the start of a line or after a space."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not be completed."""
    include_stop_str_in_output: bool = False
    """Keep the stop string (or the stop token's text) in the output."""
    deterministic: bool = False
    """Refuse the request where another run of it could round differently. Needs a seed, or temperature 0."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Produce text; off for token-only clients (stop strings then cannot be used)."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form the output must have: a JSON schema, a pattern, a grammar, ..."""
    extra_args: dict[str, Any] | None = None
    """For custom logits processors; the engine does not look inside."""

    @property
    def repeatable(self) -> bool:
        """Nothing is drawn that a repetition would not draw again."""
        return self.seed is not None or self.temperature == 0

    def __post_init__(self) -> None:
        self._take_lists()
        check_bounds(self)
        _range("n", self.n, 1, 128, whole=True)
        if self.best_of is not None:
            _range("best_of", self.best_of, self.n, 128, whole=True)
        _range("temperature", self.temperature, 0, 100)
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise _wrong("top_p", self.top_p, "be above 0 and at most 1")
        _range("top_k", self.top_k, -1, 2**31, whole=True)
        _range("min_p", self.min_p, 0, 1)
        _range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _range("presence_penalty", self.presence_penalty, -2, 2)
        _range("frequency_penalty", self.frequency_penalty, -2, 2)
        _range("min_tokens", self.min_tokens, 0, 2**31, whole=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _range(name, getattr(self, name), ALL_LOGPROBS, MAX_LOGPROBS, whole=True)
        if self.seed is not None:
            _range("seed", self.seed, -(2**63), 2**63 - 1, whole=True)
        if self.deterministic and not self.repeatable:
            raise _wrong("deterministic", True, "come with a seed or with temperature 0")
        self._check_extras()
        self._check_max_tokens()
        self._check_token_lists()
        self._check_logprob_token_ids()
        self._check_stop()
        self._check_structured_outputs()

    def _take_lists(self) -> None:
        """One string as a list of one, None as none, lists as tuples."""
        for name in ("stop", "bad_words"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
        optional = ("allowed_token_ids", "logprob_token_ids")
        for name in ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids", *optional):
            value = getattr(self, name)
            if isinstance(value, tuple) or (value is None and name in optional):
                continue
            if value is not None and (isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable)):
                raise _wrong(name, value, "be a list")
            object.__setattr__(self, name, tuple(value or ()))

    def _check_logprob_token_ids(self) -> None:
        ids = self.logprob_token_ids
        if ids is None:
            return
        if not 0 < len(ids) <= MAX_LOGPROB_TOKEN_IDS or len(set(ids)) < len(ids):
            raise RequestError(
                f"logprob_token_ids must name 1 to {MAX_LOGPROB_TOKEN_IDS} tokens, each once, got {len(ids)} of which "
                f"{len(set(ids))} differ",
                param="logprob_token_ids",
            )
        if self.logprobs is None:
            object.__setattr__(self, "logprobs", len(ids))
        elif self.logprobs != len(ids):
            raise _wrong("logprobs", self.logprobs, f"be left out or {len(ids)}, the number of logprob_token_ids")

    def _check_extras(self) -> None:
        if _extras(self) == _NO_EXTRAS:
            return
        for name, low, high in _EXTRA_RANGES:
            _range(name, getattr(self, name), low, high)
        for name, low in (("dry_allowed_length", 1), ("dry_range", 0)):
            _range(name, getattr(self, name), low, 2**31, whole=True)
        for name in ("dynatemp_exponent", "mirostat_tau", "mirostat_eta"):
            if getattr(self, name) <= 0:
                raise _wrong(name, getattr(self, name), "be above 0")
        if self.top_n_sigma < 0 and self.top_n_sigma != -1:
            raise _wrong("top_n_sigma", self.top_n_sigma, "be at least 0; 0 or -1 switches it off")
        _range("mirostat_mode", self.mirostat_mode, 0, 2, whole=True)
        for breaker in self.dry_sequence_breakers:
            if isinstance(breaker, str):
                if breaker == "":
                    raise _wrong("dry_sequence_breakers", breaker, "hold non-empty texts or token ids")
            else:
                _range("dry_sequence_breakers", breaker, 0, 2**31, whole=True)

    def _check_max_tokens(self) -> None:
        if self.max_tokens is None:
            return
        _range("max_tokens", self.max_tokens, 0, 2**31, whole=True)
        if self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"not exceed max_tokens ({self.max_tokens})")

    def _check_token_lists(self) -> None:
        biases = self.logit_bias or {}
        if not (are_token_ids(biases) and are_biases(biases.values())):
            for token_id, bias in biases.items():
                _range("logit_bias", token_id, 0, MAX_TOKEN_ID, whole=True)
                _range("logit_bias", bias, -100, 100)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise _wrong("allowed_token_ids", [], "name at least one token; leave it out to allow all")
        for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            ids = getattr(self, name) or ()
            if not are_token_ids(ids):
                for token_id in ids:
                    _range(name, token_id, 0, MAX_TOKEN_ID, whole=True)
        for words in self.bad_words_token_ids:
            if isinstance(words, (str, int)) or len(words) == 0:
                raise _wrong("bad_words_token_ids", words, "hold sequences of token ids, none of them empty")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise _wrong("bad_words", word, "hold words, not only white space")

    def _check_stop(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or text == "":
                raise _wrong("stop", text, "hold non-empty strings")
        if self.stop and not self.detokenize:
            raise _wrong("stop", list(self.stop), "be left out when detokenize is false; use stop_token_ids")

    def _check_structured_outputs(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise _wrong("structured_outputs", self.structured_outputs, "be StructuredOutputsParams")
        if self.min_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) cannot be combined with structured_outputs, which alone say when the "
                "output may end; leave it out, or ask for a minimal length in the schema or pattern",
                param="min_tokens",
                code="unsupported_combination",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


_extras = attrgetter(
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_sequence_breakers", "top_n_sigma",
    "dynatemp_range", "dynatemp_exponent", "xtc_probability", "xtc_threshold", "mirostat_mode", "mirostat_tau",
    "mirostat_eta",
)  # fmt: skip
_NO_EXTRAS = (0.0, 1.75, 2, 0, ("\n", ":", '"', "*"), 0.0, 0.0, 1.0, 0.0, 0.1, 0, 5.0, 0.1)
"""What almost every request has; a test holds it to the fields' defaults."""


def _wrong(param: str, value: Any, must: str) -> RequestError:
    return RequestError(f"{param} must {must}, got {reprlib.repr(value)}", param=param)


def _number(param: str, value: Any) -> float:
    # Whole numbers are finite; isfinite would overflow on those that no float holds.
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not is_number:
        raise _wrong(param, value, "be a finite number")
    number: float = value
    return number


def _range(param: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    if whole and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong(param, value, "be a whole number")
    if not low <= _number(param, value) <= high:
        raise _wrong(param, value, f"be from {low} to {high}")
