"""Quire: LLM inference and serving. The public Python API.

Names are loaded on first use (PEP 562): `import quire` costs next to nothing, and only `LLM` ever loads torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config import QuireConfig
    from quire.llm import LLM
    from quire.lora_request import LoRARequest
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.plan import MemoryPlan, make_plan
    from quire.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.prompts import TextPrompt, TokensPrompt
    from quire_engine import BeamSearchParams, Logprob
    from quire_interfaces import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        EngineDeadError,
        OutputKind,
        OverloadedError,
        PoolingParams,
        QuireError,
        RequestError,
        RequestOptions,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

# A thread that waits for its team gives its core back after about 50 us, instead of turning for many milliseconds: on
# a busy machine that is the core that somebody, often another thread of the team, needs. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CheckpointError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "LoRARequest",
    "Logprob",
    "MemoryPlan",
    "OutputKind",
    "OverloadedError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireConfig",
    "QuireError",
    "RequestError",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "make_plan",
]

_MODULE_OF = {
    "LLM": "quire.llm",
    "LoRARequest": "quire.lora_request",
    "AsyncLLM": "quire.async_llm",
    "MemoryPlan": "quire.plan",
    "QuireConfig": "quire.config",
    "make_plan": "quire.plan",
    "ClassificationOutput": "quire.pooling.outputs",
    "ClassificationRequestOutput": "quire.pooling.outputs",
    "EmbeddingOutput": "quire.pooling.outputs",
    "EmbeddingRequestOutput": "quire.pooling.outputs",
    "PoolingOutput": "quire.pooling.outputs",
    "PoolingRequestOutput": "quire.pooling.outputs",
    "ScoringOutput": "quire.pooling.outputs",
    "ScoringRequestOutput": "quire.pooling.outputs",
    "BeamSearchParams": "quire_engine",
    "CompletionOutput": "quire.outputs",
    "Logprob": "quire_engine",
    "RequestOutput": "quire.outputs",
    "TextPrompt": "quire.prompts",
    "TokensPrompt": "quire.prompts",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF.get(name, "quire_interfaces")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
