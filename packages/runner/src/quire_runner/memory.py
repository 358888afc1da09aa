"""How many bytes the runner takes besides weights and KV cache, for the planner. Free of torch and numpy.

The figures are upper bounds made from shapes, not measurements: they are used before anything is loaded.
"""

from __future__ import annotations

from typing import Protocol

from quire_interfaces import ATTENTION_WORKSPACE, EDIT_ENTRIES, EDIT_PREFIX, FEW_TOKENS, KV_CACHE_DTYPES
from quire_interfaces.platforms import platform_of
from quire_runner.config import DTYPE_BYTES, RunnerConfig

__all__ = ["NetworkDims", "activation_bytes", "graph_bytes", "row_bytes", "step_graph_bytes"]

LOGITS_COPIES = 3
"""The network's logits, the sampler's float32 working copy, and one temporary (probabilities or sort keys)."""

MASKED_QUERIES = 512
"""Queries that attention masks at once, as booleans and in the compute dtype."""

SLOT_BYTES = 8

SPLIT_BYTES = 40 << 20
"""Float32 results of programs that share a product, or latent attention with tiles of 16 rows of 512 numbers."""
SPLIT_PROGRAMS = 4 * 304
"""Most programs that share the keys of the sequences of a step: four for each processor of the GPU with the most."""
GRAPHS_PER_SIZE = 4
"""Sample modes that steps are captured in."""
LAUNCHES_PER_LAYER, LAUNCHES_BESIDE = 16, 32
ADAPTER_LAUNCHES = 14
"""Of a layer, where rows have adapters: two for each of its matrices."""
OBSERVED_ROWS, OBSERVED_LAUNCHES = 8, 24
"""Rows whose log probabilities are computed at once, and launches of each such piece."""
LAUNCH_BYTES = 4096
"""Of a kernel's node in a graph, its arguments included, as the driver keeps it: assumed, not measured."""


class NetworkDims(Protocol):
    """What `activation_bytes` reads of a network's configuration; `quire_models.ModelConfig` has these fields."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def inner_width(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def activation_bytes(
    network: NetworkDims, config: RunnerConfig, *, dtype_bytes: int | None = None, kv_cache_dtype: str | None = None,
    input_numbers: int = 0, score_copies: int = 0,
) -> int:  # fmt: skip
    """Largest number of bytes alive at once within a step: either in a layer of the full token budget, or at the
    logits of a step in which every row samples (drafts included).

    Args:
        network: Shape of the network.
        config: Token budget, rows and dtype.
        dtype_bytes: Bytes of an activation's element; None takes the configured dtype's, and 4 where that is "auto".
        kv_cache_dtype: What keys and values are kept in; None for the dtype of the activations.
        input_numbers: Numbers alive at once while tokens are made of an encoder's input, one at a time.
        score_copies: Numbers of float32 for each score of attention whose scores are in memory (`NetworkSpec`).
    """
    num_tokens = config.max_num_batched_tokens
    element = dtype_bytes or DTYPE_BYTES.get(config.dtype, 4)
    query = network.num_heads * network.head_dim
    key_value = 2 * network.num_kv_heads * network.head_dim
    # Residual, normed input and output of a sub-layer stay alive around its inner activations, and so do the rotations.
    stream = 3 * network.hidden_size + 2 * network.head_dim
    attention = 2 * query + key_value
    mlp = network.inner_width
    # An attention backend gathers one sequence's keys and values, lays them out anew, and masks a piece of its queries.
    mask = min(num_tokens, MASKED_QUERIES) * (1 + element)
    gathered = 2 * element
    if kv_cache_dtype is not None and KV_CACHE_DTYPES.get(kv_cache_dtype, 8) <= 8:  # fp8_ds_mla, too
        # First as bytes, then widened to float32, then cast if that is not what the network computes in.
        gathered = max(gathered, 1 + 4 + (element if element != 4 else 0))
    context = config.max_model_len * (key_value * gathered + mask + SLOT_BYTES)
    scores = 0
    if score_copies:
        num_scores = config.max_model_len * network.num_heads * min(num_tokens, MASKED_QUERIES)
        scores = min(num_scores, max(ATTENTION_WORKSPACE, config.max_model_len * network.num_heads)) * score_copies * 4
        # Keys and values are widened to float32, and laid out anew.
        context += scores + config.max_model_len * key_value * 8
    if not platform_of(config.device).is_host:
        context = max(context, _split_bytes(network))
    layer = max(num_tokens * (stream + attention) * element + context, num_tokens * (stream + mlp) * element + scores)
    # Kernels that run the whole stack keep one buffer for each of its parts, and nothing per context.
    stack = 3 * network.hidden_size + 2 * network.head_dim + 3 * query + key_value + network.intermediate_size
    layer = max(layer, num_tokens * stack * element, (num_tokens * network.hidden_size + input_numbers) * element)
    num_logit_rows = min(config.max_num_seqs * (1 + config.num_speculative_tokens), num_tokens)
    num_logit_rows = max(num_logit_rows, min(config.logits_chunk_tokens, num_tokens))
    logits = LOGITS_COPIES * num_logit_rows * network.vocab_size * 4
    # Cosines and sines of every position so far; the table grows by doubling.
    rotations = 4 * config.max_model_len * network.head_dim * element
    return rotations + max(layer, num_tokens * stream * element + logits)


def graph_bytes(
    network: NetworkDims,
    config: RunnerConfig,
    *,
    dtype_bytes: int,
    block_sizes: tuple[int, ...],
    num_layers: int,
    feature_width: int = 0,
    takes_adapters: bool = False,
) -> int:
    """Bytes that graphs of decode steps take on top: memory of their own for a step of the largest size, which they
    share, their own block tables, masks for each token, what a drafter reads of each, and what the driver keeps of each
    launch.

    Args:
        network: Shape of the network.
        config: Sizes, rows and their length.
        dtype_bytes: Of an activation's element.
        block_sizes: Block size of each KV cache group.
        num_layers: Of the network.
        feature_width: Elements that a drafter reads of each token's hidden states.
        takes_adapters: Whether rows may have adapters; steps with them have graphs of their own.
    """
    sizes = config.graph_sizes
    if not sizes:
        return 0
    mixed, logit_rows = config.mixed_graph_sizes, config.mixed_logit_rows
    step = step_graph_bytes(network, config, dtype_bytes=dtype_bytes)
    tables = sum(4 * max(sizes) * -(-config.row_len // size) for size in block_sizes)
    observed = (*sizes, *(min(size, logit_rows) for size in mixed))
    pieces = OBSERVED_LAUNCHES * sum(-(-size // OBSERVED_ROWS) for size in observed)
    num_launches = sum(
        GRAPHS_PER_SIZE * len(observed) * (of_layer * num_layers + LAUNCHES_BESIDE) + pieces
        for of_layer in (LAUNCHES_PER_LAYER, LAUNCHES_PER_LAYER + ADAPTER_LAUNCHES)[: 1 + takes_adapters]
    )
    launches = num_launches * LAUNCH_BYTES
    masks = max(*sizes, logit_rows) * -(-network.vocab_size // 32) * 4
    # Once in the network, side by side, and once where the drafter finds them.
    features = 3 * max((*sizes, *mixed)) * feature_width * dtype_bytes
    return step + tables + masks + features + launches


def step_graph_bytes(network: NetworkDims, config: RunnerConfig, *, dtype_bytes: int) -> int:
    """Bytes of the memory that all graphs share, in which one of them runs at a time: a step of the largest size."""
    query = network.num_heads * network.head_dim
    row = 3 * network.hidden_size + 4 * query + 2 * network.num_kv_heads * network.head_dim + network.inner_width
    mixed = config.mixed_graph_sizes
    logits = max(*config.graph_sizes, config.mixed_logit_rows) * LOGITS_COPIES * network.vocab_size * 4
    return max((*config.graph_sizes, *mixed)) * row * dtype_bytes + logits + _split_bytes(network)


def _split_bytes(network: NetworkDims) -> int:
    """Most bytes of the float32 results of programs that share what a single one would compute. There are only as many
    as fill a GPU, so they do not grow with the step."""
    if not network.num_kv_heads:
        return SPLIT_BYTES  # of products: nothing attends
    rows = FEW_TOKENS * -(-network.num_heads // network.num_kv_heads)
    return max(SPLIT_BYTES, SPLIT_PROGRAMS * rows * (network.head_dim + 1) * 4)


def row_bytes(
    config: RunnerConfig, *, block_sizes: tuple[int, ...], encoder_blocks: int = 0, edited_vocab: int = 0
) -> int:
    """Bytes of the persistent rows: token ids and one block table per KV cache group, int32 each.

    Args:
        config: Rows and their length.
        block_sizes: Block size of each KV cache group, those of cross attention aside.
        encoder_blocks: Blocks of what the encoder reads for one request, in all groups of cross attention.
        edited_vocab: Tokens of the vocabulary where captured steps find lists of tokens of each row (`LogitEditTable`).
    """
    blocks = sum(-(-config.row_len // size) for size in block_sizes) + encoder_blocks
    lists = edited_vocab and edited_vocab // 32 + 3 + EDIT_ENTRIES * (3 + EDIT_PREFIX)
    return 4 * config.max_num_seqs * (config.row_len + blocks) + 4 * (config.max_num_seqs + 1) * lists
