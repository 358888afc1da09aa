"""Protocols of what a runner is given: the network, the network's adapters, and who looks at logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import EncoderBatch, ForwardBatch
from quire_interfaces.pooling import PoolingParams
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_ops import DecodeRows, LoraTokens, RunDecode

__all__ = [
    "EncodeMedia", "EncodesTexts", "HearsSounds", "LogitsTap", "PoolsTexts", "RunnableNetwork", "RunsSteps",
    "StepAdapters",
]  # fmt: skip

LogitsTap = Callable[[list[int], list[int], Tensor], None]
"""(rows, positions, logits [N, vocab_size] float32): called once per step that samples, before the sampler changes the
logits; a tap that keeps them must copy. Logits n say what follows the token at `positions[n]` of `rows[n]`."""


EncodeMedia = Callable[[str, list[dict[str, Tensor]]], list[Tensor]]
"""(modality, arrays of each item) -> [num_embeds, width] of each: `RunnableNetwork.encode_media`."""


class RunnableNetwork(Protocol):
    """A network as the runner uses it; every network of `quire_models` is one."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden_size] of the step's tokens; writes their keys and values into the KV caches."""

    def forward_with_features(self, batch: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `forward`, and beside it the inputs of `layers`, [T, len(layers) * hidden_size], for drafters that read
        them."""

    def encode_media(self, modality: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """What a tower makes of items, [num_embeds, width] each; for networks that have one.

        Args:
            modality: "image", "video" or "audio".
            items: The arrays of each, by the tower's names.
        """

    def encode(self, batch: ForwardBatch) -> None:
        """Have the encoder read `batch.encoder`, before `forward`; for networks that have one."""

    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size] float32; `lora` says which hidden states have adapters."""

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """The network joined with the rows, for steps in which every row has one token to compute; None where
        nothing runs these in one call."""

    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """[N, hidden_size] -> per row the largest logit's token [N] int64, the lowest id among equals, and that logit
        [N] float32, NaN where the row has NaN."""


class EncodesTexts(Protocol):
    """An encoder alone, as `PoolingRunner` uses it."""

    def encode_media(self, modality: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Embeddings [num_embeds, width] of images (`EncodeMedia`), where it reads any."""

    def encode_batch(self, batch: EncoderBatch) -> Tensor:
        """Hidden states [E, hidden_size] of the tokens of whole texts, behind the last layer."""


class HearsSounds(Protocol):
    """An encoder of sounds that knows what is said, as `SoundPooler` uses it."""

    def hear(self, hidden: Tensor, lens: Sequence[int]) -> list[Tensor]:
        """[tokens, 4] of each sound (`quire_interfaces.PooledOutput`).

        Args:
            hidden: Hidden states [E, hidden_size] of the frames of all sounds, one behind the other.
            lens: Number of frames of each.
        """


class PoolsTexts(Protocol):
    """From hidden states to outputs; `quire_pooling.Pooler` is one."""

    def pool(
        self, hidden: Tensor, lens: Sequence[int], params: Sequence[PoolingParams], token_ids: Tensor
    ) -> list[Tensor]:
        """The outputs of whole texts: [D], or [tokens, D] of tasks per token.

        Args:
            hidden: Hidden states [T, hidden_size] of all texts, one behind the other.
            lens: Number of tokens of each text.
            params: Of each text, with a task.
            token_ids: [T] int64.
        """

    def finish_vectors(self, vectors: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
        """The outputs [D] of images, of which towers have made vectors [N, embedding_size]."""


class RunsSteps(Protocol):
    """A runner: `ModelRunner`, or `PoolingRunner`."""

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; raises what computing it raised."""

    def launch(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start one step. What is returned waits for its results, in any thread."""

    @property
    def has_deferred_work(self) -> bool:
        """Whether `use_slack` has something to do."""

    def use_slack(self) -> None:
        """Do one piece of the work that was deferred until no step waits, in the thread that runs steps."""

    def close(self) -> None:
        """Give all memory back. Idempotent."""


class StepAdapters(Protocol):
    """The adapters of a network, step by step; `quire_lora.AdapterRuntime` is one."""

    def place(self, slot: int, version: str) -> None:
        """Fill a slot, unless this version is in it."""

    def merge_for_step(self, slots: NDArray[np.int32]) -> int:
        """Prepare the network's own weights for a step, before anything of it is computed.

        Args:
            slots: [S] the slot of each of the step's rows, -1 for none.

        Returns:
            The slot whose adapter is in the weights, so that its rows are like those without one; -1 for none.
        """

    def tokens_of(self, slots: NDArray[np.int32]) -> LoraTokens | None:
        """For `ForwardBatch.lora`: `slots` are those of the batch's tokens [T], -1 for none."""

    def captured_tokens_of(self, slots: NDArray[np.int32], size: int) -> LoraTokens | None:
        """As `tokens_of`, for a step that is captured in a graph of `size` tokens, or was; None where it cannot be."""

    def logit_tokens_of(self, slots: NDArray[np.int32]) -> LoraTokens | None:
        """For `Network.compute_logits`: `slots` are those of the hidden states [N], -1 for none."""

    def changes_vocabulary(self, slots: NDArray[np.int32]) -> bool:
        """Whether any of these slots changes the embedding or the LM head."""
