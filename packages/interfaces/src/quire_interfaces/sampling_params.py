"""How one request wants its tokens chosen. Names and meanings follow the OpenAI API and vLLM.

Knows ranges and contradictions; knows no tokenizer (token ids are checked against the vocabulary by the engine client).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Annotated, Any

from quire_interfaces.errors import RequestError, wrong_value
from quire_interfaces.number_range import NumberRange, number_fields
from quire_interfaces.sampling_bounds import MAX_TOKEN_ID, are_biases, are_token_ids, check_bounds
from quire_interfaces.structured_outputs import StructuredOutputsParams

__all__ = ["ALL_LOGPROBS", "EDIT_ENTRIES", "EDIT_PREFIX", "MAX_LOGPROBS", "MAX_LOGPROB_TOKEN_IDS", "SamplingParams"]

EDIT_ENTRIES, EDIT_PREFIX = 512, 7
"""Biases, forbidden words of several tokens and tokens that are forbidden for a while: so many of a request together,
and so many tokens before the last one of a word, fit where steps that are captured in graphs find them. Requests with
more are served kernel by kernel."""
ALL_LOGPROBS = -1
"""logprobs or prompt_logprobs of the whole vocabulary."""
MAX_LOGPROBS = 1 << 24
"""Largest number of logprobs and prompt_logprobs, which no vocabulary reaches; a server sets a bound of its own."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Largest number of logprob_token_ids."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Positional arguments come in vLLM's order.

    Order of application: structured_outputs, allowed_token_ids, bad words, minimum tokens, logit bias, penalties, DRY
    and top_n_sigma on the raw logits; then temperature (fixed or dynamic), min_p, top_k, top_p, typical_p and XTC; then
    a token is sampled. Mirostat takes the place of these five filters. temperature == 0 is greedy and ignores
    everything from top_n_sigma on.

    Raises:
        RequestError: with `param` set, when a value is out of range or two values contradict each other.
    """

    n: Annotated[int, NumberRange(1, 128)] = 1
    """Independent completions of the same prompt, 1 to 128."""
    presence_penalty: Annotated[float, NumberRange(-2, 2, edits_logits=True)] = 0.0
    """Subtracted once from the logit of each token in the output; -2 to 2."""
    frequency_penalty: Annotated[float, NumberRange(-2, 2, edits_logits=True)] = 0.0
    """Subtracted per occurrence from the logit of each token in the output; -2 to 2."""
    repetition_penalty: Annotated[float, NumberRange(0.01, 100)] = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output (CTRL, sec. 4.1); 0.01 to 100."""
    temperature: Annotated[float, NumberRange(0, 100)] = 1.0
    """0 to 100; 0 is greedy."""
    top_p: Annotated[float, NumberRange(0, 1, above=True)] = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: Annotated[int, NumberRange(-1, 2**31)] = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: Annotated[float, NumberRange(0, 1)] = 0.0
    """Keep tokens at least this likely relative to the most likely one; in [0, 1]."""
    seed: Annotated[int | None, NumberRange(-(2**63), 2**63 - 1)] = None
    """Same seed, same tokens, whatever else is in the batch; None takes a fresh one."""
    stop: tuple[str, ...] = ()
    """Strings that end the output, wherever token borders fall. One string, a list and None are taken, too."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    max_tokens: Annotated[int | None, NumberRange(0, 2**31)] = None
    """Most tokens to generate; None means up to the context's end. 0 scores the prompt, which may fill the context."""
    min_tokens: Annotated[int, NumberRange(0, 2**31)] = 0
    """No stop token (eos or stop_token_ids) is sampled before this many tokens."""
    logprobs: Annotated[int | None, NumberRange(ALL_LOGPROBS, MAX_LOGPROBS)] = None
    """Log probabilities of this many most likely tokens, and of the sampled one; 0 gives the sampled one only."""
    prompt_logprobs: Annotated[int | None, NumberRange(ALL_LOGPROBS, MAX_LOGPROBS)] = None
    """Log probabilities at each prompt token but the first: its own, and those of this many most likely tokens."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Log probabilities of these token ids, in their order, in place of the most likely ones; at most 128, whatever the
    server's bound on `logprobs`. `logprobs` is their number then, and may be left out."""
    _: KW_ONLY
    best_of: Annotated[int | None, NumberRange(1, 128)] = None
    """Compute this many completions and give the n of the largest probability; at least n. None computes n."""
    dry_multiplier: Annotated[float, NumberRange(0, 100, edits_logits=True)] = 0.0
    """Strength of DRY, which holds off repetitions of whole sequences; 0 switches it off."""
    dry_base: Annotated[float, NumberRange(1, 10)] = 1.75
    """The penalty grows by this factor with each token of the repeated sequence; at least 1."""
    dry_allowed_length: Annotated[int, NumberRange(1, 2**31)] = 2
    """Longest sequence, in tokens, that may be repeated without a penalty; at least 1."""
    dry_range: Annotated[int, NumberRange(0, 2**31, aliases=("dry_penalty_last_n",))] = 0
    """How many of the latest tokens DRY looks at; 0 looks at all."""
    dry_sequence_breakers: tuple[str | int, ...] = ("\n", ":", '"', "*")
    """Texts or token ids over which no sequence reaches. A text stands for the last token of "a" and the text."""
    top_n_sigma: Annotated[float, NumberRange(0, 1e6, off=-1)] = 0.0
    """Keep tokens whose logit is at most this many standard deviations below the largest; 0 or -1 keeps all."""
    dynatemp_range: Annotated[float, NumberRange(0, 100)] = 0.0
    """The temperature moves by as much up and down, with the entropy of the distribution; 0 fixes it."""
    dynatemp_exponent: Annotated[float, NumberRange(0, 100, above=True)] = 1.0
    """The entropy's share of its largest value is raised to this; above 0."""
    xtc_probability: Annotated[float, NumberRange(0, 1)] = 0.0
    """How likely XTC is to act on a token; in [0, 1]."""
    xtc_threshold: Annotated[float, NumberRange(0, 1)] = 0.1
    """Where XTC acts, all tokens of at least this probability but the least likely of them go; in [0, 1]."""
    typical_p: Annotated[float, NumberRange(0, 1, above=True)] = 1.0
    """Keep the tokens whose surprise is nearest to the entropy, the fewest that hold this probability; 1 keeps all."""
    mirostat_mode: Annotated[int, NumberRange(0, 2, aliases=("mirostat",))] = 0
    """1 and 2 are the versions of Mirostat, which steers the surprise of the output; 0 is off."""
    mirostat_tau: Annotated[float, NumberRange(0, 64, above=True)] = 5.0
    """The surprise per token to be held, in bits; above 0."""
    mirostat_eta: Annotated[float, NumberRange(0, 1, above=True)] = 0.1
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
        """Whether a repetition of the request samples the same tokens."""
        return self.seed is not None or self.temperature == 0

    def __post_init__(self) -> None:
        self._take_lists()
        check_bounds(self)
        for default, field, value in zip(_NUMBER_DEFAULTS, _NUMBERS, _number_values(self), strict=True):
            if value is not default:  # which it is in almost every field of a request
                field.check(value)
        if self.best_of is not None and self.best_of < self.n:
            raise wrong_value("best_of", self.best_of, f"be from {self.n} to 128")
        if self.deterministic and not self.repeatable:
            raise wrong_value("deterministic", True, "come with a seed or with temperature 0")
        self._check_max_tokens()
        self._check_token_lists()
        if self.logprob_token_ids is not None:
            self._check_logprob_token_ids(self.logprob_token_ids)
        self._check_stop()
        if self.structured_outputs is not None:
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
                raise wrong_value(name, value, "be a list")
            object.__setattr__(self, name, tuple(value or ()))

    def _check_logprob_token_ids(self, ids: tuple[int, ...]) -> None:
        if not 0 < len(ids) <= MAX_LOGPROB_TOKEN_IDS or len(set(ids)) < len(ids):
            raise RequestError(
                f"logprob_token_ids must name 1 to {MAX_LOGPROB_TOKEN_IDS} tokens, each once, got {len(ids)} of which "
                f"{len(set(ids))} differ",
                param="logprob_token_ids",
            )
        if self.logprobs is None:
            object.__setattr__(self, "logprobs", len(ids))
        elif self.logprobs != len(ids):
            raise wrong_value("logprobs", self.logprobs, f"be left out or {len(ids)}, the number of logprob_token_ids")

    def _check_max_tokens(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong_value("min_tokens", self.min_tokens, f"not exceed max_tokens ({self.max_tokens})")

    def _check_token_lists(self) -> None:
        biases = self.logit_bias or {}
        if not (are_token_ids(biases) and are_biases(biases.values())):
            for token_id, bias in biases.items():
                _TOKEN_IDS.check("logit_bias", token_id, whole=True)
                _BIASES.check("logit_bias", bias, whole=False)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise wrong_value("allowed_token_ids", [], "name at least one token; leave it out to allow all")
        for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            ids = getattr(self, name) or ()
            if not are_token_ids(ids):
                for token_id in ids:
                    _TOKEN_IDS.check(name, token_id, whole=True)
        for breaker in self.dry_sequence_breakers:
            if not isinstance(breaker, str):
                _TOKEN_IDS.check("dry_sequence_breakers", breaker, whole=True)
            elif breaker == "":
                raise wrong_value("dry_sequence_breakers", breaker, "hold non-empty texts or token ids")
        for words in self.bad_words_token_ids:
            if isinstance(words, (str, int)) or len(words) == 0:
                raise wrong_value("bad_words_token_ids", words, "hold sequences of token ids, none of them empty")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise wrong_value("bad_words", word, "hold words, not only white space")

    def _check_stop(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or text == "":
                raise wrong_value("stop", text, "hold non-empty strings")
        if self.stop and not self.detokenize:
            raise wrong_value("stop", list(self.stop), "be left out when detokenize is false; use stop_token_ids")

    def _check_structured_outputs(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise wrong_value("structured_outputs", self.structured_outputs, "be StructuredOutputsParams")
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


_NUMBERS = number_fields(SamplingParams)
_NUMBER_DEFAULTS = tuple(field.default for field in _NUMBERS)
_number_values = attrgetter(*(field.name for field in _NUMBERS))
_TOKEN_IDS = NumberRange(0, MAX_TOKEN_ID)
_BIASES = NumberRange(-100, 100)
