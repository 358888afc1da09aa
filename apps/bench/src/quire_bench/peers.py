"""Other engines on the same checkpoint and the same requests, in the same run. Each is used only when installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from quire_bench.workload import BenchRequest
from quire_interfaces import ConfigError, QuireError

__all__ = ["PEERS", "Peer", "TransformersPeer", "load_peer"]


class Peer(Protocol):
    """Another engine, loaded."""

    name: str

    def run(self, requests: Sequence[BenchRequest]) -> float:
        """Serve all requests, each with at least the tokens it asks for; the seconds it took."""


class TransformersPeer:
    """Hugging Face `generate` in batches, greedy, without an end token.

    A batch is padded on the left to its longest prompt and runs to its longest output; tokens beyond what a request
    asked for are not counted, neither as its own nor against it.
    """

    name = "transformers"

    def __init__(self, model: Path, *, dtype: str, num_threads: int | None, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        if batch_size < 1:
            raise ConfigError(f"the peer's batch size must be at least 1, got {batch_size}", field="peer_batch_size")
        if num_threads:
            torch.set_num_threads(num_threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        # Not the checkpoint's own: its penalties and temperatures are not applied on the other side either.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._batch_size = batch_size

    def run(self, requests: Sequence[BenchRequest]) -> float:
        start = time.perf_counter()
        for first in range(0, len(requests), self._batch_size):
            self._generate(requests[first : first + self._batch_size])
        return time.perf_counter() - start

    def _generate(self, requests: Sequence[BenchRequest]) -> None:
        torch = self._torch
        width = max(len(request.prompt_token_ids) for request in requests)
        longest = max(request.output_len for request in requests)
        input_ids = torch.zeros((len(requests), width), dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(requests):
            count = len(request.prompt_token_ids)
            input_ids[row, width - count :] = torch.tensor(request.prompt_token_ids)
            mask[row, width - count :] = 1
        with torch.inference_mode():
            output = self._model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=longest)
        if output.shape != (len(requests), width + longest):
            raise QuireError(f"transformers stopped after {output.shape[1] - width} of {longest} tokens")


PEERS: dict[str, type[TransformersPeer]] = {"transformers": TransformersPeer}


def load_peer(name: str, model: Path, *, dtype: str, num_threads: int | None, batch_size: int) -> Peer:
    """Load a peer by name.

    Args:
        name: A key of `PEERS`.
        model: Checkpoint folder.
        dtype: float32, float16 or bfloat16.
        num_threads: Of the processor; None leaves it to the peer.
        batch_size: Requests it runs at once.

    Raises:
        ConfigError: unknown name, the peer is not installed, or a batch size below 1.
    """
    if name not in PEERS:
        raise ConfigError(f"peer must be one of {', '.join(PEERS)}, got {name!r}", field="peer")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"the peer {name} is not installed; install it with `pip install {name}`", field="peer")
    return PEERS[name](model, dtype=dtype, num_threads=num_threads, batch_size=batch_size)
