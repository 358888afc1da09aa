"""The memory plan of an encoder alone: its weights, and what reading takes. Free of torch.

There is no KV cache: texts are read whole, as many at a time as a step has tokens for (`docs/encoders.md`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quire.block_weights import kept_blocks
from quire.config import LONGEST_THAT_FITS, QuireConfig
from quire.plan import available_memory_bytes, format_bytes, resolved_dtype
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.ledger import weight_ledger
from quire_models.named_formats import resolved_linear_method
from quire_runner.memory import activation_bytes

__all__ = ["EncoderPlan", "plan_encoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPlan:
    """The ledger."""

    dtype: str
    linear_method: str
    max_encoder_len: int
    """Most tokens of a text."""
    num_tokens: int
    """Tokens of all texts that are read in one pass, as planned with."""
    ledger_bytes: dict[str, int]
    """What -> bytes."""
    free_bytes: int
    """Memory that was free when the plan was made."""

    @property
    def total_bytes(self) -> int:
        return sum(self.ledger_bytes.values())


def plan_encoder(
    config: QuireConfig,
    model: ModelConfig,
    *,
    max_seq_length: int | None = None,
    max_embed_len: int = 0,
    free_bytes: int | None = None,
) -> EncoderPlan:
    """Plan memory for a network that reads and does not write.

    Args:
        config: Settings. Texts of `max_num_batched_tokens` tokens together are read in one pass, but whole ones.
        model: The network, from config.json.
        max_seq_length: Most tokens of a text, as the files beside the network say; None where they do not.
        max_embed_len: Most tokens of a text that is embedded in chunks; 0 where none is.
        free_bytes: Memory that may be planned with; None reads what is free now.

    Raises:
        ConfigError: it cannot fit, or `max_model_len` is more than the network has positions for.
    """
    free = available_memory_bytes(config.runner.device) if free_bytes is None else free_bytes
    dtype, method = (
        resolved_dtype(config.model.dtype, model.dtype, config.runner.device),
        resolved_linear_method(config.model.quantization, model),
    )
    longest = _longest_text(config, model, max_seq_length)
    num_tokens = max(config.scheduler.max_num_batched_tokens, longest, max_embed_len)
    runner = dataclasses.replace(
        config.runner, dtype=dtype, max_model_len=longest, max_num_batched_tokens=num_tokens, max_num_seqs=1
    )
    parts = weight_ledger(model, dtype, method, in_blocks=kept_blocks(config))
    ledger = {f"weights: {part}": size for part, size in parts.items() if part != "LM head"}
    # Without a vocabulary there are no logits.
    silent = dataclasses.replace(model, network=dataclasses.replace(model.network, vocab_size=0))
    ledger["activations"] = activation_bytes(silent, runner, input_numbers=longest * model.network.sound_width)
    plan = EncoderPlan(
        dtype=dtype,
        linear_method=method,
        max_encoder_len=longest,
        num_tokens=num_tokens,
        ledger_bytes=ledger,
        free_bytes=free,
    )
    if plan.total_bytes > free:
        raise ConfigError(
            f"{model.architecture} needs {format_bytes(plan.total_bytes)} to read {num_tokens} tokens in one pass, but "
            f"only {format_bytes(free)} are free: lower --max-num-batched-tokens, or give --dtype bfloat16",
            field="max_num_batched_tokens",
        )
    return plan


def _longest_text(config: QuireConfig, model: ModelConfig, max_seq_length: int | None) -> int:
    """Most tokens of a text: as asked, else as the files say, else as many as the network has positions."""
    asked, most = config.model.max_model_len, model.max_encoder_len
    if asked is None or asked == LONGEST_THAT_FITS:
        return min(most, max_seq_length or most)
    if asked > most and not model.has_positions_without_end:
        raise ConfigError(
            f"max_model_len {asked} is more than the {most} tokens that {model.architecture} has positions for; lower "
            "it",
            field="max_model_len",
        )
    return asked
