"""What an operator may set about speculative decoding. The names are vLLM's (`--speculative-config`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import ConfigError, Drafter, RequestDrafter, Settings, at_least, between, one_of, setting
from quire_spec_decode.ngram import NgramDrafter
from quire_spec_decode.suffix import SuffixDrafter

__all__ = [
    "HEAD_METHODS",
    "LAST_STATE_METHODS",
    "NETWORK_METHODS",
    "TREE_METHODS",
    "SpecDecodeConfig",
    "make_drafter",
]

HEAD_METHODS = ("eagle", "eagle3", "mtp", "dflash")
"""Methods that draft with a head which reads the model's hidden states of every token."""
LAST_STATE_METHODS = ("medusa", "mlp_speculator")
"""Methods that draft with heads which read the last hidden state alone, and keep nothing."""
TREE_METHODS = ("eagle", "eagle3", "mtp", "medusa")
"""Methods that may draft trees."""
NETWORK_METHODS = ("draft_model", *HEAD_METHODS, *LAST_STATE_METHODS)
"""Methods that draft with a network of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeConfig(Settings):
    """Speculative decoding of a served model."""

    method: str = setting(
        "none",
        help="How draft tokens are found: none; ngram (look the last tokens up in the request's own text); suffix (the "
        "same in recent outputs, too, with votes); draft_model (a smaller model of the same vocabulary); eagle or "
        "eagle3 (a head that reads the model's hidden states); mtp (the layer for it in the model's own checkpoint); "
        "medusa (heads that each say a further token); mlp_speculator (heads in a row, each behind the token that the "
        "one before it said); dflash (a small network that fills a block of further tokens in one pass).",
        check=one_of("none", "ngram", "suffix", *NETWORK_METHODS),
        flag="--speculative-method",
    )
    model: str | None = setting(
        None,
        help="Folder or hub name of what drafts (methods draft_model, eagle, eagle3, dflash, medusa, mlp_speculator); "
        "the demo model has some.",
        flag="--speculative-model",
    )
    revision: str | None = setting(
        None, help="Branch, tag or commit of it, if it is a hub model.", flag="--speculative-revision"
    )
    quantization: str | None = setting(
        None,
        help="What its weights are held in: int8, w8a8, int4, int4-g64, int4-g32, fp8, ptpc_fp8, mxfp8; empty as "
        "its checkpoint has them.",
        flag="--speculative-quantization",
    )
    num_speculative_tokens: int = setting(
        4, help="How many tokens drafts go ahead at most.", unit="tokens", check=between(1, 64)
    )
    eagle_topk: int = setting(
        1,
        help="Guesses that go on at each depth of a draft tree, each with as many children (methods eagle, eagle3, "
        "mtp, medusa); 1 drafts chains.",
        unit="tokens",
        check=between(1, 64),
        flag="--speculative-eagle-topk",
    )
    num_draft_tokens: int | None = setting(
        None,
        help="Most draft tokens per request and step, the likeliest of a tree; empty takes four times "
        "num_speculative_tokens. Chains have num_speculative_tokens.",
        unit="tokens",
        check=between(1, 256),
        flag="--speculative-num-draft-tokens",
    )
    parallel_drafting: bool = setting(
        True,
        help="Draft all tokens in one pass where a head was trained for it (P-EAGLE, method eagle3: its config.json "
        "has ptd_token_id); off drafts one after another.",
        flag="--speculative-parallel-drafting",
    )
    adaptive: bool = setting(
        True,
        help="Draft as much as brings the most tokens a second, by measurement, down to nothing; off always drafts.",
        flag="--speculative-adaptive",
    )
    prompt_lookup_min: int = setting(
        2, help="Shortest n-gram that counts as a match (method ngram).", unit="tokens", check=between(1, 64)
    )
    prompt_lookup_max: int = setting(
        4, help="Longest n-gram that is looked up, tried first (method ngram).", unit="tokens", check=between(1, 64)
    )

    suffix_decoding_max_tree_depth: int = setting(
        24, help="Longest match that is looked for (method suffix).", unit="tokens", check=between(2, 1024)
    )
    suffix_decoding_max_cached_requests: int = setting(
        10_000,
        help="Finished outputs that are drafted from (method suffix); 0 takes a request's own text only.",
        unit="requests",
        check=at_least(0),
    )
    suffix_decoding_max_spec_factor: float = setting(
        1.0, help="Draft tokens per token of the match (method suffix).", check=between(0.01, 64)
    )
    suffix_decoding_min_token_prob: float = setting(
        0.1, help="Least share of the votes, multiplied along the draft (method suffix).", check=between(0, 1)
    )

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for name in (
            "num_speculative_tokens",
            "eagle_topk",
            "prompt_lookup_min",
            "prompt_lookup_max",
        ):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number, got {value!r}", field=name)
        takes_model = tuple(method for method in NETWORK_METHODS if method != "mtp")
        if self.model and self.method not in takes_model:
            raise ConfigError(
                f"a drafting model ({self.model!r}) is for the methods {', '.join(takes_model)}, and method is "
                f"{self.method!r}",
                field="model",
            )
        if self.eagle_topk > 1 and self.method not in TREE_METHODS:
            raise ConfigError(
                f"draft trees (eagle_topk {self.eagle_topk}) are for the methods {', '.join(TREE_METHODS)}, and method "
                f"is {self.method!r}",
                field="eagle_topk",
            )
        if not self.parallel_drafting and self.method not in ("eagle", "eagle3"):
            raise ConfigError(
                f"parallel_drafting off is for the methods eagle, eagle3, and method is {self.method!r}; leave "
                "parallel_drafting out",
                field="parallel_drafting",
            )
        if self.num_draft_tokens is not None:
            if self.eagle_topk == 1:
                raise ConfigError(
                    "num_draft_tokens bounds a draft tree, and eagle_topk 1 drafts chains: their length is "
                    "num_speculative_tokens",
                    field="num_draft_tokens",
                )
            if self.num_draft_tokens < self.num_speculative_tokens:
                raise ConfigError(
                    f"num_draft_tokens must be at least num_speculative_tokens ({self.num_speculative_tokens}), "
                    f"got {self.num_draft_tokens}",
                    field="num_draft_tokens",
                )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min must not exceed prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}",
                field="prompt_lookup_min",
            )

    @property
    def most_draft_tokens(self) -> int:
        """Draft tokens that a step verifies for a request at most; 0 without speculation."""
        if self.method == "none":
            return 0
        if self.eagle_topk == 1:
            return self.num_speculative_tokens
        return self.num_draft_tokens or 4 * self.num_speculative_tokens

    @property
    def most_slots_ahead(self) -> int:
        """Slots of the cache behind the last known token that a drafting network writes to at most."""
        if self.method not in NETWORK_METHODS or self.method in LAST_STATE_METHODS:
            return 0
        return self.num_speculative_tokens if self.eagle_topk == 1 else self.eagle_topk * self.num_speculative_tokens


def make_drafter(config: SpecDecodeConfig) -> Drafter | RequestDrafter | None:
    """The drafter that `config` asks for; None where there is none, or it is a network."""
    if config.method == "none" or config.method in NETWORK_METHODS:
        return None
    if config.method == "suffix":
        return SuffixDrafter(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
