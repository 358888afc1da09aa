"""What Transformers says: random checkpoints of its classes, and its greedy tokens and logits. Imports torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.encoder_prompts import EncoderInput, Spectrogram

__all__ = ["Continuation", "greedy_continuation", "load_oracle", "logits_along", "write_checkpoint"]


class Continuation(NamedTuple):
    """A greedy continuation."""

    token_ids: list[int]
    logits: Tensor
    """[tokens, vocab_size] float32: what chose each token."""


def write_checkpoint(folder: str | Path, architecture: str, case: ParityCase) -> Any:
    """Write a random checkpoint, with norms and biases that are not the trivial ones.

    Returns:
        The transformers model, float32, in evaluation mode.
    """
    import transformers

    config = getattr(transformers, case.config)(**copy.deepcopy(dict(case.fields)))  # some classes change what they get
    config._attn_implementation = "eager"
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        model = getattr(transformers, architecture)(config).float().eval()
        with torch.no_grad():
            biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
            for name, parameter in [*model.named_parameters(), *biases]:
                if any(part in name for part in case.keep) or not parameter.is_floating_point():
                    continue
                if parameter.ndim < 2:
                    parameter.add_(torch.randn_like(parameter) * case.weight_scale)
                else:
                    parameter.normal_(0.0, case.weight_scale)
            for name, table in model.named_buffers():
                if name.endswith("tid2eid"):  # a token's experts, which the class leaves all the same
                    table.copy_(torch.rand(len(table), config.n_routed_experts).argsort(dim=1)[:, : table.shape[1]])
    model.save_pretrained(folder)
    return model


def load_oracle(folder: str | Path) -> Any:
    """The transformers model of a checkpoint, in float32."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    auto: Any = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("Model"):
        auto = transformers.AutoModel
    elif config.is_encoder_decoder or architecture.endswith("ForCTC"):
        auto = getattr(transformers, architecture, auto)  # those that hear have an automatic class of their own
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    return model.eval()


@torch.inference_mode()
def greedy_continuation(
    model: Any, prompt: Sequence[int], num_tokens: int, *, uses_cache: bool = True, encoder: EncoderInput = ()
) -> Continuation:
    """`num_tokens` greedy tokens after the prompt, with the model's own cache or each from the whole sequence.

    Args:
        encoder: What the encoder reads, in a model that has one; always from the whole sequence then.
    """
    if not uses_cache or len(encoder):
        return _without_cache(model, list(prompt), num_tokens, encoder)
    step = model(input_ids=torch.tensor([list(prompt)]), use_cache=True)
    # Networks without attention call their cache otherwise.
    cache = "past_key_values" if hasattr(step, "past_key_values") else "cache_params"
    tokens, logits = [], []
    for _ in range(num_tokens):
        logits.append(step.logits[0, -1].float())
        tokens.append(int(logits[-1].argmax()))
        step = model(input_ids=torch.tensor([[tokens[-1]]]), **{cache: step[cache]}, use_cache=True)
    return Continuation(tokens, torch.stack(logits))


@torch.inference_mode()
def logits_along(model: Any, prompt: Sequence[int], continuation: Continuation, encoder: EncoderInput = ()) -> Tensor:
    """What another model, or the same in another dtype, says where the tokens of a continuation were chosen.

    Returns:
        Shape [tokens, vocab_size], float32.
    """
    tokens = [*prompt, *continuation.token_ids[:-1]]
    logits: Tensor = model(**_inputs(model, tokens, encoder), use_cache=False).logits[0, len(prompt) - 1 :].float()
    return logits


def _inputs(model: Any, token_ids: list[int], encoder: EncoderInput) -> dict[str, Tensor]:
    tokens = torch.tensor([token_ids])
    if isinstance(encoder, Spectrogram):
        features = encoder.features.to(model.dtype)
        if model.main_input_name == "input_features":
            return {"input_features": features[None], "decoder_input_ids": tokens}
        mask = torch.ones(features.shape, dtype=torch.long)  # without one, Moonshine Streaming has no windows
        return {"input_values": features, "attention_mask": mask, "decoder_input_ids": tokens}
    return (
        {"input_ids": torch.tensor([list(encoder)]), "decoder_input_ids": tokens} if encoder else {"input_ids": tokens}
    )


def _without_cache(model: Any, token_ids: list[int], num_tokens: int, encoder: EncoderInput) -> Continuation:
    tokens: list[int] = []
    logits = []
    for _ in range(num_tokens):
        logits.append(model(**_inputs(model, token_ids + tokens, encoder), use_cache=False).logits[0, -1].float())
        tokens.append(int(logits[-1].argmax()))
    return Continuation(tokens, torch.stack(logits))
