"""What pooling requests give back, in vLLM's names.

Numbers stay in the buffer in which they came from the engine: `embedding`, `probs` and the like make lists of them when
they are asked for, `data` a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from quire_engine import PooledRequestOutput
from quire_interfaces import PooledOutput, QuireError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]


class PoolingOutput:
    """The pooled output of one prompt.

    Args:
        pooled: As the engine gave it.
    """

    __slots__ = ("pooled",)

    def __init__(self, pooled: PooledOutput) -> None:
        self.pooled = pooled
        """float32 numbers as bytes, and their shape; needs no torch."""

    @property
    def data(self) -> torch.Tensor:
        """The numbers as a tensor, float32, [dimensions] or [tokens, dimensions]; imports torch."""
        import torch

        return torch.frombuffer(bytearray(self.pooled.data), dtype=torch.float32).reshape(self.pooled.shape)

    def tolist(self) -> list[Any]:
        """The numbers as a list, or as a list of a list per token; needs no torch."""
        if 0 in self.pooled.shape:
            return []
        view = memoryview(self.pooled.data).cast("B")
        return view.cast("f", self.pooled.shape).tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.pooled == other.pooled

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.pooled.shape})"


class EmbeddingOutput(PoolingOutput):
    """The embedding of one prompt."""

    __slots__ = ()

    @property
    def embedding(self) -> list[float]:
        """The vector."""
        return self.tolist()

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return self.pooled.shape[-1]


class ClassificationOutput(PoolingOutput):
    """The classes of one prompt."""

    __slots__ = ()

    @property
    def probs(self) -> list[float]:
        """Probability of each class, by its number; logits where `use_activation` was False."""
        return self.tolist()

    @property
    def num_classes(self) -> int:
        return self.pooled.shape[-1]


class ScoringOutput(PoolingOutput):
    """The score of one prompt, or of one pair."""

    __slots__ = ()

    @property
    def score(self) -> float:
        """The one number."""
        (score,) = memoryview(self.pooled.data).cast("B").cast("f")
        return float(score)


Output = TypeVar("Output", bound=PoolingOutput)


class PoolingRequestOutput(Generic[Output]):
    """All of one pooling request.

    Args:
        output: As the engine gave it.
    """

    __slots__ = ("_outputs", "output")
    output_type: type[PoolingOutput] = PoolingOutput

    def __init__(self, output: PooledRequestOutput) -> None:
        self.output = output
        """As the engine gave it."""
        self._outputs: Any = None if output.pooled is None else self.output_type(output.pooled)

    @classmethod
    def failed(cls, request_id: str, error: QuireError) -> Self:
        """What a prompt that cannot run gives where its neighbours are answered."""
        return cls(PooledRequestOutput(request_id=request_id, packed_token_ids=b"", pooled=None, error=error))

    @property
    def request_id(self) -> str:
        return self.output.request_id

    @property
    def outputs(self) -> Output:
        """The output.

        Raises:
            QuireError: there is none (`error`).
        """
        if self.output.error is not None:
            raise self.output.error
        outputs: Output = self._outputs
        return outputs

    @property
    def error(self) -> QuireError | None:
        """Why there is no output; None where there is one."""
        return self.output.error

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as it was read, truncated and with its special tokens; a new list at each call."""
        return self.output.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self.output.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that the prefix cache had."""
        return self.output.num_cached_tokens

    @property
    def finished(self) -> bool:
        return True

    def __repr__(self) -> str:
        outputs = self._outputs if self.error is None else self.error
        return f"{type(self).__name__}(request_id={self.request_id!r}, outputs={outputs!r})"


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """An embedding request's."""

    __slots__ = ()
    output_type = EmbeddingOutput


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A classification request's."""

    __slots__ = ()
    output_type = ClassificationOutput


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A scoring request's."""

    __slots__ = ()
    output_type = ScoringOutput
