"""Recurrent classes of Transformers: their own cache layers hold a sequence's states while its tokens run, and Quire's
cache keeps them between steps.

The network runs the sequences of a step one after the other, cut where states are stored. States are read from the
blocks that Quire's scheduler says and written into them, so that chunks of a prompt, preemption and prefix caching are
what they are for Quire's own recurrent networks.

Shape legend: T tokens of a run, L layers.
"""

from __future__ import annotations

import dataclasses
import inspect
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire_attention import ForwardBatch
from quire_interfaces import CheckpointError, ConfigError
from quire_models.config import ModelConfig
from quire_models.layers.scope import Scope
from quire_models.transformers_backend.chosen_class import ChosenClassLM
from quire_models.transformers_backend.recurrent_config import RecurrentFallbackSpec
from quire_ops import PagedLayout, kv_cache_shape
from quire_ops.recurrent import StateRun, state_runs

__all__ = ["RecurrentLM"]

States = dict[int, list[Tensor]]
"""Layer -> what it keeps of one sequence, in the order of its spec."""


class RecurrentLM(ChosenClassLM):
    """A network of Transformers with recurrent layers."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, RecurrentFallbackSpec)
        self._token_by_token = spec.token_by_token
        self._attentions: dict[int, int] = {}
        """Layer -> number of the cache of its keys and values in a batch."""
        self._states: dict[int, int] = {}
        """Layer -> number of the cache of its states."""
        mixers = [(index, mixer) for index, layer in enumerate(spec.layers) for mixer in layer.mixers]
        for number, (index, mixer) in enumerate(mixers):
            (self._states if mixer.states else self._attentions)[index] = number
        self._dtypes: dict[int, list[torch.dtype]] = {}
        """Layer -> what the class computes each of its states in."""

    def find_class(self, folder: Path) -> Any:
        """See `ChosenClassLM.find_class`."""
        import transformers

        cls = getattr(transformers, self.config.architecture, None)
        if cls is None:
            raise CheckpointError(f"the installed Transformers has no class {self.config.architecture}")
        return cls

    def place_layer(self, module: nn.Module) -> None:
        """See `ChosenClassLM.place_layer`. Some classes run one attention in several layers."""
        own: Any = module
        own.quire_attention, own.quire_layer = self._paged, self._attentions.get(own.layer_idx)
        if "layer_idx" in inspect.signature(own.forward).parameters:
            own.register_forward_pre_hook(self._place_shared, with_kwargs=True)

    def _place_shared(self, module: Any, args: Any, options: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind_partial(*args, **options).arguments
        module.quire_layer = self._attentions.get(given.get("layer_idx", module.layer_idx))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `Network.forward`."""
        layouts = {layer: batch.states_of_layer(number)[1] for layer, number in self._states.items()}
        if any(layout.replay is not None for layout in layouts.values()):
            raise ConfigError(
                f"{self.config.architecture} runs through Transformers, whose states cannot be taken back to a token "
                "that was accepted; serve it without speculative decoding",
                field="speculative_config",
            )
        runs = {layer: state_runs(layout) for layer, layout in layouts.items()}
        first = next(iter(layouts.values()))
        starts = list(accumulate(first.query_lens, initial=0))
        slots = None if batch.lora is None else batch.lora.slots.cpu().numpy()
        hidden = []
        for number, run in enumerate(runs[next(iter(runs))]):
            sequence = bisect_right(starts, run.begin) - 1
            own = {layer: of[number] for layer, of in runs.items()}
            states = self._read(batch, own)
            pieces = [(run.begin, run.end)]
            if states and self._token_by_token:
                pieces = [(token, token + 1) for token in range(run.begin, run.end)]
            for begin, end in pieces:
                part = _part(batch, sequence, begin, end, starts[sequence + 1])
                self.use_adapters(None if slots is None or self.adapters is None else self.adapters.tokens_of(
                    slots[begin:end]
                ))  # fmt: skip
                out, states = self._run(part, states)
                hidden.append(out)
            self._write(batch, own, states)
        return torch.cat(hidden)

    def _run(self, batch: ForwardBatch, states: States) -> tuple[Tensor, States]:
        """Hidden states [T, hidden_size] of a sequence's next tokens, and its states behind them.

        Args:
            states: Those in front of them; empty where a sequence begins.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self._decoder.config.get_text_config(decoder=True))
        for layer, tensors in states.items():
            _fill(cache.layers[layer], tensors)
        self._paged.batch = batch
        self._paged.layers.clear()
        out = self._decoder(
            input_ids=batch.input_ids[None], position_ids=batch.positions[None], past_key_values=cache, use_cache=True
        )
        self._paged.batch = None
        return out.last_hidden_state[0], {layer: _kept(cache.layers[layer]) for layer in self._states}

    def _read(self, batch: ForwardBatch, runs: dict[int, StateRun]) -> States:
        """The states in front of a run."""
        if not next(iter(runs.values())).read:
            return {}
        return {
            layer: [
                tensor[run.read].to(dtype, copy=True)  # classes write into what they get
                for tensor, dtype in zip(batch.states[self._states[layer]], self._dtypes[layer], strict=True)
            ]
            for layer, run in runs.items()
        }

    def _write(self, batch: ForwardBatch, runs: dict[int, StateRun], states: States) -> None:
        """Keep the states behind a run, where they have a block."""
        for layer, run in runs.items():
            kept = batch.states[self._states[layer]]
            self._dtypes[layer] = [tensor.dtype for tensor in states[layer]]
            if [each.shape for each in states[layer]] != [tensor.shape[1:] for tensor in kept]:
                raise CheckpointError(
                    f"layer {layer} of {self.config.architecture} keeps states of "
                    f"{[list(each.shape) for each in states[layer]]}, but its config.json says "
                    f"{[list(tensor.shape[1:]) for tensor in kept]}; these states are not supported"
                )
            if run.write:
                for tensor, state in zip(kept, states[layer], strict=True):
                    tensor[run.write] = state.to(tensor.dtype)

    def _try(self) -> None:
        """Three tokens through the network: two that begin a sequence, and one that goes on."""
        config, device = self.config, self.device
        shape = kv_cache_shape(2, 4, config.num_kv_heads, config.head_dim)
        caches, states = [], []
        for mixer in config.network.mixers:
            caches.append(torch.zeros((1,) if mixer.states else shape, dtype=self.dtype, device=device))
            states.append(tuple(torch.zeros((2, *state.shape), device=device) for state in mixer.states))
        try:
            for begin, end in ((0, 2), (2, 3)):
                tokens = torch.arange(begin, end, device=device)
                layout = _layout(tokens + 4, torch.ones((1, 1), dtype=torch.int32, device=device), 4, end)
                batch = ForwardBatch(
                    input_ids=tokens,
                    positions=tokens,
                    attention=(layout,),
                    group_of_layer=(0,) * len(caches),
                    kv_caches=tuple(caches),
                    states=tuple(states),
                )
                self.compute_logits(self.forward(batch))
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            raise CheckpointError(
                f"Transformers' {config.architecture} does not run with Quire's cache: {error}"
            ) from error
        if missing := set(self._attentions.values()) - self._paged.layers:
            raise CheckpointError(
                f"Transformers' {config.architecture} does not call the attention it is given in layers "
                f"{', '.join(map(str, sorted(missing)))}"
            )


def _part(batch: ForwardBatch, sequence: int, begin: int, end: int, stop: int) -> ForwardBatch:
    """Some tokens of one sequence of a batch, as a batch of their own.

    Args:
        begin: First of them, among the tokens of the step.
        end: First token behind them.
        stop: First token behind the sequence's.
    """
    layouts = tuple(
        _layout(
            layout.slot_mapping[begin:end],
            layout.block_table[sequence : sequence + 1],
            layout.block_size,
            layout.kv_lens[sequence] - (stop - end),
        )
        for layout in batch.attention
    )
    return dataclasses.replace(
        batch, input_ids=batch.input_ids[begin:end], positions=batch.positions[begin:end], attention=layouts
    )


def _layout(slot_mapping: Tensor, block_table: Tensor, block_size: int, kv_len: int) -> PagedLayout:
    """The layout of one sequence.

    Args:
        slot_mapping: [T].
        block_table: [1, B].
        kv_len: Its tokens, these included.
    """
    num_tokens, device = len(slot_mapping), slot_mapping.device
    return PagedLayout(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([kv_len], dtype=torch.int32, device=device),
        block_table=block_table,
        slot_mapping=slot_mapping,
        block_size=block_size,
        query_lens=[num_tokens],
        kv_lens=[kv_len],
    )


def _fill(layer: Any, tensors: list[Tensor]) -> None:
    """Have a cache layer of Transformers go on from states, each without its batch dimension."""
    remaining = iter(tensors)
    for index in range(layer.number_of_states):
        conv = next(remaining)[None]
        layer.lazy_initialization(conv_states=conv, state_idx=index)
        layer.conv_states[index] = conv
        layer.has_previous_state[index] = True
    for index, state in enumerate(remaining):
        layer.lazy_initialization(recurrent_states=state[None], state_idx=index)
        layer.recurrent_states[index] = state[None]


def _kept(layer: Any) -> list[Tensor]:
    """What a cache layer of Transformers keeps of its one sequence: inputs of convolutions, then states."""
    kept = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state[0] for state in kept if state is not None]
