"""Logits to token ids and log probabilities. `Sampler` says in which order."""

from quire_ops import uniform
from quire_sampling.config import SamplingConfig
from quire_sampling.logprobs import prompt_logprobs, token_logprobs
from quire_sampling.masks import TokenMasks, apply_token_masks_
from quire_sampling.output import NOTHING_LEFT, SamplerOutput
from quire_sampling.sampler import DeviceEdits, Sampler
from quire_sampling.state import SampleMode, SamplingState
from quire_sampling.top import top_tokens

__version__ = "0.1.0"

__all__ = [
    "NOTHING_LEFT",
    "DeviceEdits",
    "SampleMode",
    "Sampler",
    "SamplerOutput",
    "SamplingConfig",
    "SamplingState",
    "TokenMasks",
    "apply_token_masks_",
    "prompt_logprobs",
    "token_logprobs",
    "top_tokens",
    "uniform",
]
