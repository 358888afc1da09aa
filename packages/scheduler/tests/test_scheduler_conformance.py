"""The scheduler, its policies and its rules keep the contracts of their Protocols."""

from __future__ import annotations

from quire_interfaces import AdmissionRule, BlockAllocator, SchedulingPolicy
from quire_scheduler import FCFSPolicy, MaxRunningPerTenantRule, PriorityPolicy, Scheduler, SchedulerConfig
from quire_testkit.conformance.scheduler import AdmissionRuleSuite, SchedulerSuite, SchedulingPolicySuite


class TestScheduler(SchedulerSuite):
    def make_scheduler(self, allocator: BlockAllocator, **options: int) -> Scheduler:
        return Scheduler(SchedulerConfig(**options), allocator)


class TestFCFSPolicy(SchedulingPolicySuite):
    def make_policy(self) -> SchedulingPolicy:
        return FCFSPolicy()


class TestPriorityPolicy(SchedulingPolicySuite):
    def make_policy(self) -> SchedulingPolicy:
        return PriorityPolicy()


class TestMaxRunningPerTenantRule(AdmissionRuleSuite):
    def make_rule(self, capacity: int) -> AdmissionRule:
        return MaxRunningPerTenantRule(capacity)
