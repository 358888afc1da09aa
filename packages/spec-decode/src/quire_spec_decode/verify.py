"""Verification of draft tokens: keep those that the model would have sampled itself."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["accept_drafts", "accept_tree", "nodes_of"]


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


def accept_tree(sampled: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes of a draft tree that came true, from the first one down.

    `sampled[0]` is the token drawn from the target model's distribution after the known tokens, `sampled[1 + i]` that
    after node i and all that it follows. Where a node's sample is one of its children, that child was right, and the
    sample behind it was drawn under the true condition; the sample behind the last node that came true is the bonus
    token.

    Why nothing is lost: what is accepted or not is always the sample itself, as in `accept_drafts`. For children that
    are given, not drawn, this is also what rejection sampling of several candidates without replacement does (Miao et
    al. 2024, arXiv:2305.09781, section 4.3; Yang et al. 2024, arXiv:2402.14160): it keeps the first child x with
    probability p(x), the second, y, with p(y) / (1 - p(x)) of what is left, and so on, which makes p(y) for each.

    Args:
        sampled: n + 1 samples of the target model.
        drafts: n nodes, no two children of a node alike.
        parents: Of each node the place of its parent, -1 for the known tokens; parents come first.

    Returns:
        Places of nodes. The tokens are `sampled[0]`, then `sampled[1 + i]` for each node i of them.

    Raises:
        ValueError: when the lengths do not fit.
    """
    if len(sampled) != len(drafts) + 1 or len(parents) != len(drafts):
        raise ValueError(
            f"a tree of {len(drafts)} drafts needs as many parents and one sample more, got {len(parents)} and "
            f"{len(sampled)}"
        )
    children = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, drafts, strict=True))}
    found: list[int] = []
    while (node := children.get((found[-1] if found else -1, sampled[found[-1] + 1 if found else 0]))) is not None:
        found.append(node)
    return found


def nodes_of(tokens: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes of a draft tree that have come true, where `accept_tree` ran elsewhere: places of those that the tokens
    pass.

    Args:
        tokens: What came of the tree: the tokens of these nodes, and the bonus token.
        drafts: As of `accept_tree`.
        parents: As of `accept_tree`.
    """
    children = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, drafts, strict=True))}
    found: list[int] = []
    for token in tokens[:-1]:
        found.append(children[found[-1] if found else -1, token])
    return found
