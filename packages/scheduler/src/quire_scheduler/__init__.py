"""Continuous batching scheduler: token budget, admission, preemption, pause states."""

from quire_scheduler.adapters import AdapterGate
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.media import MediaRule
from quire_scheduler.pipeline import PipelineRule
from quire_scheduler.policies import FCFSPolicy, PriorityPolicy
from quire_scheduler.request_transfers import ConnectedScheduler, RequestTransfers
from quire_scheduler.rows import RowPool
from quire_scheduler.rules import EncoderRule, FreeRowRule, MaxRunningPerTenantRule, SharedPromptRule
from quire_scheduler.scheduler import Scheduler
from quire_scheduler.transfers import KVTransfers

__version__ = "0.1.0"

__all__ = [
    "AdapterGate",
    "ConnectedScheduler",
    "EncoderRule",
    "FCFSPolicy",
    "FreeRowRule",
    "KVTransfers",
    "MaxRunningPerTenantRule",
    "MediaRule",
    "PipelineRule",
    "PriorityPolicy",
    "RequestTransfers",
    "RowPool",
    "Scheduler",
    "SchedulerConfig",
    "SharedPromptRule",
]
