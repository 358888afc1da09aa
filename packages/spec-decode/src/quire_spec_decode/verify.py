"""Verification of draft tokens: keep those that the model would have sampled itself."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["accept_drafts"]


def accept_drafts(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Accepted draft tokens, followed by the bonus token.

    `sampled[i]` is the token drawn from the target model's distribution after the known tokens and `drafts[:i]`. As
    long as draft and sample agree, the condition under which the next sample was drawn is the true one, so it counts;
    at the first disagreement the sample itself is the right token and everything after it is void.

    Why nothing is lost: a drafter that proposes single tokens is a point mass q(x) = 1. Rejection sampling (Leviathan,
    Kalman, Matias 2023, "Fast inference from transformers via speculative decoding", section 2.3) accepts x with
    probability min(1, p(x) / q(x)) = p(x), else draws from p without x, normalized. Drawing t from p and comparing it
    with x has exactly this outcome: t = x with probability p(x), otherwise t is distributed as p without x. Ours is
    stronger than equality in distribution: the draw at an output position is a function of the request's seed and that
    position, so the tokens are the same ones with and without drafts, greedy or sampled.

    Args:
        sampled: k + 1 samples of the target model.
        drafts: k draft tokens.

    Returns:
        From 1 to k + 1 tokens, a prefix of `sampled`.

    Raises:
        ValueError: when the lengths do not fit.
    """
    if len(sampled) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} samples to verify them, got {len(sampled)}")
    num_accepted = 0
    while num_accepted < len(drafts) and sampled[num_accepted] == drafts[num_accepted]:
        num_accepted += 1
    return list(sampled[: num_accepted + 1])
