"""What every `LogitsProcessor` must do, as tests to inherit.

    class TestMyProcessor(LogitsProcessorSuite):
        def make_processor(self): return MyProcessor(...)

The suite knows nothing of what the processor is for; it checks what the sampler and the other requests rely on. It
imports torch when a test runs, not before.
"""

from __future__ import annotations

from typing import Any

from quire_interfaces import LogitsProcessor

__all__ = ["LogitsProcessorSuite"]

HISTORIES = [([1], 1), ([1, 2, 3], 3), ([1, 2, 3, 4], 1), ([5] * 40, 10)]
"""(token_ids, num_prompt_tokens): nothing generated yet, and some."""


class LogitsProcessorSuite:
    """Tests of the `LogitsProcessor` contract. Implement `make_processor`; override nothing else."""

    vocab_size = 64
    """Length of the logits; raise it if the processor needs larger token ids."""

    def make_processor(self) -> LogitsProcessor:
        raise NotImplementedError

    def _logits(self) -> Any:
        import torch

        return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(0))

    def test_returns_logits_of_the_same_shape_dtype_and_device(self) -> None:
        processor = self.make_processor()
        for token_ids, num_prompt_tokens in HISTORIES:
            logits = self._logits()
            result = processor(token_ids, num_prompt_tokens, logits)
            assert result.shape == logits.shape
            assert result.dtype == logits.dtype
            assert result.device == logits.device

    def test_makes_no_nan_and_no_plus_infinity(self) -> None:
        processor = self.make_processor()
        for token_ids, num_prompt_tokens in HISTORIES:
            result = processor(token_ids, num_prompt_tokens, self._logits())
            assert not bool(result.isnan().any())
            assert not bool((result == float("inf")).any())

    def test_same_input_same_output_whatever_came_between(self) -> None:
        """Requests are preempted, recomputed and mixed with strangers: a processor must not remember calls."""
        processor = self.make_processor()
        first = [processor(ids, num_prompt, self._logits()).clone() for ids, num_prompt in HISTORIES]
        again = [processor(ids, num_prompt, self._logits()).clone() for ids, num_prompt in reversed(HISTORIES)]
        fresh = [self.make_processor()(ids, num_prompt, self._logits()).clone() for ids, num_prompt in HISTORIES]
        for result, second, third in zip(first, reversed(again), fresh, strict=True):
            assert result.tolist() == second.tolist() == third.tolist()

    def test_leaves_the_history_alone(self) -> None:
        processor = self.make_processor()
        for token_ids, num_prompt_tokens in HISTORIES:
            given = list(token_ids)
            processor(given, num_prompt_tokens, self._logits())
            assert given == token_ids
