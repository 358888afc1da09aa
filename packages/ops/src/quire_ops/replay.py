"""Recurrent ops again, over the tokens that turned out right.

A step that verifies drafts does not know yet after which of its tokens a sequence goes on, so it stores no state of
that sequence. It takes down what each recurrent op was given; once the drafts are judged, the ops run again over the
tokens that were kept, from the state that is still there, and store as they always do. Where an op goes through tokens
one by one, that is to the bit the state of a sequence that was never drafted for. It takes the time of these ops once
more, and the memory of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor

from quire_ops.op import Op, OpFunction, P, R

__all__ = ["StateReplay", "replayable"]


class StateReplay:
    """What the recurrent ops of a step were given of some of its tokens.

    Args:
        tokens: [N] int64, which of the step's tokens: those of sequences with drafts, in their order.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._calls: list[tuple[OpFunction, tuple[int, ...], list[Any], Mapping[str, Any]]] = []

    def record(
        self, op: OpFunction, places: tuple[int, ...], inputs: tuple[Any, ...], settings: Mapping[str, Any]
    ) -> None:
        """Take down a call. Rows are copied: layers may write over what they gave an op."""
        held = list(inputs[:-1])
        for place in places:
            held[place] = held[place].index_select(0, self._tokens)
        self._calls.append((op, places, held, settings))

    def run(self, accepted: Tensor | None, layout: Any) -> None:
        """Run every call again, and let go of it.

        Args:
            accepted: [M] int64, which of the recorded tokens; None for all of them.
            layout: `PagedLayout` of these tokens: where their states are read and stored.
        """
        for op, places, inputs, settings in self._calls:
            if accepted is not None:
                for place in places:
                    inputs[place] = inputs[place].index_select(0, accepted)
            op(*inputs, layout, **settings)
        self._calls.clear()


def replayable(op: Op[P, R], function: Callable[P, R]) -> Callable[P, R]:
    """A backend's function of the op, as layers call it: of an op with a state, each call is taken down where the
    layout asks for it."""
    if not op.token_args:
        return function

    @wraps(function)
    def run(*inputs: P.args, **settings: P.kwargs) -> R:
        layout: Any = inputs[-1]
        replay: StateReplay | None = layout.replay
        if replay is not None:
            replay.record(function, op.token_args, inputs, settings)
        return function(*inputs, **settings)

    return run
