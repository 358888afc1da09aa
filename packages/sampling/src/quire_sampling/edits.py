"""Changes of the raw logits that single requests ask for: allowed tokens, bad words, minimum tokens, logit bias,
custom processors. Only rows that ask are touched; each function changes one logit row [V] in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_sampling.state import BadWords, MinTokens, SamplingState, TokenValues

__all__ = ["add_bias_", "allow_only_", "apply_processors_", "block_bad_words_", "block_stop_ids_", "edit_row_"]


def edit_row_(state: SamplingState, row: int, logits: Tensor, history: Tensor, position: Tensor) -> None:
    """All token-list edits of `row`, in their fixed order.

    Args:
        state: Where the lists are.
        row: The row.
        logits: [V] float32, changed in place.
        history: [max_model_len] the row's token ids; valid up to and with `position`.
        position: Scalar int64 tensor: sequence position of the last known token.
    """
    if (allowed := state.allowed.get(row)) is not None:
        allow_only_(logits, allowed)
    for bad_words in state.bad_words.get(row, ()):
        block_bad_words_(logits, bad_words, history, position)
    if (min_tokens := state.min_tokens.get(row)) is not None:
        block_stop_ids_(logits, min_tokens, position + 1 - state.num_prompt_tokens[row])
    if (bias := state.bias.get(row)) is not None:
        add_bias_(logits, bias)


def allow_only_(logits: Tensor, ids: Tensor) -> None:
    """Set all logits but those at `ids` [M] to -inf."""
    kept = logits[ids]
    logits.fill_(-torch.inf)
    logits[ids] = kept


def add_bias_(logits: Tensor, bias: TokenValues) -> None:
    """Add the bias of each token."""
    logits.index_add_(0, bias.ids, bias.values)


def block_bad_words_(logits: Tensor, words: BadWords, history: Tensor, position: Tensor) -> None:
    """Set the last token of each bad word to -inf where the sequence (prompt and output) ends in the word's rest."""
    width = words.prefixes.shape[1]
    places = position + torch.arange(1 - width, 1, device=logits.device)
    window = history[places.clamp(min=0)].to(torch.int64).masked_fill(places < 0, -2)
    matches = ((words.prefixes == window) | (words.prefixes == -1)).all(-1)
    # Several words may end in the same token: amin lets one match decide.
    limits = torch.where(matches, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(0, words.last, limits, "amin", include_self=True)


def block_stop_ids_(logits: Tensor, min_tokens: MinTokens, output_position: Tensor) -> None:
    """Set the stop tokens to -inf while fewer than `min_tokens.num_tokens` tokens are out."""
    stop_logits = logits[min_tokens.stop_ids]
    logits[min_tokens.stop_ids] = torch.where(output_position < min_tokens.num_tokens, -torch.inf, stop_logits)


def apply_processors_(state: SamplingState, row: int, logits: Tensor, history: Tensor, position: int) -> str | None:
    """Run the row's custom processors in order, in place; returns why the request failed, or None."""
    names = state.processors.get(row, ())
    token_ids = history[: position + 1].tolist()
    num_prompt_tokens = int(state.num_prompt_tokens[row])
    for name in names:
        try:
            result = state.registry[name](token_ids, num_prompt_tokens, logits)
        except Exception as error:
            return f"logits processor {name!r} raised {type(error).__name__}: {error}"
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            return f"logits processor {name!r} must return a tensor of shape {list(logits.shape)}, got {got}"
        if result.dtype != torch.float32 or result.device != logits.device:
            return (
                f"logits processor {name!r} must return float32 on {logits.device}, "
                f"got {result.dtype} on {result.device}"
            )
        logits.copy_(result)
    return None
