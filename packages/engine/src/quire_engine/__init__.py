"""The step loop, its process and its client: requests in, tokens out.

Joins a scheduler and an executor through the Protocols of `quire_interfaces`. Imports neither torch nor any
implementation of either side: they are handed in, or named for the engine process to import.
"""

from quire_engine.alignment import alignment_params
from quire_engine.async_engine import AsyncEngine
from quire_engine.beam_search import Beam, BeamSearch, BeamSearchParams
from quire_engine.client import EngineClient, PauseMode
from quire_engine.config import EngineConfig
from quire_engine.core import EngineCore, EngineParts, StepResult
from quire_engine.core_loop import CoreLoop, Inbox
from quire_engine.engine_hub import EngineHub, FrontAddresses
from quire_engine.engine_pool import EnginePool, MakeEngine
from quire_engine.hub_client import HubClient
from quire_engine.inproc_client import InprocClient
from quire_engine.input_processor import InputProcessor
from quire_engine.kv_event_publisher import KVEventPublisher
from quire_engine.kv_events_config import KVEventsConfig
from quire_engine.listener import EngineListener, NullListener
from quire_engine.llm_engine import LLMEngine
from quire_engine.messages import AddRequest, EngineInfo, pack_token_ids, unpack_token_ids
from quire_engine.metrics import RequestMetrics
from quire_engine.output_processor import DetokenizerFactory, RequestProcessor
from quire_engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire_engine.pooling import PooledRequestOutput
from quire_engine.process_client import ProcessClient
from quire_engine.streaming_client import EngineOwner, StreamingClient
from quire_engine.streams import OutputStream

__version__ = "0.1.0"

__all__ = [
    "AddRequest",
    "AsyncEngine",
    "Beam",
    "BeamSearch",
    "BeamSearchParams",
    "CompletionOutput",
    "CoreLoop",
    "DetokenizerFactory",
    "EngineClient",
    "EngineConfig",
    "EngineCore",
    "EngineHub",
    "EngineInfo",
    "EngineListener",
    "EngineOwner",
    "EngineParts",
    "EnginePool",
    "FrontAddresses",
    "HubClient",
    "Inbox",
    "InprocClient",
    "InputProcessor",
    "KVEventPublisher",
    "KVEventsConfig",
    "LLMEngine",
    "Logprob",
    "MakeEngine",
    "NullListener",
    "OutputStream",
    "PauseMode",
    "PooledRequestOutput",
    "ProcessClient",
    "RequestMetrics",
    "RequestOutput",
    "RequestProcessor",
    "StepResult",
    "StreamingClient",
    "alignment_params",
    "pack_token_ids",
    "unpack_token_ids",
]
