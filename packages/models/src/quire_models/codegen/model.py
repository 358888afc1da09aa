"""CodeGen (Nijkamp et al. 2022): GPT-J with fused projections in four pieces."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.codegen.config import PARTS
from quire_models.gptj.model import GPTJForCausalLM

__all__ = ["CodeGenForCausalLM"]


class CodeGenForCausalLM(GPTJForCausalLM):
    """The CodeGen network."""

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes queries, values and keys apart, in this order in each piece."""
        size = self.config.query_size
        if not name.endswith(".qkv_proj.weight") or tensor.shape[0] != 3 * size:
            return super().checkpoint_tensors(name, tensor)
        pieces = tensor.view(PARTS, 3, size // PARTS, -1)
        return [
            (name.replace("qkv_proj", part), pieces[:, index].reshape(size, -1))
            for index, part in enumerate(("q_proj", "v_proj", "k_proj"))
        ]
