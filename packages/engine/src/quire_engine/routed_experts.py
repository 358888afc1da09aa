"""The experts of a request's tokens, put together from what its outputs say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_engine.output_processor import RequestProcessor
from quire_engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire_interfaces import EngineCoreOutput, TokenExperts

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RoutedExpertsProcessor"]


class RoutedExpertsProcessor(RequestProcessor):
    """A `RequestProcessor` whose completions have their `routed_experts` when they end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._experts: dict[int, bytearray] = {}
        """Index of a completion -> the experts of its tokens so far."""
        self._form: TokenExperts | None = None
        """Any piece: what all have in common."""

    def process(self, output: EngineCoreOutput) -> RequestOutput | None:
        """Process an output of one completion. Returns None while the caller has nothing to get yet."""
        piece = output.routed_experts
        if piece is not None:
            self._form = piece
            experts = self._experts.setdefault(self._completions[output.request_id].index, bytearray())
            experts[piece.start * piece.token_bytes :] = piece.data  # computed anew, they stand for what was there
        return super().process(output)

    def _best(self) -> list[CompletionOutput]:
        self._attach(self._whole)
        return super()._best()

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[list[Logprob] | None] | None
    ) -> RequestOutput:
        if self._params.best_of is None:  # else they have been told apart already, and numbered by how good they are
            self._attach(outputs)
        return super()._output(outputs, prompt_logprobs)

    def _attach(self, completions: list[CompletionOutput]) -> None:
        """Give completions that have ended, under their own numbers, what is known of them."""
        for completion in completions:
            if completion.finished and completion.routed_experts is None:
                completion.routed_experts = self._array(completion.index)

    def _array(self, index: int) -> NDArray[Any] | None:
        """The experts of all tokens of the prompt and of the output but the last; fewer where it failed before."""
        import numpy as np

        form, experts = self._form, self._experts.get(index)
        if form is None or experts is None:
            return None
        num_output_tokens = next(each.num_tokens for each in self._completions.values() if each.index == index)
        num_tokens = len(self.prompt_token_ids) + num_output_tokens - 1
        array = np.frombuffer(bytes(experts), dtype=form.dtype).reshape(-1, form.num_layers, form.top_k)
        return array[:num_tokens]
