"""`HiddenStatesRunner`: a runner that writes the hidden states of some layers of each request to a file, as training a
drafter needs them.

Knows rows, steps and files; does not know when a request ends: a row that is freed has its file. A request that was
preempted is computed anew: its file goes when it gets a row again. Files that were there before are never replaced.

Shape legend: T tokens of a request, L layers, H hidden size.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire_interfaces import ConfigError
from quire_interfaces.kv_cache import KVCachePlan
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_models import DecoderLM
from quire_runner.config import RunnerConfig
from quire_runner.output import PendingResult
from quire_runner.protocols import RunnableNetwork
from quire_runner.runner import ModelRunner
from quire_runner.step import Step
from quire_spec_decode import Draft
from quire_spec_decode.row_drafter import DraftStep, RowDrafter

__all__ = ["HiddenStatesRunner", "file_name"]

LONGEST_NAME = 200
_logger = logging.getLogger(__name__)


def file_name(request_id: str) -> str:
    """Name of the file of a request: its id, with characters that names of files may not have as %XX.

    Args:
        request_id: As the engine has it: an id that may be the caller's, a slash, the number of the request and that of
            the sample.
    """
    name, _, number = request_id.rpartition("/")
    return f"{quote(name, safe='')[:LONGEST_NAME]}{'.' if name else ''}{quote(number, safe='')}.safetensors"


class _Tap(RowDrafter):
    """Has steps show the input of layers; drafts nothing."""

    wants_hidden = False

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.feature_layers = layers

    def begin(self, output: SchedulerOutput) -> None:
        """Nothing."""

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """No drafts."""
        return {}


class _Request:
    """The states of a request in its row."""

    __slots__ = ("pieces", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.pieces: list[Tensor] = []
        """[T of a step, L * H] each, in the order of the tokens."""


class HiddenStatesRunner(ModelRunner):
    """Layers run op by op, and no step is captured in a graph. The states of requests that run are kept in memory.

    Raises:
        ConfigError: As `ModelRunner`, or the network does not show its layers, or has fewer.
        OSError: The folder cannot be made.
    """

    def __init__(self, network: RunnableNetwork, plan: KVCachePlan, config: RunnerConfig, **options: Any) -> None:
        layers, folder = config.extract_hidden_states_layers, config.extract_hidden_states
        assert folder is not None
        if not isinstance(network, DecoderLM):
            raise ConfigError(
                f"{type(network).__name__} does not show the hidden states of its layers; leave extract_hidden_states "
                "out",
                field="extract_hidden_states",
            )
        if max(layers) > len(network.layers):
            raise ConfigError(
                f"the model has {len(network.layers)} layers, and layer {max(layers)} is to be extracted",
                field="extract_hidden_states_layers",
            )
        self._tap, self._folder = _Tap(layers), Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._left_bytes = int(config.extract_hidden_states_gib * 2**30)
        self._requests: dict[int, _Request] = {}
        self._written: dict[str, tuple[Path, int]] = {}
        """Id of a request -> its file, and the bytes of its states."""
        super().__init__(network, plan, dataclasses.replace(config, enforce_eager=True), **options)

    def launch(self, output: SchedulerOutput) -> PendingResult:
        """As `ModelRunner.launch`; the files of rows that are freed are written first."""
        for row in output.freed_rows:
            self._write(row)
        for new in output.new_rows:
            self._remove(new.request_id)
            if self._left_bytes >= 0:
                self._requests[new.row] = _Request(new.request_id)
        return super().launch(output)

    def close(self) -> None:
        """As `ModelRunner.close`; requests that still have rows get their files."""
        for row in list(self._requests):
            self._write(row)
        super().close()

    def _run(self, output: SchedulerOutput) -> PendingResult:
        step = Step(output, self._rows, self._adapters, self._tap)
        for path in self._paths:
            pending = path.try_run(step)
            if pending is not None:
                self._keep(step)
                return _without_drafts(pending)
        raise RuntimeError("the runner is closed")

    def _keep(self, step: Step) -> None:
        assert step.features is not None
        sizes = step.output.num_scheduled_tokens
        for row, piece in zip(step.output.rows, step.features.cpu().split(sizes), strict=True):
            if row in self._requests:
                self._requests[row].pieces.append(piece.clone())

    def _remove(self, request_id: str) -> None:
        """Forget what a preempted request has written; it is computed anew."""
        path, nbytes = self._written.pop(request_id, (None, 0))
        if path is not None:
            path.unlink(missing_ok=True)
            self._left_bytes += nbytes if self._left_bytes >= 0 else 0

    def _free_path(self, request_id: str) -> Path:
        """Where a request's file goes: with a number where another run has left one of that name."""
        path = self._folder / file_name(request_id)
        if not path.exists():
            return path
        numbered = (path.with_name(f"{path.stem}~{n}{path.suffix}") for n in itertools.count(2))
        return next(each for each in numbered if not each.exists())

    def _write(self, row: int) -> None:
        """Write what is there of a row; a file that cannot be written is the log's, never the request's, error."""
        request = self._requests.pop(row, None)
        if request is None or not request.pieces:
            return
        states = torch.cat(request.pieces)
        token_ids = torch.tensor(self._rows.history(row))[: len(states)].long()
        states = states[: len(token_ids)].view(len(token_ids), len(self._tap.feature_layers), -1)
        if states.nbytes > self._left_bytes:
            if self._left_bytes >= 0:
                _logger.warning("%s has all the hidden states that extract_hidden_states_gib allows", self._folder)
            self._left_bytes = -1
            return
        self._left_bytes -= states.nbytes
        layers = ",".join(map(str, self._tap.feature_layers))
        path = self._free_path(request.request_id)
        part = path.with_suffix(".part")
        try:
            save_file(
                {"token_ids": token_ids, "hidden_states": states.contiguous()},
                part,
                {"request_id": request.request_id.rpartition("/")[0] or request.request_id, "layers": layers},
            )
            part.replace(path)
            self._written[request.request_id] = (path, states.nbytes)
        except Exception:
            _logger.exception("the hidden states of request %s could not be written", request.request_id)


def _without_drafts(pending: PendingResult) -> PendingResult:
    """The results, behind which nothing is drafted."""

    def finish() -> ModelRunnerOutput:
        result = pending()
        result.drafts_follow = False
        return result

    return finish
