"""`EncoderRunner`: the steps of an engine that has towers and no language model.

Towers read what a step says, the embeddings go to where other engines find them, and a request whose prompt is through
gets the token that ends it. Knows no logits and no KV cache.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch

from quire_interfaces.encoder_cache import EncoderCacheConnector
from quire_interfaces.media import PromptMedia
from quire_interfaces.platforms import platform_of_type
from quire_interfaces.step import ModelRunnerOutput, RequestFailure, SchedulerOutput
from quire_runner.media import EncoderCache
from quire_runner.protocols import EncodeMedia

__all__ = ["EncoderRunner"]


class EncoderRunner:
    """Implements `quire_interfaces.Executor`, in the caller's thread.

    Args:
        encode: Has towers read items.
        device: Where the towers are.
        connector: Keeps what they make; closed with the runner. A step ends when all of it is kept.
    """

    def __init__(self, encode: EncodeMedia, device: torch.device, connector: EncoderCacheConnector) -> None:
        self._device = device
        self._media: dict[int, PromptMedia] = {}
        self._end_token_ids: dict[int, int] = {}
        """Row -> the token that ends its request."""
        self._cache = EncoderCache(encode, self._media, device, connector)
        self._connector = connector

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step. The future is done."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            with torch.inference_mode():
                future.set_result(self._run(output))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        platform_of_type(self._device.type).use(str(self._device))
        for row in output.freed_rows:
            self._media.pop(row, None)
            self._end_token_ids.pop(row, None)
        for new in output.new_rows:
            self._end_token_ids[new.row] = min(new.stop_token_ids)
            if new.media is not None:
                self._media[new.row] = new.media
        encoded = self._cache.update(output)
        failed_rows = self._cache.missing(output, encoded.failed)
        self._connector.flush()
        if self._connector.is_stopped:
            failure = RequestFailure("what was encoded could not be kept: the disk takes nothing (see the log)")
            failed_rows = dict.fromkeys(output.rows, failure)
        ends = [samples and row not in failed_rows for row, samples in zip(output.rows, output.samples, strict=True)]
        return ModelRunnerOutput(
            step_id=output.step_id,
            sampled_token_ids=[
                [self._end_token_ids[row]] if end else [] for row, end in zip(output.rows, ends, strict=True)
            ],
            failed_rows=failed_rows,
            failed_media=encoded.failed,
            encoded_media=encoded.items,
            encode_seconds=encoded.timer.seconds(),
        )

    def close(self) -> None:
        """Close the connector. Idempotent."""
        self._cache.close()
