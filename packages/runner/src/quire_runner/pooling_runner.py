"""`PoolingRunner`: the steps of an engine whose network is an encoder. Whole texts, side by side, without padding.

A step reads its texts in one pass, pools them, and forgets them: nothing of a text stays behind its step but its
output. Knows no logits, no KV cache, and no pooling methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_interfaces.pooling import PooledOutput
from quire_interfaces.step import ModelRunnerOutput, NewRow, SchedulerOutput
from quire_ops import to_device
from quire_runner.output import PendingResult, ReadyResult
from quire_runner.protocols import EncodesTexts, PoolsTexts

__all__ = ["PoolingRunner", "pooled_outputs"]


class PoolingRunner:
    """Reads and pools texts. Implements `quire_interfaces.Executor`, in the caller's thread.

    Args:
        network: The encoder, on its device, weights loaded.
        pooler: Makes outputs of hidden states, on the same device.
        device: Where both are.
    """

    def __init__(self, network: EncodesTexts, pooler: PoolsTexts, device: torch.device) -> None:
        self._network = network
        self._pooler = pooler
        self._device = device
        self._texts: dict[int, NewRow] = {}
        """Row -> its text."""

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step. The future is done."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self.run(output))
        except Exception as error:
            future.set_exception(error)
        return future

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; raises as `launch` does."""
        return self.launch(output)()

    def launch(self, output: SchedulerOutput) -> PendingResult:
        """Start one step.

        Returns:
            What waits for the step's results, to be called once.

        Raises:
            RuntimeError: the step has a part of a text, which an encoder cannot read.
            Exception: whatever the network or the pooler raises.
        """
        for row in output.freed_rows:
            self._texts.pop(row, None)
        for new in output.new_rows:
            self._texts[new.row] = new
        if not output.rows:
            return ReadyResult(ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[]))
        texts = [self._texts[row] for row in output.rows]
        for text, num_scheduled in zip(texts, output.num_scheduled_tokens, strict=True):
            if num_scheduled != len(text.token_ids):
                raise RuntimeError(
                    f"{text.request_id}: {num_scheduled} of {len(text.token_ids)} tokens; all are needed"
                )
        with torch.inference_mode():
            pooled = self._pool(texts)

        def finish() -> ModelRunnerOutput:
            outputs = pooled_outputs(pooled)
            return ModelRunnerOutput(
                step_id=output.step_id,
                sampled_token_ids=[[min(text.stop_token_ids)] for text in texts],
                pooled=dict(zip(output.rows, outputs, strict=True)),
            )

        return finish

    def close(self) -> None:
        """Forget all texts. Idempotent."""
        self._texts.clear()

    def _pool(self, texts: list[NewRow]) -> list[Tensor]:
        """The output of each text, on the device."""
        lens = [len(text.token_ids) for text in texts]
        batch = encoder_batch(texts, lens, self._device)
        params = [text.pooling_params for text in texts]
        assert None not in params, "an encoder generates nothing"
        hidden = self._network.encode_batch(batch)
        return self._pooler.pool(hidden, lens, params, batch.input_ids)  # type: ignore[arg-type]


def encoder_batch(texts: Sequence[NewRow], lens: list[int], device: torch.device) -> EncoderBatch:
    """Texts side by side.

    Args:
        texts: Each with its tokens, and the place where the second text of a pair begins.
        lens: Number of tokens of each.
        device: Where the batch is to be.
    """
    token_ids = np.concatenate([np.asarray(text.token_ids, dtype=np.int64) for text in texts])
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lens])
    return EncoderBatch(input_ids=to_device(token_ids, device), positions=to_device(positions, device), lens=lens)


def pooled_outputs(pooled: Sequence[Tensor]) -> list[PooledOutput]:
    """Outputs on the device, as they cross between processes: read back together, in one buffer.

    Args:
        pooled: Floating-point tensors of any shapes.
    """
    if not pooled:
        return []
    flat = torch.cat([each.reshape(-1).to(torch.float32) for each in pooled]).cpu().numpy().astype("<f4", copy=False)
    buffer, outputs, begin = flat.tobytes(), [], 0
    for each in pooled:
        end = begin + 4 * each.numel()
        outputs.append(PooledOutput(buffer[begin:end], tuple(each.shape)))
        begin = end
    return outputs
