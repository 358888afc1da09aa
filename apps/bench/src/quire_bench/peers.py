"""Other engines on the same checkpoint and the same requests, in the same run. Each is used only when installed."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any, Protocol

from quire_interfaces import ConfigError

from quire_bench.workload import BenchRequest

__all__ = ["PEERS", "Peer", "TransformersPeer", "load_peer"]


class Peer(Protocol):
    """Another engine, loaded."""

    name: str

    def run(self, requests: list[BenchRequest]) -> tuple[float, int]:
        """Serve all requests; seconds, and generated tokens that were asked for."""


class TransformersPeer:
    """Hugging Face `generate`, batched and left-padded; one batch runs to its longest output."""

    name = "transformers"

    def __init__(self, model: Path, *, dtype: str, num_threads: int | None, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if num_threads:
            torch.set_num_threads(num_threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model.eval()
        self._batch_size = batch_size

    def run(self, requests: list[BenchRequest]) -> tuple[float, int]:
        start = time.perf_counter()
        for first in range(0, len(requests), self._batch_size):
            self._generate(requests[first : first + self._batch_size])
        return time.perf_counter() - start, sum(request.output_len for request in requests)

    def _generate(self, requests: list[BenchRequest]) -> None:
        torch = self._torch
        width = max(len(request.prompt_token_ids) for request in requests)
        input_ids = torch.zeros((len(requests), width), dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(requests):
            count = len(request.prompt_token_ids)
            input_ids[row, width - count :] = torch.tensor(request.prompt_token_ids)
            mask[row, width - count :] = 1
        longest = max(request.output_len for request in requests)
        with torch.inference_mode():
            self._model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )


PEERS: dict[str, type[TransformersPeer]] = {"transformers": TransformersPeer}


def load_peer(name: str, model: Path, **settings: Any) -> Peer:
    """Load a peer by name.

    Raises:
        ConfigError: unknown name, or the peer is not installed.
    """
    if name not in PEERS:
        raise ConfigError(f"peer must be one of {', '.join(PEERS)}, got {name!r}", field="peer")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"the peer {name} is not installed; install it with `pip install {name}`", field="peer")
    return PEERS[name](model, **settings)
