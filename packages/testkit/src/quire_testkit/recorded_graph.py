"""A graph of operations on the CPU: what a CUDA graph is on a GPU, for proving that a step can be captured.

Recording notes every operation of torch, and every launch of an interpreted Triton kernel, with its very tensors and
numbers; replaying does these operations again on the same memory, and nothing else: no Python of the recorded function
runs. So whatever the function took from the host, or kept from one call to the next, is as frozen as in a CUDA graph.
Before each replay everything that the recorded operations had made is overwritten with NaN or nonsense.

What would wait for a device raises while it is recorded, as it does while a CUDA graph is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["record_graph"]

T = TypeVar("T")
_ATEN = torch.ops.aten
_WAITS = {_ATEN.nonzero.default, _ATEN.unique_consecutive.default, _ATEN._unique2.default, _ATEN.masked_select.default}
"""Operations that give as many numbers as they find; those that give numbers to Python wait, too."""
_NONSENSE = {torch.bool: True, torch.uint8: 0x55, torch.int8: 0x55, torch.int16: 0x5555}


def record_graph(function: Callable[[], T], launches: list[str] | None = None) -> tuple[Callable[[], None], T]:
    """Run a function once, and note what it does.

    Args:
        launches: Gets the name of everything that a GPU would launch a kernel for, in order: Triton's kernels by
            theirs, and torch's operations, those aside that only view or reserve memory.

    Returns:
        What does the same again, and what the function returned: tensors that each replay fills anew.

    Raises:
        RuntimeError: the function waits for results.
    """
    recorder = _Recorder([] if launches is None else launches)
    with _recorded_launches(recorder), recorder:
        result = function()
    return recorder.replay, result


class _Recorder(TorchDispatchMode):
    def __init__(self, launches: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.actions: list[Callable[[], None]] = []
        self.launches = launches
        self._made: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WAITS:
            raise RuntimeError(f"{func} waits for its result, which a graph cannot")
        given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = func(*args, **kwargs)
        if any(isinstance(each, bool | int | float) for each in tree_leaves(out)):
            raise RuntimeError(f"{func} waits for its result, which a graph cannot")
        results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        made = [each for each in results if _memory(each) not in given]
        if func._schema.is_mutable or (made and "empty" not in func.__name__):
            self.launches.append(str(func))
        for each in made:
            self._made[_memory(each)] = each

        def again() -> None:
            anew = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for old, new in zip(results, anew, strict=True):
                if _memory(old) != _memory(new):
                    old.copy_(new)

        self.actions.append(again)
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for tensor in self._made.values():
            _spoil(tensor)
        for action in self.actions:
            action()


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(_NONSENSE.get(tensor.dtype, 0x55555555))


@contextmanager
def _recorded_launches(recorder: _Recorder) -> Iterator[None]:
    """Launches of interpreted Triton kernels are noted whole, without the copies that the interpreter makes."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    function: Any = interpreter.InterpretedFunction
    launch = function.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        def again() -> None:
            with _disable_current_modes():
                launch(self, *args, **kwargs)

        again()
        recorder.actions.append(again)
        recorder.launches.append(self.fn.__name__)

    function.run = run
    try:
        yield
    finally:
        function.run = launch
