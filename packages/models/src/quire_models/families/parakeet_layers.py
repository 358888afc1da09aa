"""What makes tokens of a Fast Conformer's frames: classes of each of them, or a transducer along them.

Shape legend: E frames of all sounds, T frames of one, N sounds, C width of the stream, V tokens with the blank, D width
of the prediction network, L its layers. A frame is what the encoder makes of eight frames of features: 80 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import EncoderBatch
from quire_models.config import ModelConfig
from quire_models.families.fast_conformer_layers import FastConformer
from quire_models.families.parakeet import ParakeetSpec, TransducerSpec
from quire_models.layers.activations import activation
from quire_models.layers.network import Network
from quire_models.layers.scope import Scope
from quire_models.spec import num_sound_tokens

__all__ = ["ParakeetCTC", "ParakeetTransducer"]


class ParakeetNetwork(Network):
    """The encoder, and what makes tokens of its hidden states."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, ParakeetSpec)
        self.blank = spec.blank_token_id
        self._conformer = FastConformer(spec.conformer, scope)
        parameters = {name: scope.parameter(name, *shape) for name, shape in spec.search_shapes().items()}
        self.weights: dict[str, Tensor] = {}
        """Name -> tensor of what searches tokens, once weights are loaded."""
        scope.when_loaded(lambda: self.weights.update((name, each.take()) for name, each in parameters.items()))

    @torch.inference_mode()
    def encode_batch(self, batch: EncoderBatch) -> Tensor:
        """Frames of features [frames, mel bins] of each sound -> hidden states [E, C]. Raises ValueError as
        `FastConformer.subsample`."""
        return self._conformer(self._conformer.subsample(batch.features, batch.lens, self.dtype), batch.lens)

    def read(self, sounds: Sequence[Tensor]) -> list[Tensor]:
        """Hidden states [T, C] of each of some sounds, frames of features [frames, mel bins]."""
        lens = [num_sound_tokens(self.config.network.sound_convolutions, len(each)) for each in sounds]
        ids = torch.zeros(sum(lens), dtype=torch.int64, device=self.device)
        batch = EncoderBatch(input_ids=ids, positions=ids, lens=lens, features=tuple(sounds))
        return list(self.encode_batch(batch).split(lens))

    def hear(self, hidden: Tensor, lens: Sequence[int]) -> list[Tensor]:
        """The tokens of sounds, greedily.

        Args:
            hidden: [E, C], the sounds one behind the other.
            lens: Frames of each.

        Returns:
            Of each sound, [tokens, 4] float32 on the CPU: id, natural logarithm of its probability, the frame that it
            begins with, and the frame behind it.
        """
        raise NotImplementedError

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A linear layer of the search."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])


class ParakeetCTC(ParakeetNetwork):
    """Each frame has a class; frames of the same class, one behind the other, are one token (Graves et al. 2006, sec.
    3.1)."""

    @torch.inference_mode()
    def hear(self, hidden: Tensor, lens: Sequence[int]) -> list[Tensor]:
        """As `ParakeetNetwork` says; a token is as probable as in its best frame."""
        return [self._tokens(each) for each in hidden.split(list(lens))]

    def _tokens(self, hidden: Tensor) -> Tensor:
        """The tokens of one sound, [T, C]: there are logits of one at a time."""
        logits = F.linear(hidden, self.weights["ctc_head.weight"][..., 0], self.weights["ctc_head.bias"]).float()
        ids = logits.argmax(-1)
        logprobs = (logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)).cpu()
        tokens, runs, lengths = ids.cpu().unique_consecutive(return_inverse=True, return_counts=True)
        best = torch.full((len(tokens),), -torch.inf).scatter_reduce(0, runs, logprobs, "amax")
        ends = lengths.cumsum(0)
        told = torch.stack((tokens.float(), best, (ends - lengths).float(), ends.float()), dim=1)
        return told[tokens != self.blank]


class ParakeetTransducer(ParakeetNetwork):
    """At a frame, and behind the tokens so far, the joint network names a token or the blank, and with TDT how many
    frames it lasts: the search goes on there (Graves 2012, sec. 2; Xu et al. 2023, "Efficient Sequence Transduction by
    Jointly Predicting Tokens and Durations", algorithm 2)."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, TransducerSpec)
        self._spec = spec
        self._act = activation(scope, spec.act)

    @torch.inference_mode()
    def hear(self, hidden: Tensor, lens: Sequence[int]) -> list[Tensor]:
        """As `ParakeetNetwork` says; all sounds side by side. A token lasts at least a frame."""
        spec, device, count = self._spec, hidden.device, len(lens)
        encoded = self.linear(hidden, "encoder_projector")
        ends = torch.tensor(lens, device=device)
        begins = torch.tensor([0, *accumulate(lens[:-1])], device=device)
        durations = torch.tensor(spec.durations, device=device)
        frame, symbols = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
        state = hidden.new_zeros(spec.num_decoder_layers, 2, count, spec.decoder_size)
        tokens = torch.full((count,), self.blank, device=device)
        predicted, state = self._predict(tokens, state)
        told: list[Tensor] = []
        for _ in range(spec.max_symbols_per_step * max(lens)):
            at = begins + frame.clamp(max=ends - 1)
            logits = self.linear(self._act(encoded[at] + predicted), "joint.head").float()
            scores = logits[:, : spec.vocab_size]
            tokens = scores.argmax(-1)
            logprobs = scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
            is_blank = tokens == self.blank
            if spec.durations:
                advance = durations[logits[:, spec.vocab_size :].argmax(-1)]
                advance = torch.where(is_blank, advance.clamp(min=1), advance)
            else:
                symbols = torch.where(is_blank, 0, symbols + 1)
                moves = is_blank | (symbols >= spec.max_symbols_per_step)
                symbols, advance = torch.where(moves, 0, symbols), moves.long()
            writes = ~is_blank & (frame < ends)
            last = frame + advance.clamp(min=1)
            told.append(torch.stack([each.float() for each in (tokens, logprobs, frame, last, writes)], dim=1))
            frame = frame + advance
            if bool((frame >= ends).all()):
                break
            next_predicted, next_state = self._predict(tokens, state)
            predicted = torch.where(writes[:, None], next_predicted, predicted)
            state = torch.where(writes[:, None], next_state, state)
        steps = torch.stack(told, dim=1).cpu()  # [N, steps, 5]
        return [each[each[:, 4] > 0, :4] for each in steps]

    def _predict(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The prediction network behind one more token each: tokens [N], outputs and cells of its layers [L, 2, N, D]
        -> [N, D], and these anew (Hochreiter & Schmidhuber 1997)."""
        x, layers = self.weights["decoder.embedding.weight"][tokens], []
        for layer, (output, cell) in enumerate(state):
            gates = self._gates(x, f"ih_l{layer}") + self._gates(output, f"hh_l{layer}")
            enters, stays, candidate, leaves = gates.chunk(4, dim=-1)
            cell = torch.sigmoid(stays) * cell + torch.sigmoid(enters) * torch.tanh(candidate)
            x = torch.sigmoid(leaves) * torch.tanh(cell)
            layers.append(torch.stack((x, cell)))
        return self.linear(x, "decoder.decoder_projector"), torch.stack(layers)

    def _gates(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"decoder.lstm.weight_{name}"], self.weights[f"decoder.lstm.bias_{name}"])
