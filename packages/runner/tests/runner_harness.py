"""A small causal network on the paged cache, its dense double, and a driver with the real scheduler and block manager.

The network is written with plain gathers and float64 arithmetic: it shares no code with the attention backends, and
its results depend on batching and chunking only in the last bits of float64. It begins by filling the cache with NaN,
so that a token read from a slot that was never written spoils everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quire_attention.batch import ForwardBatch
from quire_interfaces import (
    AdmissionRule,
    EngineCoreOutput,
    Executor,
    FinishReason,
    FullAttentionSpec,
    KVCachePlan,
    KVCacheSpec,
    Request,
    SamplingParams,
    SchedulerOutput,
    SlidingWindowSpec,
)
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_models import DecoderLM, ModelConfig, build_model
from quire_ops import DecodeRows, LoraTokens, PagedLayout
from quire_runner import ModelRunner, RunnerConfig, ThreadedExecutor
from quire_sampling import Sampler, SamplingState
from quire_scheduler import KVTransfers, Scheduler, SchedulerConfig

VOCAB_SIZE = 67
NUM_HEADS = 2
HEAD_DIM = 8
WIDTH = NUM_HEADS * HEAD_DIM
FULL = (None, None)
HYBRID = (None, 5, None, 5)


def cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Blocks first: keys, then values."""
    return num_blocks, 2, block_size, num_kv_heads, head_dim


class TinyNetwork(nn.Module):
    """Embedding, attention layers (full, or over a window), tied head.

    Args:
        windows: Per layer: sliding window, or None for full attention.
        fail: Called with each batch before anything is computed; may raise.
    """

    def __init__(
        self, windows: Sequence[int | None] = FULL, *, fail: Callable[[ForwardBatch], None] | None = None
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(windows))

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5)

        self.windows = tuple(windows)
        self.embedding = nn.Parameter(torch.randn(VOCAB_SIZE, WIDTH, generator=generator, dtype=torch.float64))
        self.qkv = nn.ParameterList([weight(3 * WIDTH, WIDTH) for _ in windows])
        self.out = nn.ParameterList([weight(WIDTH, WIDTH) for _ in windows])
        self.fail = fail
        self.num_forwards = 0
        self.num_encoded = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        shape = {"block_size": block_size, "num_kv_heads": NUM_HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
        return {
            f"layer.{i}": FullAttentionSpec(**shape)
            if window is None
            else SlidingWindowSpec(**shape, sliding_window=window)
            for i, window in enumerate(self.windows)
        }

    def forward(self, batch: ForwardBatch) -> Tensor:
        if self.num_forwards == 0:
            for cache in batch.kv_caches:
                cache.fill_(torch.nan)
        self.num_forwards += 1
        if self.fail is not None:
            self.fail(batch)
        x = self._embed(batch.input_ids, batch.positions)
        if batch.media is not None:
            x[batch.media.token_index] = batch.media.embeds.double()
        for layer, window in enumerate(self.windows):
            cache, metadata = batch.of_layer(layer)
            query, key, value = self._project(layer, x)
            _write(cache, metadata, key, value)
            parts = []
            starts = metadata.query_start_loc.tolist()
            for i, kv_len in enumerate(metadata.seq_lens.tolist()):
                q = query[starts[i] : starts[i + 1]]
                first = 0 if window is None else max(kv_len - len(q) - window + 1, 0)
                k, v = _read(cache, metadata, i, first, kv_len)
                parts.append(_attend(q, k, v, kv_len - len(q), first, window))
            x = x + torch.cat(parts) @ self.out[layer].T
        return x

    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        return (hidden @ self.embedding.T).to(torch.float32)

    def encode_media(self, modality: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Twice the pixels; a picture of nothing but zeros cannot be read."""
        self.num_encoded += len(items)
        if any(not item["pixels"].any() for item in items):
            raise ValueError("nothing to see")
        return [item["pixels"] * 2 for item in items]

    def bind_decode(self, rows: DecodeRows) -> None:
        return None

    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        max_logits, token_ids = self.compute_logits(hidden).max(dim=-1)
        return token_ids, max_logits

    def dense_logits(
        self, token_ids: Sequence[int], positions: Tensor | None = None, embeds: dict[int, Tensor] | None = None
    ) -> Tensor:
        """[n, VOCAB_SIZE] float32 logits of a whole sequence, without any cache. `embeds`: rows of tokens of media."""
        with torch.inference_mode():
            x = self._embed(torch.tensor(token_ids), torch.arange(len(token_ids)) if positions is None else positions)
            for token, row in (embeds or {}).items():
                x[token] = row.double()
            for layer, window in enumerate(self.windows):
                query, key, value = self._project(layer, x)
                x = x + _attend(query, key.double(), value.double(), 0, 0, window) @ self.out[layer].T
            return self.compute_logits(x)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """`positions`: [T], or [3, T], where the axes count differently much; equal ones are the same as one."""
        frequency = torch.arange(1, WIDTH + 1, dtype=torch.float64) / WIDTH
        if positions.ndim == 2:
            positions = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64) @ positions.double()
        return self.embedding[token_ids] + torch.sin(positions[:, None] * frequency)

    def _project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query in float64; key and value in the cache's float32."""
        normed = x / x.norm(dim=-1, keepdim=True) * WIDTH**0.5
        query, key, value = (normed @ self.qkv[layer].T).view(-1, 3, NUM_HEADS, HEAD_DIM).unbind(1)
        return query * 2, key.float(), value.float()


def _write(cache: Tensor, metadata: PagedLayout, key: Tensor, value: Tensor) -> None:
    blocks, offsets = metadata.slot_mapping // metadata.block_size, metadata.slot_mapping % metadata.block_size
    cache[blocks, 0, offsets] = key
    cache[blocks, 1, offsets] = value


def _read(cache: Tensor, metadata: PagedLayout, i: int, first: int, end: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(first, end)
    blocks, offsets = metadata.block_table[i].long()[place // metadata.block_size], place % metadata.block_size
    return cache[blocks, 0, offsets].double(), cache[blocks, 1, offsets].double()


def _attend(query: Tensor, key: Tensor, value: Tensor, q_start: int, k_start: int, window: int | None) -> Tensor:
    distance = (q_start + torch.arange(len(query)))[:, None] - (k_start + torch.arange(len(key)))[None]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(len(query), WIDTH)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}


def random_model(
    family: str,
    *,
    attention_backend: str | None = None,
    device: str = "cpu",
    max_loras: int = 0,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    **overrides: Any,
) -> DecoderLM:
    """A network of quire_models with random weights, which `change` may replace by name."""
    config = ModelConfig.from_dict(
        {
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            **FAMILIES[family],
            **overrides,
        }
    )
    model = build_model(
        config, dtype="float32", device=device, attention_backend=attention_backend, max_loras=max_loras
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters:
        scale = parameter.shape[-1] ** -0.5 * 1.5 if len(parameter.shape) > 1 else 1.0
        tensor = torch.randn(parameter.shape, generator=generator) * scale
        parameter.tensor = change(parameter.name, tensor).to(device)
    model.finish_loading()
    return model


def make_request(
    request_id: str, prompt: Sequence[int], *, max_tokens: int = 8, stop: Sequence[int] = (), **params: Any
) -> Request:
    params.setdefault("temperature", 0.0)
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop), **params)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=sampling,
        seed=sampling.seed or 0,
        stop_token_ids=frozenset(stop),
        max_tokens=max_tokens,
        reads_prefix_cache=sampling.prompt_logprobs is None,
    )


def reference_tokens(network: TinyNetwork, request: Request) -> list[int]:
    """The request alone, every token from a fresh dense pass over the whole sequence."""
    params = request.sampling_params
    state = SamplingState(1, VOCAB_SIZE)
    num_prompt = request.num_prompt_tokens
    state.set_row(0, params, seed=request.seed, num_prompt_tokens=num_prompt, stop_token_ids=request.stop_token_ids)
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        logits = network.dense_logits(tokens)[-1:].clone()
        sampled = Sampler(state).sample(logits, [0], torch.tensor([len(tokens) - 1]), torch.tensor([tokens]))
        tokens.append(int(sampled.token_ids[0]))
        if tokens[-1] in request.stop_token_ids and len(tokens) - num_prompt > params.min_tokens:
            break
    return tokens[num_prompt:]


@dataclass
class Outcome:
    """What a client would have seen of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None


class Engine:
    """Scheduler, block manager and runner on a `TinyNetwork`, with a step loop of the given depth."""

    def __init__(
        self,
        network: TinyNetwork | None = None,
        *,
        num_blocks: int = 200,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        num_speculative_tokens: int = 0,
        depth: int = 0,
        reads_apart: bool = False,
        prefix_caching: bool = True,
        cache_options: dict[str, Any] | None = None,
        rules: Sequence[AdmissionRule] = (),
        make_transfers: Callable[[KVCacheManager], KVTransfers] | None = None,
        config: dict[str, Any] | None = None,
        **runner_args: Any,
    ) -> None:
        self.network = network or TinyNetwork()
        specs = self.network.specs(block_size)
        self.plan: KVCachePlan = plan_kv_cache(specs, num_blocks=num_blocks)
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "num_speculative_tokens": num_speculative_tokens,
        }
        self.runner = ModelRunner(
            self.network,
            self.plan,
            RunnerConfig(dtype="float32", logits_chunk_tokens=3, **limits, **(config or {})),
            vocab_size=VOCAB_SIZE,
            cache_shape=cache_shape,
            layer_names=tuple(specs),
            **runner_args,
        )
        self.manager = KVCacheManager(
            self.plan,
            KVCacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
            **(cache_options or {}),
        )
        rules = [*rules, *([] if make_transfers is None else [make_transfers(self.manager)])]
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.manager, rules=rules)
        threads = ThreadedExecutor(self.runner, reads_apart=reads_apart) if depth > 0 else None
        self.executor: Executor = threads or self.runner
        self.depth = depth
        self.outcomes: dict[str, Outcome] = {}
        self.num_steps = 0
        self._in_flight: deque[tuple[SchedulerOutput, Any]] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.outcomes[request.request_id] = Outcome()
            self.scheduler.add_request(request)

    def step(self) -> bool:
        """Plan up to the depth, take in one result. False when there was nothing to do."""
        while len(self._in_flight) <= self.depth:
            output = self.scheduler.schedule()
            if output is None:
                break
            self.num_steps += 1
            assert self.num_steps < 5000, "the engine makes no progress"
            self._in_flight.append((output, self.executor.execute(output)))
        if not self._in_flight:
            return False
        output, future = self._in_flight.popleft()
        self._failed = output
        result = future.result(timeout=30)
        for news in self.scheduler.update(output, result):
            self._take(news)
        return True

    def run(self, *requests: Request) -> dict[str, Outcome]:
        """Add the requests and step until nothing is left."""
        self.add(*requests)
        while self.step():
            pass
        assert not self.scheduler.has_requests()
        self.manager.check_integrity()
        return self.outcomes

    def discard_in_flight(self) -> None:
        """After a step raised: let the later ones end and discard them all, newest first."""
        while self._in_flight:
            output, future = self._in_flight.pop()
            future.exception(timeout=30)
            self.scheduler.discard_step(output)
        self.scheduler.discard_step(self._failed)

    def close(self) -> None:
        self.executor.close()

    def _take(self, news: EngineCoreOutput) -> None:
        outcome = self.outcomes[news.request_id]
        outcome.token_ids += news.new_token_ids
        outcome.logprobs += news.logprobs or []
        outcome.prompt_logprobs += news.prompt_logprobs or []
        outcome.finish_reason = news.finish_reason or outcome.finish_reason
        if news.failure is not None:
            outcome.error, outcome.error_code = news.failure.message, news.failure.code
