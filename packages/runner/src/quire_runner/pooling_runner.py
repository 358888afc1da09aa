"""`PoolingRunner`: the steps of an engine whose network is an encoder. Whole texts, side by side, without padding; or
images, of which a tower makes vectors; or sounds, which an encoder reads in place of texts.

A step reads its texts in one pass, pools them, and forgets them: nothing of a text stays behind its step but its
output. Knows no logits, no KV cache, and no pooling methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_interfaces.media import PromptMedia
from quire_interfaces.platforms import platform_of
from quire_interfaces.pooling import PooledOutput, PoolingParams
from quire_interfaces.step import ModelRunnerOutput, NewRow, RequestFailure, SchedulerOutput
from quire_ops import LoraTokens, to_device, torch_device
from quire_runner.affinity import bind_team, choose_cores
from quire_runner.config import RunnerConfig
from quire_runner.encoder_inputs import sound_features
from quire_runner.media import EncodedMedia, EncoderCache
from quire_runner.output import PendingResult, ReadyResult
from quire_runner.protocols import EncodesTexts, PoolsTexts

__all__ = ["PoolingRunner", "pooled_outputs"]


class PoolingRunner:
    """Reads and pools texts. Implements `quire_interfaces.Executor`, in the caller's thread.

    Args:
        network: The encoder, on its device, weights loaded.
        pooler: Makes outputs of hidden states, on the same device.
        config: The device, the threads and cores of a step, and the length from which on texts are read in chunks.
        embedding_tasks: Tasks whose adapters are in the network's slots, by the number of the slot.
    """

    def __init__(
        self, network: EncodesTexts, pooler: PoolsTexts, config: RunnerConfig, embedding_tasks: Sequence[str] = ()
    ) -> None:
        self._network = network
        self._pooler = pooler
        self._device, self._platform = torch_device(config.device), platform_of(config.device)
        self._config = config
        self._chunk_tokens = config.max_model_len
        self._task_slots = {task: slot for slot, task in enumerate(embedding_tasks)}
        self._cores = choose_cores(config.cpu_affinity, config.num_threads) if self._device.type == "cpu" else ()
        self._bind_first = bool(self._cores)
        num_threads = len(self._cores) or config.num_threads
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._texts: dict[int, NewRow] = {}
        """Row -> its text."""
        self._images: dict[int, PromptMedia] = {}
        """Row -> its image, of prompts that are one."""
        self._media = EncoderCache(network.encode_media, self._images, self._device)

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
        self._platform.use(self._config.device)
        if self._bind_first:  # now, because the team belongs to the thread that runs the steps
            self._bind_first = False
            bind_team(self._cores)
        for row in output.freed_rows:
            self._texts.pop(row, None)
            self._images.pop(row, None)
        for new in output.new_rows:
            self._texts[new.row] = new
            if new.media is not None and any(span.length for span in new.media.spans):
                self._images[new.row] = new.media
        encoded, failed = self._encode_images(output)
        rows = [row for row in output.rows if row not in failed]
        if not rows and encoded is None:
            return ReadyResult(ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[]))
        texts = [self._texts[row] for row in output.rows]
        for text, num_scheduled in zip(texts, output.num_scheduled_tokens, strict=True):
            if num_scheduled != len(text.token_ids):
                length = len(text.token_ids)
                raise RuntimeError(f"an encoder reads {length} tokens at once, {num_scheduled} were scheduled")
        with torch.inference_mode():
            pooled = self._pool_apart(rows)

        def finish() -> ModelRunnerOutput:
            result = ModelRunnerOutput(
                step_id=output.step_id,
                sampled_token_ids=[
                    [] if row in failed else [min(text.stop_token_ids)]
                    for row, text in zip(output.rows, texts, strict=True)
                ],
                pooled=dict(zip(rows, pooled_outputs(pooled), strict=True)),
            )
            result.failed_rows |= failed
            if encoded is not None:
                result.failed_media, result.encoded_media = encoded.failed, encoded.items
                result.encode_seconds = encoded.timer.seconds()
            return result

        return finish

    has_deferred_work = False

    def use_slack(self) -> None:
        """Nothing is deferred."""

    def close(self) -> None:
        """Forget all texts. Idempotent."""
        self._texts.clear()
        self._images.clear()

    def _encode_images(self, output: SchedulerOutput) -> tuple[EncodedMedia | None, dict[int, RequestFailure]]:
        """Have the tower read what the step says, None where it says nothing; and rows whose image is not there."""
        with torch.inference_mode():
            encoded = self._media.update(output) if output.encode or output.freed_media else None
        if not self._images:
            return encoded, {}
        return encoded, self._media.missing(output, {} if encoded is None else encoded.failed)

    def _pool_apart(self, rows: list[int]) -> list[Tensor]:
        """The output of each row, on the device: texts with tokens that are not attended to are read by themselves,
        since the network computes these in another way, and no text's bits may depend on what stands beside it."""
        outputs: dict[int, Tensor] = {}
        images = [row for row in rows if row in self._images] if self._images else []
        if images:
            vectors = torch.cat([self._media.embeds_of(self._images[row]) for row in images])
            params = [_params_of(self._texts[row]) for row in images]
            outputs.update(zip(images, self._pooler.finish_vectors(vectors, params), strict=True))
        for is_expanded in (False, True):
            texts = {
                row: text
                for row in rows
                if row not in outputs and bool(_expansion_len(text := self._texts[row])) == is_expanded
            }
            if texts:
                outputs.update(zip(texts, self._pool(list(texts.values())), strict=True))
        return [outputs[row] for row in rows]

    def _pool(self, texts: list[NewRow]) -> list[Tensor]:
        """The output of each text, on the device: of a text in chunks, the mean of theirs by their tokens."""
        pieces = [chunk_lens(len(text.token_ids), self._chunk_tokens) for text in texts]
        lens = [length for each in pieces for length in each]
        batch = encoder_batch(texts, lens, self._device, self._task_slots)
        params = [_params_of(text) for text, each in zip(texts, pieces, strict=True) for _ in each]
        hidden = self._network.encode_batch(batch)
        pooled = self._pooler.pool(hidden, lens, params, batch.input_ids)
        if len(lens) == len(texts):
            return pooled
        outputs, begin = [], 0
        for each in pieces:
            outputs.append(_mean(pooled[begin : begin + len(each)], each))
            begin += len(each)
        return outputs


def encoder_batch(
    texts: Sequence[NewRow], lens: list[int], device: torch.device, task_slots: Mapping[str, int]
) -> EncoderBatch:
    """Texts side by side.

    Args:
        texts: Each with its tokens, and the place where the second text of a pair begins; or with a sound.
        lens: Number of tokens of each, or of each chunk of them: positions begin anew.
        device: Where the batch is to be.
        task_slots: Task that texts are embedded for -> slot of its adapter; empty where there are none.
    """
    token_ids = np.concatenate([np.asarray(text.token_ids, dtype=np.int64) for text in texts])
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lens])
    types = None
    if any(text.second_segment_start for text in texts):
        whole_lens = [len(text.token_ids) for text in texts]
        starts = np.repeat([text.second_segment_start or len(text.token_ids) for text in texts], whole_lens)
        types = to_device((positions >= starts).astype(np.int64), device)
    key_lens = None
    if any(_expansion_len(text) for text in texts):  # texts of a length: none of them is in chunks
        key_lens = [length - _expansion_len(text) for text, length in zip(texts, lens, strict=True)]
    return EncoderBatch(
        input_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        lens=lens,
        token_type_ids=types,
        key_lens=key_lens,
        lora=_adapters_of(texts, device, task_slots) if task_slots else None,
        features=sound_features(texts, device),
    )


def _adapters_of(texts: Sequence[NewRow], device: torch.device, task_slots: Mapping[str, int]) -> LoraTokens | None:
    """The adapters of the tokens of all texts; None where no text has one."""
    tasks = [None if text.pooling_params is None else text.pooling_params.embedding_task for text in texts]
    slots = [-1 if task is None else task_slots[task] for task in tasks]
    return LoraTokens.of(np.repeat(np.asarray(slots, dtype=np.int32), [len(text.token_ids) for text in texts]), device)


def _expansion_len(text: NewRow) -> int:
    """Number of tokens at the end of a text that the others do not attend to."""
    return 0 if text.pooling_params is None else text.pooling_params.expansion_length


def chunk_lens(num_tokens: int, chunk_tokens: int) -> list[int]:
    """Numbers of tokens of the chunks of a text; one where it is not longer than a chunk."""
    full, rest = divmod(num_tokens, chunk_tokens)
    return [chunk_tokens] * full + ([rest] if rest else [])


def _mean(pooled: list[Tensor], lens: list[int]) -> Tensor:
    """The mean of vectors [dimensions], weighted by `lens`."""
    if len(pooled) == 1:
        return pooled[0]
    weights = torch.tensor(lens, dtype=torch.float32, device=pooled[0].device) / sum(lens)
    return (torch.stack(pooled) * weights[:, None]).sum(0)


def _params_of(text: NewRow) -> PoolingParams:
    """What a text's request wants; every request of an engine that pools has such."""
    assert text.pooling_params is not None
    return text.pooling_params


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
