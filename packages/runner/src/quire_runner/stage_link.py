"""`StageLink`: what a pipeline stage gets from the stage before and hands on to the next one, step by step.

For each step there is a header: for how many tokens the step was computed, and which rows were left out, or why it
failed. So a step that fails on one stage fails on all behind it, and a row that one stage cannot compute is left out by
those behind it. Knows tensors and rows; knows no network.

Shape legend: T tokens of the entries that this stage computes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire_distributed import Collectives, PendingTensor
from quire_interfaces import RankDeadError
from quire_interfaces.step import RequestFailure, SchedulerOutput
from quire_ops import to_device
from quire_runner.output import Failures

__all__ = ["StageFailedError", "StageLink"]

MAX_NOTE_BYTES = 1 << 26


class StageFailedError(RuntimeError):
    """A stage before this one could not compute the step."""


class StageLink:
    """The stages before and behind this one. Each step: `begin`, then `receive` and `send` where anything is computed,
    then `end`; or `fail`, wherever it stands.

    Args:
        group: The stages; rank r is stage r.
    """

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self._before = group.rank - 1 if group.rank > 0 else None
        self._behind = group.rank + 1 if group.rank + 1 < group.size else None
        self._output: SchedulerOutput
        self._earlier: Failures = {}
        """Rows that stages before have left out."""
        self._dropped: Failures = {}
        """Rows that this stage has left out."""
        self._num_coming = 0
        """Tokens whose residual stream the stage before has sent, and which was not received."""
        self._is_sent = True
        self._sending: PendingTensor | None = None

    @property
    def is_last(self) -> bool:
        """Whether no stage comes behind."""
        return self._behind is None

    @property
    def is_sent(self) -> bool:
        """Whether the next stage, if there is one, has been told of this step."""
        return self._is_sent

    def begin(self, output: SchedulerOutput) -> Failures:
        """Begin a step.

        Returns:
            The rows that stages before have left out, and why.

        Raises:
            StageFailedError: The step failed there.
            RankDeadError: A rank is gone, or what comes from the stage before belongs to another step, or makes no
                sense: the stages have gone apart, and no further step would be what it says.
        """
        self._output, self._earlier, self._dropped = output, {}, {}
        self._num_coming, self._is_sent = 0, self.is_last
        if self._before is None:
            return {}
        header = self._group.recv(torch.empty(4, dtype=torch.int64), self._before)
        step_id, num_tokens, has_failed, num_bytes = header.tolist()
        if step_id != output.step_id:
            raise self._gone_apart(f"it computed step {step_id} where stage {self._group.rank} has {output.step_id}")
        most_tokens = sum(output.num_scheduled_tokens)
        if not (0 <= num_tokens <= most_tokens and 0 <= num_bytes <= MAX_NOTE_BYTES and has_failed in (0, 1)):
            raise self._gone_apart(f"what it says of step {step_id} makes no sense: {header.tolist()}")
        notes: list[Any] = []
        if num_bytes:
            data = self._group.recv(torch.empty(num_bytes, dtype=torch.uint8), self._before)
            try:
                notes = json.loads(bytes(data.numpy()))
            except ValueError as error:
                raise self._gone_apart(f"what it says of step {step_id} cannot be read: {error}") from None
        if has_failed:
            raise StageFailedError(notes[0])
        self._num_coming = num_tokens
        self._earlier = {row: RequestFailure(*why) for row, *why in notes}
        return self._earlier

    def _gone_apart(self, cause: str) -> RankDeadError:
        assert self._before is not None
        return RankDeadError(self._before, cause)

    def drop(self, failures: Failures) -> None:
        """Leave further rows out; before `receive` and `send`."""
        self._dropped = failures

    def receive(self, like: Tensor) -> Tensor:
        """The residual stream [T, hidden_size] behind the stage before; `like` has its shape and dtype."""
        hidden = self._take(like)
        if len(hidden) == len(like):
            return hidden
        output, is_kept = self._output, list[bool]()
        for row, num_tokens in zip(output.rows, output.num_scheduled_tokens, strict=True):
            if row not in self._earlier:
                is_kept += [row not in self._dropped] * num_tokens
        return hidden.index_select(0, to_device(np.flatnonzero(is_kept), hidden.device))

    def send(self, hidden: Tensor) -> None:
        """Hand the residual stream [T, hidden_size] on; it must not be changed afterwards."""
        assert self._behind is not None
        self._send_header(len(hidden), [[row, *why] for row, why in (self._earlier | self._dropped).items()])
        self._sending = self._group.isend(hidden, self._behind)

    def end(self, like: Tensor) -> None:
        """End a step; where nothing was computed, the stages behind are told. `like`: of the residual stream's width
        and dtype."""
        if self._num_coming:
            self._take(like)
        if not self._is_sent:
            self._send_header(0, [[row, *why] for row, why in (self._earlier | self._dropped).items()])

    def fail(self, why: str, like: Tensor) -> None:
        """End a step that raised on this stage, or one before; the stages behind raise, too."""
        if self._num_coming:
            self._take(like)
        if not self._is_sent:
            self._send_header(0, [why], has_failed=True)

    def _take(self, like: Tensor) -> Tensor:
        assert self._before is not None
        shape = (self._num_coming, *like.shape[1:])
        self._num_coming = 0
        return self._group.recv(like.new_empty(shape), self._before)

    def _send_header(self, num_tokens: int, notes: list[Any], *, has_failed: bool = False) -> None:
        """Say how the step ended, once what was sent before has gone."""
        assert self._behind is not None
        if self._sending is not None:
            self._sending.wait()
            self._sending = None
        data = json.dumps(notes).encode() if notes else b""
        header = torch.tensor([self._output.step_id, num_tokens, int(has_failed), len(data)])
        self._group.send(header, self._behind)
        if data:
            self._group.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), self._behind)
        self._is_sent = True
