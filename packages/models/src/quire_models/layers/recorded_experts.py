"""Which experts the routers of a network choose, taken down step by step.

Shape legend: T tokens of the step, L layers with routed experts, K experts that are chosen per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_interfaces import ConfigError
from quire_models.feed_forward_spec import SparseMoESpec
from quire_models.layers.network import Network
from quire_models.layers.routing import Select

__all__ = ["ExpertRecorder"]


class ExpertRecorder:
    """Sees every choice of a network's routers, which runs op by op from now on.

    Raises:
        ConfigError: The network has no routers that it could ask.
    """

    def __init__(self, network: Network) -> None:
        routers = network.routers
        if not routers:
            raise ConfigError(
                f"{network.config.architecture} has no routed experts that Quire runs",
                field="enable_return_routed_experts",
            )
        network.go_op_by_op()
        parts = (layer.feed_forward for layer in network.config.network.layers)
        self._num_chosen = next(part.num_chosen for part in parts if isinstance(part, SparseMoESpec))
        self._chosen: dict[int, Tensor] = {}
        """Place of a layer among those with routed experts -> [T, K]."""
        self._num_layers = len(routers)
        largest = max(router.shape[0] for router in routers) - 1
        self._dtype = torch.uint8 if largest < 256 else torch.int16
        for place, router in enumerate(routers):
            router.select = self._recorded(place, router.select)

    def _recorded(self, place: int, select: Select) -> Select:
        def recorded(logits: Tensor) -> tuple[Tensor, Tensor]:
            topk_ids, topk_weights = select(logits)
            self._chosen[place] = topk_ids[:, : self._num_chosen]
            return topk_ids, topk_weights

        return recorded

    def begin(self) -> None:
        """Forget what was chosen before."""
        self._chosen.clear()

    def take(self) -> Tensor | None:
        """[T, L, K] uint8, or int16 for more than 256 experts: the choices since `begin`; None where the network did
        not run."""
        if not self._chosen:
            return None
        assert len(self._chosen) == self._num_layers, f"{len(self._chosen)} of {self._num_layers} layers routed tokens"
        layers = [self._chosen[place] for place in range(self._num_layers)]
        self._chosen.clear()
        return torch.stack(layers, dim=1).to(self._dtype)
