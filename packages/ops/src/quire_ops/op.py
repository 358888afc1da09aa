"""An op is its reference: a slow, clear function whose signature and docstring declare what every backend computes.

`@op` turns the function into an `Op`, which still can be called (as the reference, for tests) and which carries the
types of its arguments and result: `bind(op, request)` gives a function of that type, and a backend's function is held
to it by the type checker (`implements`, `BackendSet`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, overload

__all__ = ["Op", "OpFunction", "P", "R", "implements", "op"]

P = ParamSpec("P")
R = TypeVar("R")

OpFunction = Callable[..., Any]
"""A backend's function where its op is not known."""


class Op(Generic[P, R]):
    """A declared op. Calling it runs the reference."""

    def __init__(self, reference: Callable[P, R], *, token_args: tuple[int, ...] = (), trees: bool = False) -> None:
        """Args:
        reference: Its name is the op's.
        token_args: Of an op that reads and stores states: positions of the arguments with one entry for each token
            (`StateReplay`). Its last positional argument is the layout.
        trees: Whether the reference reads `PagedLayout.paths`.
        """
        update_wrapper(self, reference)
        self.name: str = reference.__name__
        self.reference = reference
        self.token_args = token_args
        self.trees = trees

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The reference's result: slow, in float64 where rounding matters. Networks call what `bind` gives instead."""
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


@overload
def op(reference: Callable[P, R], /) -> Op[P, R]: ...


@overload
def op(*, token_args: tuple[int, ...] = (), trees: bool = False) -> Callable[[Callable[P, R]], Op[P, R]]: ...


def op(reference: Callable[..., Any] | None = None, /, **facts: Any) -> Any:
    """Declare an op by its reference; `facts` as `Op` takes them."""
    return (lambda function: Op(function, **facts)) if reference is None else Op(reference)


def implements(op: Op[P, R]) -> Callable[[Callable[P, R]], Callable[..., R]]:
    """Hold a function to an op's signature: the type checker refuses one that cannot stand for the reference. It may
    have further arguments with defaults.

    Returns:
        A decorator that gives the function as it is.
    """

    def take(function: Callable[P, R]) -> Callable[..., R]:
        return function

    return take
