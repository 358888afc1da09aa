"""Linear layers of a network of Transformers, shared out between tensor-parallel ranks.

Each rank keeps some outputs of each (column-parallel, Shoeybi et al. 2019, sec. 3) and gathers those of the others, so
that modules before and behind see what they see on one rank. Which layers these are, the class's own plan for tensor
parallelism says (`base_model_tp_plan`), whose "colwise" and "rowwise" layers are both split by their outputs here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quire_distributed import Collectives
from quire_interfaces import ConfigError
from quire_models.layers.module_linear import ExchangedLinear
from quire_models.shards import OutputShard, split_outputs

__all__ = ["SharedLinear", "share_linears"]


class SharedLinear(nn.Module):
    """x [..., in_features] -> [..., out_features] of all ranks."""

    def __init__(self, linear: nn.Linear, group: Collectives, sizes: tuple[int, ...], *, is_tied: bool) -> None:
        """Args:
        sizes: Outputs of each rank.
        is_tied: The weight is also that of an embedding, which stays whole: there is nothing to let go of.
        """
        super().__init__()
        own = OutputShard.of(sizes, group.rank)
        rows = slice(own.start, own.stop)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight: Tensor = linear.weight.data[rows]
        self.weight = nn.Parameter(weight if is_tied else weight.clone(), requires_grad=False)
        bias: Tensor | None = None if linear.bias is None else linear.bias.data[rows].clone()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._group, self._sizes = group, sizes

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with this rank's rows, and gather."""
        own = nn.functional.linear(x, self.weight, self.bias)
        return self._group.all_gather(own.contiguous(), dim=-1, sizes=self._sizes)


def share_linears(model: Any, body: nn.Module, plan: Mapping[str, str], group: Collectives) -> int:
    """Keep this rank's outputs of the linear layers that the plan shares, and of the LM head.

    Args:
        model: The network.
        body: What the names of the plan are relative to.
        plan: Name of a module, with * for a number -> how the class shares it.
        group: The ranks, each of which calls this.

    Returns:
        How many linear layers are shared now.

    Raises:
        ConfigError: There are none.
    """
    patterns = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in plan]
    within = dict(body.named_modules())
    named = {name for name in within if any(pattern.fullmatch(name) for pattern in patterns)}
    found = [(body, name) for name in named if type(within[name]) is nn.Linear]
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is nn.Linear:
        found += [(model, name) for name, module in model.named_modules() if module is head]
    # Quire's own layers have shared themselves out, whatever the plan says.
    num_shared = sum(isinstance(module, ExchangedLinear) and module.is_shared for module in within.values())
    for root, name in found:
        parent_name, _, child = name.rpartition(".")
        linear = root.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        sizes = split_outputs(linear.out_features, group.size)
        if sizes is None:
            continue
        is_tied = embedding is not None and linear.weight is embedding.weight
        setattr(root.get_submodule(parent_name), child, SharedLinear(linear, group, sizes, is_tied=is_tied))
        num_shared += linear is not head
    if not num_shared:
        raise ConfigError(
            f"tensor_parallel_size does not go with {type(model).__name__}: Transformers' class has no plan for tensor "
            "parallelism (base_model_tp_plan) that names linear layers; serve it with one rank, or by several engines "
            "(data_parallel_size)",
            field="tensor_parallel_size",
        )
    return num_shared
