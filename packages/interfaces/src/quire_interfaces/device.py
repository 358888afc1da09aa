"""Seams of the tensor side. This module is free of torch: `Tensor` stands for `torch.Tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Drafter", "Executor", "LinearMethod", "LogitsProcessor", "QuantKey", "RequestDrafter", "Tensor"]

Tensor = Any


class Executor(Protocol):
    """Runs steps on the device(s), in order."""

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step. Steps run strictly in the order of the calls. The future raises what the step raised; a step
        that raised left the rows' token history as it was before."""

    def close(self) -> None:
        """Finish running steps and give all memory back. Idempotent."""


class Drafter(Protocol):
    """Proposes tokens that probably follow."""

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens likely to follow the sequence `token_ids`; empty when it has no idea.
        Must be deterministic and must not change anything visible."""


class RequestDrafter(Protocol):
    """Proposes tokens that probably follow, and remembers its requests. One thread calls everything."""

    def begin(self, key: int, token_ids: Sequence[int], num_prompt_tokens: int, salt: str | None = None) -> None:
        """A request begins, or goes on after a preemption.

        Args:
            key: Its number until `end`; an earlier request of this number is ended.
            token_ids: Prompt, and the output so far.
            num_prompt_tokens: How many of them are the prompt.
            salt: What one request's text tells may help requests with the same salt only.
        """

    def end(self, key: int) -> None:
        """The request is over, or preempted. Unknown numbers are ignored."""

    def propose(self, key: int, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens likely to follow.

        Args:
            key: A request that began.
            token_ids: All of its tokens; they go on from those given before.
            max_tokens: Most tokens to propose.
        """


class LogitsProcessor(Protocol):
    """Changes the logits of one request before sampling."""

    def __call__(self, token_ids: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
        """Args:
            token_ids: Prompt and output so far.
            num_prompt_tokens: How many of them are the prompt.
            logits: [vocab_size] float32, may be changed in place.

        Returns:
            [vocab_size] float32. An exception fails this request only.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantKey:
    """The form of a quantized matrix: of a weight, or of the inputs that it is multiplied with."""

    dtype: str
    """Of the elements: "int4", "int8", "fp8_e4m3", "fp4_e2m1"; "coded" where no kernel takes them as they are."""
    scale_dtype: str
    """ "compute" where the compute dtype holds every scale exactly, else "float32" or the name of the dtype."""
    granularity: str
    """What shares a scale: "tensor", "channel" (all inputs of an output), "group" (some of them), "block" (of some
    outputs, too), "token"."""
    group_size: int | None = None
    """Inputs of a group."""
    symmetric: bool = True
    """There are no zero points."""
    ordered: bool = True
    """Inputs of a group lie side by side."""
    static: bool = False
    """Of inputs: the checkpoint brings their scales; else they follow from the inputs of each step."""

    def __str__(self) -> str:
        groups = f"groups of {self.group_size}" if self.granularity == "group" else self.granularity
        extra = [] if self.symmetric else ["zero points"]
        fixed = ["from the checkpoint"] if self.static else []
        return ", ".join([self.dtype, groups, f"{self.scale_dtype} scales", *extra, *fixed])


class LinearMethod(Protocol):
    """How a linear layer stores its weight and multiplies with it: plain, int8 or int4 weight-only, ...

    A method is stateless; the layer owns the tensors it makes.
    """

    name: str
    op: str
    """The op behind `apply`."""
    logits_op: str
    """The op behind `logits`."""

    def make_weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """Turn a loaded weight [out_features, in_features] (and bias [out_features]) into what `apply` needs."""

    def apply(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features], dtype of x."""

    def logits(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features] float32, as it is summed, without a bias."""
