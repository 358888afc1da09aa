"""Admission rules: one object per resource that a waiting request needs before it may run.

The token budget and the KV blocks are no rules: every request takes a share of them in every step, so the loop itself
deals with both. What only some requests need, or what is held from admission until the row is left, is a rule.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from quire_interfaces import (
    AdmissionRule,
    CachedPrefix,
    ConfigError,
    ContextLengthError,
    Request,
    RequestError,
    Reservation,
)
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.fair_queue import FairQueue
from quire_scheduler.rows import RowPool

__all__ = [
    "EncoderRule",
    "FreeRowRule",
    "MaxRunningPerTenantRule",
    "RuleSet",
    "SharedPromptRule",
    "latency_rules",
    "tenant_rules",
]

_NUM_COMPUTED_GROUPS = 64


class RuleSet:
    """The rules of a scheduler, in the order in which they are asked. Most have nothing to do in most steps, so of the
    methods that every step calls, only those are called that a rule defines itself.

    Args:
        rules: The rules.
    """

    def __init__(self, rules: Sequence[AdmissionRule]) -> None:
        self._rules = tuple(rules)
        self.admission_begins = [rule.admission_begins for rule in rules if _defines(rule, "admission_begins")]
        self._allowed_tokens = [rule.allowed_tokens for rule in rules if _defines(rule, "allowed_tokens")]
        self.step_planned = [rule.step_planned for rule in rules if _defines(rule, "step_planned")]
        self.step_ended = [rule.step_ended for rule in rules if _defines(rule, "step_ended")]
        self.may_watch = [rule for rule in rules if _defines(rule, "is_watching")]

    def num_allowed(self, request: Request, start: int, num_tokens: int) -> int:
        """Number of tokens, at most `num_tokens` from position `start` on, that all rules let a request compute."""
        for allowed_tokens in self._allowed_tokens:
            num_tokens = allowed_tokens(request, start, num_tokens)
        return num_tokens

    def __iter__(self) -> Iterator[AdmissionRule]:
        return iter(self._rules)


def _defines(rule: AdmissionRule, name: str) -> bool:
    """Whether a rule does not inherit the method from `AdmissionRule`, where it does nothing."""
    return getattr(type(rule), name, None) is not getattr(AdmissionRule, name)


class FreeRowRule(AdmissionRule):
    """A free row of the runner; always the first rule of a scheduler.

    Args:
        rows: The pool; the scheduler itself takes and gives back the rows, as it needs their numbers.
    """

    name = "max_num_seqs"
    holds_queue = True

    def __init__(self, rows: RowPool) -> None:
        self._rows = rows

    def admits(self, request: Request) -> bool:
        """Whether any row is free."""
        return self._rows.num_free > 0


class MaxRunningPerTenantRule(AdmissionRule):
    """Each tenant may hold at most so many rows; requests of other tenants pass. No tenant is a tenant too.

    Args:
        max_running: Rows per tenant, at least 1.

    Raises:
        ConfigError: `max_running` is below 1.
    """

    name = "max_running_per_tenant"
    holds_queue = False

    def __init__(self, max_running: int) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1, got {max_running!r}", field="max_running")
        self.max_running = max_running
        self._num_running: dict[str | None, int] = {}

    def admits(self, request: Request) -> bool:
        """Whether the tenant holds fewer rows than it may."""
        return self._num_running.get(request.options.tenant, 0) < self.max_running

    def admitted(self, request: Request) -> None:
        """Count the row."""
        self._num_running[request.options.tenant] = self._num_running.get(request.options.tenant, 0) + 1

    def released(self, request: Request) -> None:
        """Forget the row, and the tenant with its last row (tenants come and go)."""
        num_running = self._num_running[request.options.tenant] - 1
        if num_running:
            self._num_running[request.options.tenant] = num_running
        else:
            del self._num_running[request.options.tenant]


class EncoderRule(AdmissionRule):
    """The encoder of an encoder-decoder network reads a request's whole input in the request's first step, and of all
    requests at most `max_step_tokens` tokens in one step, beside the tokens of the decoder.

    Args:
        max_encoder_tokens: Most tokens that the encoder reads for one request; 0 for networks without an encoder.
        max_step_tokens: Most tokens that the encoder reads in one step.

    Raises:
        ConfigError: a request's input may be longer than what is read in a step.
    """

    name = "encoder"
    holds_queue = True

    def __init__(self, max_encoder_tokens: int, max_step_tokens: int) -> None:
        if max_encoder_tokens > max_step_tokens:
            raise ConfigError(
                f"the encoder reads up to {max_encoder_tokens} tokens of a request in one step, so "
                f"max_num_batched_tokens ({max_step_tokens}) must be at least that",
                field="max_num_batched_tokens",
            )
        self._max_encoder_tokens = max_encoder_tokens
        self._max_step_tokens = max_step_tokens
        self._budget = max_step_tokens

    def check(self, request: Request) -> None:
        """Let a request pass whose encoder input fits the network.

        Raises:
            RequestError: there is an input but no encoder, or the other way round.
            ContextLengthError: the input is too long.
        """
        max_tokens = self._max_encoder_tokens
        num_tokens = len(request.encoder_token_ids)
        if num_tokens and not max_tokens:
            raise RequestError("this model has no encoder: leave the encoder prompt out", param="encoder_prompt")
        if max_tokens and not num_tokens:
            raise RequestError("the encoder's prompt has no tokens; give at least one", param="prompt")
        if num_tokens > max_tokens:
            raise ContextLengthError(
                f"the encoder's prompt has {num_tokens} tokens, and the encoder reads at most {max_tokens}, all at "
                "once: shorten the prompt",
                num_prompt_tokens=num_tokens,
                max_model_len=max_tokens,
            )

    def admission_begins(self) -> None:
        """Refill the budget."""
        self._budget = self._max_step_tokens

    def reserve(self, request: Request, cached: CachedPrefix) -> Reservation:
        """Take the tokens of the input from the budget, unless the cache has what the encoder made of them."""
        num_tokens = 0 if cached.has_encoder else len(request.encoder_token_ids)
        if num_tokens > self._budget:
            return Reservation(False)
        self._budget -= num_tokens
        return Reservation(True)


class SharedPromptRule(AdmissionRule):
    """Of requests with the same prompt (`Request.prompt_group`) the first one computes it, and the others wait until
    its blocks are in the prefix cache, instead of computing the same beside it. For caches that share prefixes."""

    name = "shared_prompt"
    holds_queue = False

    def __init__(self) -> None:
        self._computing: dict[str, Request] = {}
        self._computed: OrderedDict[str, None] = OrderedDict()
        """Groups whose prompt was computed, the latest ones: forgetting one costs waiting once more, nothing else."""

    def admits(self, request: Request) -> bool:
        """Whether nobody of the group is busy with the prompt. A first token says that it is done."""
        group = request.prompt_group
        if group is None or group in self._computed:
            return True
        first = self._computing.get(group)
        return first is None or bool(first.output_token_ids)

    def admitted(self, request: Request) -> None:
        """The first of its group is who computes."""
        if request.prompt_group is not None:
            self._computing.setdefault(request.prompt_group, request)

    def released(self, request: Request) -> None:
        """The first has left: with a token it has done its work, without one the next in line does it."""
        group = request.prompt_group
        if group is None or self._computing.get(group) is not request:
            return
        del self._computing[group]
        if request.output_token_ids:
            self._computed[group] = None
            if len(self._computed) > _NUM_COMPUTED_GROUPS:
                self._computed.popitem(last=False)


def tenant_rules(config: SchedulerConfig, queue: FairQueue) -> list[AdmissionRule]:
    """What bounds tenants, as far as it is set."""
    rules: list[AdmissionRule] = []
    if config.max_running_per_tenant:
        rules.append(MaxRunningPerTenantRule(config.max_running_per_tenant))
    if config.max_tenant_slowdown:
        from quire_scheduler.tenant_share import TenantShareRule

        cuts_prompts = config.enable_chunked_prefill
        rules.append(TenantShareRule(config.max_tenant_slowdown, queue, cuts_prompts=cuts_prompts))
    return rules


def latency_rules(config: SchedulerConfig) -> list[AdmissionRule]:
    """The bound on the time between tokens, if one is set and prompts can be cut."""
    if not config.max_inter_token_latency or not config.enable_chunked_prefill:
        return []
    from quire_scheduler.inter_token_latency import InterTokenLatencyRule

    return [InterTokenLatencyRule(config.max_inter_token_latency)]
