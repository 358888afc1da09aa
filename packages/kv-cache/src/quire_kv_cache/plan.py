"""From what each layer keeps to how many blocks there are: groups, tensors, and the concurrency they buy.

Knows bytes and layers; allocates nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from quire_interfaces import ConfigError, CrossAttentionSpec, KVCacheGroup, KVCachePlan, KVCacheSpec, MambaSpec
from quire_interfaces.kv_cache import STATE_ALIGNMENT_BYTES
from quire_kv_cache.config import MAX_BLOCK_SIZE
from quire_kv_cache.groups import make_group_policy

__all__ = ["kv_plan_of_layers", "max_concurrency", "plan_kv_cache", "state_block_size"]

STATE_BLOCK_TOKENS = 128
"""Fewest tokens between two states that are kept."""


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec], *, memory_bytes: int | None = None, num_blocks: int | None = None
) -> KVCachePlan:
    """Lay out the KV cache.

    Layers with equal specs share a block table. In a model that mixes kinds of layers, layer i of every group uses
    tensor i, so a block is as large as the largest group has layers; a kind that many layers have is cut into several
    groups where that leaves less of each block unused (5 sliding layers per full one become 5 groups beside 1).

    Args:
        specs: Layer name -> what it keeps, in layer order.
        memory_bytes: Bytes the tensors may take together; give this or `num_blocks`.
        num_blocks: Blocks of the cache, the null block included.

    Raises:
        ConfigError: no layers, unequal block sizes, both or neither limit, or room for less than one block per group.
    """
    if not specs:
        raise ConfigError("specs is empty: the model has no layer that keeps KV, so there is no cache to plan")
    block_sizes = sorted({spec.block_size for spec in specs.values()})
    if len(block_sizes) > 1:
        raise ConfigError(f"all layers must have one block size, got {block_sizes}", field="block_size")
    if block_sizes[0] < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_sizes[0]}", field="block_size")
    groups = _group_layers(specs)
    tensor_block_bytes = _tensor_block_bytes(groups)
    num_blocks = _num_blocks(sum(tensor_block_bytes), len(groups), memory_bytes, num_blocks)
    return KVCachePlan(groups=groups, num_blocks=num_blocks, tensor_block_bytes=tensor_block_bytes)


def kv_plan_of_layers(plan: KVCachePlan, layer_names: Collection[str]) -> KVCachePlan:
    """The part of a cache that some layers keep, as a pipeline stage has it: the same groups, whose block tables are
    those of all stages, with fewer layers or none.

    Args:
        plan: The cache of all layers.
        layer_names: Names of those that are kept here.
    """
    groups = tuple(
        dataclasses.replace(group, layer_names=tuple(name for name in group.layer_names if name in layer_names))
        for group in plan.groups
    )
    return KVCachePlan(groups=groups, num_blocks=plan.num_blocks, tensor_block_bytes=_tensor_block_bytes(groups))


def max_concurrency(plan: KVCachePlan, max_model_len: int, *, max_step_tokens: int = 1) -> float:
    """How many requests of `max_model_len` tokens the cache holds at the same time, sharing nothing.

    Args:
        plan: The cache.
        max_model_len: Tokens of each request, prompt and output.
        max_step_tokens: Tokens of one request computed in one step; sliding-window layers hold these beside their
            window. 1 speaks of requests in decode.

    Raises:
        ConfigError: `max_model_len` or `max_step_tokens` is below 1.
    """
    if max_model_len < 1:
        raise ConfigError(f"max_model_len must be at least 1, got {max_model_len}", field="max_model_len")
    if max_step_tokens < 1:
        raise ConfigError(f"max_step_tokens must be at least 1, got {max_step_tokens}", field="max_step_tokens")
    per_request = sum(make_group_policy(group.spec).max_blocks(max_model_len, max_step_tokens) for group in plan.groups)
    return (plan.num_blocks - 1) / per_request


def state_block_size(make_specs: Callable[[int], Mapping[str, KVCacheSpec]], block_size: int) -> int:
    """The block size for a network that may keep states.

    A state takes a whole block, whatever its bytes; where attention shares the pool, its blocks must be no smaller.

    Args:
        make_specs: Block size -> what each layer keeps.
        block_size: As it would be without states; a power of two.

    Returns:
        `block_size`, or a larger power of two.
    """
    if not any(isinstance(spec, MambaSpec) for spec in make_specs(block_size).values()):
        return block_size
    block_size = max(block_size, STATE_BLOCK_TOKENS)
    while block_size < MAX_BLOCK_SIZE:
        specs = make_specs(block_size).values()
        states = [spec.block_bytes for spec in specs if isinstance(spec, MambaSpec)]
        keys = [spec.block_bytes for spec in specs if not isinstance(spec, MambaSpec)]
        if not keys or max(keys) >= max(states):
            break
        block_size *= 2
    return block_size


def _group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        layers.setdefault(spec, []).append(name)
    counts = [len(names) for names in layers.values()]
    # Every group pays for `size` layers in each of its blocks: take the size that pays for the fewest, and of equal
    # ones the largest, since each group costs host time in every step.
    size = min(sorted(set(counts), reverse=True), key=lambda size: sum(-(-count // size) * size for count in counts))
    groups = []
    for spec, names in layers.items():
        num_parts = -(-len(names) // size)
        short, num_long = divmod(len(names), num_parts)
        start = 0
        for part in range(num_parts):
            end = start + short + (part < num_long)
            groups.append(KVCacheGroup(spec=spec, layer_names=tuple(names[start:end])))
            start = end
    # Last, because their blocks are counted apart from those of the tokens.
    return tuple(sorted(groups, key=lambda group: isinstance(group.spec, CrossAttentionSpec)))


def _tensor_block_bytes(groups: tuple[KVCacheGroup, ...]) -> tuple[int, ...]:
    num_tensors = max(len(group.layer_names) for group in groups)
    sizes = [
        max(group.spec.block_bytes for group in groups if tensor < len(group.layer_names))
        for tensor in range(num_tensors)
    ]
    if any(isinstance(group.spec, MambaSpec) for group in groups):
        # States of other dtypes than the keys beside them must not begin in the middle of a number.
        sizes = [-(-size // STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES for size in sizes]
    return tuple(sizes)


def _num_blocks(block_bytes: int, num_groups: int, memory_bytes: int | None, num_blocks: int | None) -> int:
    if (memory_bytes is None) == (num_blocks is None):
        raise ConfigError("give either memory_bytes or num_blocks, not " + ("both" if memory_bytes else "neither"))
    fewest = 1 + num_groups
    if num_blocks is not None:
        if num_blocks < fewest:
            raise ConfigError(
                f"num_blocks must be at least {fewest} (the null block and one per KV cache group), got {num_blocks}",
                field="num_blocks",
            )
        return num_blocks
    assert memory_bytes is not None
    if block_bytes < 1:
        raise ConfigError(f"a block must take at least one byte, got {block_bytes}")
    if memory_bytes // block_bytes < fewest:
        raise ConfigError(
            f"the KV cache needs at least {fewest * block_bytes} bytes ({fewest} blocks of {block_bytes} bytes), but "
            f"only {memory_bytes} are left for it: give it more memory, or choose a smaller block size or model",
            field="memory_bytes",
        )
    return memory_bytes // block_bytes
