"""Parakeet (NVIDIA NeMo): a Fast Conformer (Rekesh et al. 2023) and no decoder that attends to it. Tokens are classes
of its frames (CTC, Graves et al. 2006), or what a transducer writes along them (Graves 2012; with durations of tokens,
Xu et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS, hidden_act
from quire_models.encoder_spec import EncoderSpec
from quire_models.families.fast_conformer import FRAMES_PER_S, FastConformerSpec, fast_conformer, halvings
from quire_models.spec import CheckpointNames, EmbeddingSpec, HeadSpec, NetworkSpec, Weight, num_sound_tokens
from quire_pooling.spec import PoolerSpec

__all__ = ["ParakeetSpec", "TransducerSpec", "spec", "spec_of_rnnt", "spec_of_tdt"]

_LONGEST_S = 40
"""Longest sounds that the networks were trained on."""
_GATES = 4
"""Of an LSTM: input, forget, cell, output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParakeetSpec(EncoderSpec):
    """A Fast Conformer whose frames are told apart by classes: the tokens, and none of them (CTC)."""

    conformer: FastConformerSpec
    blank_token_id: int
    """The class of no token."""
    built_by: ClassVar[str] = "quire_models.families.parakeet_layers:ParakeetCTC"

    @property
    def inner_width(self) -> int:
        """Most numbers that a part of a layer keeps per token while it runs."""
        return 3 * self.conformer.intermediate_size

    def search_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of what makes tokens of hidden states."""
        return {
            "ctc_head.weight": (self.vocab_size, self.hidden_size, 1),
            "ctc_head.bias": (self.vocab_size,),
        }

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names: there is no table of tokens."""
        yield from EncoderSpec.weights(self)
        yield from self.conformer.weights()
        for name, shape in self.search_shapes().items():
            yield Weight(name, shape, "token search")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransducerSpec(ParakeetSpec):
    """A Fast Conformer, a prediction network (an LSTM) that reads the tokens so far, and a joint network that says of a
    frame and these tokens what comes next."""

    decoder_size: int
    """Width of the prediction network and of the joint network."""
    num_decoder_layers: int
    """LSTMs, one above the other."""
    act: str
    """Of the joint network, a name of `quire_models.config_fields.HIDDEN_ACTS`, right-hand side."""
    max_symbols_per_step: int
    """Most tokens of a frame; of a sound, as many for each of its frames."""
    durations: tuple[int, ...] = ()
    """Frames that a token or a blank may last (TDT); empty where a blank lasts one frame, and a token none (RNN-T)."""
    built_by: ClassVar[str] = "quire_models.families.parakeet_layers:ParakeetTransducer"

    def search_shapes(self) -> dict[str, tuple[int, ...]]:
        """As of CTC."""
        size, outputs = self.decoder_size, self.vocab_size + len(self.durations)
        shapes: dict[str, tuple[int, ...]] = {
            "encoder_projector.weight": (size, self.hidden_size),
            "encoder_projector.bias": (size,),
            "decoder.embedding.weight": (self.vocab_size, size),
            "decoder.decoder_projector.weight": (size, size),
            "decoder.decoder_projector.bias": (size,),
            "joint.head.weight": (outputs, size),
            "joint.head.bias": (outputs,),
        }
        for layer in range(self.num_decoder_layers):
            for part in ("ih", "hh"):
                shapes[f"decoder.lstm.weight_{part}_l{layer}"] = (_GATES * size, size)
                shapes[f"decoder.lstm.bias_{part}_l{layer}"] = (_GATES * size,)
        return shapes


def spec(config: Fields) -> NetworkSpec:
    """The network with classes of frames (ParakeetForCTC); its blank is the token that pads."""
    return _network(config, ParakeetSpec, vocab_size=1025, blank_name="pad_token_id", blank_default=1024)


def spec_of_rnnt(config: Fields) -> NetworkSpec:
    """The network with a transducer (ParakeetForRNNT)."""
    return _transducer(config)


def spec_of_tdt(config: Fields) -> NetworkSpec:
    """The network with a transducer that says how long tokens last (ParakeetForTDT)."""
    durations = config.get("durations")
    if durations is None:
        durations = list(range(5))
    is_list = isinstance(durations, list | tuple) and bool(durations)
    if not is_list or any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in durations):
        raise CheckpointError(f"{config.source}: durations must be a list of numbers of frames, is {durations!r}")
    return _transducer(config, durations=tuple(durations))


def _transducer(config: Fields, **own: Any) -> NetworkSpec:
    return _network(
        config,
        TransducerSpec,
        vocab_size=8193,
        blank_name="blank_token_id",
        blank_default=8192,
        decoder_size=config.integer("decoder_hidden_size", default=640, minimum=1),
        num_decoder_layers=config.integer("num_decoder_layers", default=2, minimum=1),
        act=hidden_act(config, default="relu", acts=ACTIVATIONS),
        max_symbols_per_step=config.integer("max_symbols_per_step", default=10, minimum=1),
        **own,
    )


def _network(
    config: Fields, kind: type[ParakeetSpec], *, vocab_size: int, blank_name: str, blank_default: int, **own: Any
) -> NetworkSpec:
    """The network of a config.json.

    Args:
        vocab_size: Where config.json does not say.
        blank_name: Field that has the class of no token.
        blank_default: That class, where config.json does not say.
        **own: Fields of `kind`.

    Raises:
        CheckpointError: a field is missing or wrong.
    """
    conformer = fast_conformer(config, {}, name="encoder")
    vocab_size = config.integer("vocab_size", default=vocab_size, minimum=2)
    blank = config.integer(blank_name, default=blank_default, minimum=0)
    if blank >= vocab_size:
        raise CheckpointError(f"{config.source}: {blank_name} ({blank}) must be below vocab_size ({vocab_size})")
    convolutions = halvings(conformer)
    longest = num_sound_tokens(convolutions, _LONGEST_S * FRAMES_PER_S)
    return kind(
        vocab_size=vocab_size,
        hidden_size=conformer.hidden_size,
        intermediate_size=conformer.intermediate_size,
        max_model_len=longest,
        max_encoder_len=longest,
        body=conformer.name,
        embedding=EmbeddingSpec(name="", num_tokens=0, size=0),
        layers=(),
        final_norm=None,
        head=HeadSpec(),
        pooler=PoolerSpec(
            hidden_size=conformer.hidden_size, methods=(), tasks=frozenset({"transcribe"}), task="transcribe"
        ),
        sound_convolutions=convolutions,
        sound_bins=conformer.num_mel_bins,
        sound_width=conformer.sound_width,
        checkpoint=CheckpointNames(
            ignored_prefixes=("preprocessor.featurizer.",), ignored_suffixes=(".num_batches_tracked",)
        ),
        conformer=conformer,
        blank_token_id=blank,
        **own,
    )
