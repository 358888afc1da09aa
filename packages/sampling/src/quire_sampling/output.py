"""What one call of the sampler gives back. Everything stays on the device until the host asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from quire_interfaces import TokenLogprobs
from quire_ops import copy_to_host
from quire_sampling.logprobs import LogprobTensors

__all__ = ["NOTHING_LEFT", "SamplerOutput"]

NOTHING_LEFT = (
    "no token can be sampled: every logit is -inf; loosen structured_outputs, allowed_token_ids, bad_words, "
    "min_tokens, logit_bias or the logits processors, which together exclude the whole vocabulary"
)
"""Why a row failed whose request leaves itself no token."""
_NOT_FINITE = (
    "the logits hold NaN or +inf; the model overflowed on this input (try float32 or bfloat16), its weights hold NaN "
    "or infinity (try another copy of the checkpoint), or a logits processor computed them wrongly"
)


@dataclass(slots=True)
class SamplerOutput:
    """Tokens of one step, per logit row."""

    token_ids: Tensor
    """[N] int64 on the device; always within the vocabulary, also where the row failed."""
    rows: list[int]
    """Per logit row: the request row."""
    max_logits: Tensor
    """[N] float32, largest logit after all edits; says which rows failed."""
    edit_errors: dict[int, str] = field(default_factory=dict)
    """Logit row -> why its custom logits processors failed."""
    logprob_indices: list[int] = field(default_factory=list)
    """Logit rows that `logprob_tensors` smax_logits of."""
    num_logprobs: list[int] = field(default_factory=list)
    """Per entry of `logprob_indices`: how many top tokens."""
    logprob_tensors: LogprobTensors | None = None

    def begin_read(self) -> Callable[[], SamplerOutput]:
        """Begin to copy everything to the host, beside what the device does next. What is returned waits for the
        copies, and gives this output with them."""
        if self.token_ids.device.type == "cpu":
            return lambda: self
        read = copy_to_host(self.token_ids, self.max_logits, *(self.logprob_tensors or ()))

        def on_host() -> SamplerOutput:
            token_ids, max_logits, *logprobs = read()
            tensors = LogprobTensors(*logprobs) if logprobs else None
            return replace(self, token_ids=token_ids, max_logits=max_logits, logprob_tensors=tensors)

        return on_host

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Logit row (index into `token_ids`) -> log probabilities, for rows whose request asked. Waits for the
        device."""
        if self.logprob_tensors is None:
            return {}
        return dict(zip(self.logprob_indices, self.logprob_tensors.to_host(self.num_logprobs), strict=True))

    @property
    def processor_errors(self) -> dict[int, str]:
        """Request row -> why its custom logits processors failed at its first bad logit row. Does not wait."""
        return self._by_request(self.edit_errors)

    def failures(self) -> dict[int, str]:
        """Logit row (index into `token_ids`) -> why no token could be sampled there. Waits for the device.

        A logit row behind a rejected draft does not count: the request never goes there.
        """
        failed = dict(self.edit_errors)
        max_logits = self.max_logits.tolist()
        if all(map(math.isfinite, max_logits)):
            return failed
        for index, max_logit in enumerate(max_logits):
            if not math.isfinite(max_logit):
                failed.setdefault(index, NOTHING_LEFT if max_logit == -math.inf else _NOT_FINITE)
        return failed

    def failed_rows(self) -> dict[int, str]:
        """Request row -> the message of its first failed logit row. Waits for the device."""
        return self._by_request(self.failures())

    def _by_request(self, failures: dict[int, str]) -> dict[int, str]:
        return {self.rows[index]: failures[index] for index in sorted(failures, reverse=True)}
