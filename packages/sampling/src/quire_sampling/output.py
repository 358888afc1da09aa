"""What one call of the sampler gives back. Everything stays on the device until the host asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire_interfaces import TokenLogprobs
from torch import Tensor

from quire_sampling.logprobs import LogprobTensors

__all__ = ["SamplerOutput"]

_NOTHING_LEFT = (
    "no token can be sampled: every logit is -inf; loosen allowed_token_ids, bad_words, min_tokens, logit_bias or the "
    "logits processors, which together exclude the whole vocabulary"
)
_NOT_FINITE = (
    "the logits hold NaN or +inf; the model overflowed on this input (try float32 or bfloat16) or a logits processor "
    "computed them wrongly"
)


@dataclass(slots=True)
class SamplerOutput:
    """Tokens of one step, per logit row."""

    token_ids: Tensor
    """[N] int64 on the device; always within the vocabulary, also where the row failed."""
    rows: list[int]
    """Per logit row: the request row."""
    peaks: Tensor
    """[N] float32, largest logit after all edits; says which rows failed."""
    processor_errors: dict[int, str] = field(default_factory=dict)
    """Row -> message."""
    logprob_indices: list[int] = field(default_factory=list)
    """Logit rows that `logprob_tensors` speaks of."""
    num_logprobs: list[int] = field(default_factory=list)
    """Per entry of `logprob_indices`: how many top tokens."""
    logprob_tensors: LogprobTensors | None = None

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Logit row (index into `token_ids`) -> log probabilities, for rows whose request asked. Waits for the
        device."""
        if self.logprob_tensors is None:
            return {}
        return dict(zip(self.logprob_indices, self.logprob_tensors.to_host(self.num_logprobs), strict=True))

    def failed_rows(self) -> dict[int, str]:
        """Request row -> why its request cannot go on. Waits for the device."""
        failed = dict(self.processor_errors)
        if bool(self.peaks.isfinite().all()):
            return failed
        for row, peak in zip(self.rows, self.peaks.tolist(), strict=True):
            if peak == -float("inf"):
                failed.setdefault(row, _NOTHING_LEFT)
            elif peak != peak or peak == float("inf"):
                failed.setdefault(row, _NOT_FINITE)
        return failed
