"""All clients keep the contract of `EngineClient`."""

from __future__ import annotations

import dataclasses

from quire_engine import EngineClient, EngineConfig, EnginePool, InprocClient, ProcessClient
from quire_testkit.conformance.engine_client import EngineClientSuite
from quire_testkit.fake_engine import FACTORY, FakeEngineConfig, build_fake_engine


class TestInprocClient(EngineClientSuite):
    def make_client(self, engine: FakeEngineConfig, config: EngineConfig) -> EngineClient:
        return InprocClient(build_fake_engine(engine), config)


class TestProcessClient(EngineClientSuite):
    def make_client(self, engine: FakeEngineConfig, config: EngineConfig) -> EngineClient:
        return ProcessClient(FACTORY, dataclasses.asdict(engine), config)


class TestEnginePool(EngineClientSuite):
    num_engines = 2

    def make_client(self, engine: FakeEngineConfig, config: EngineConfig) -> EngineClient:
        data = dataclasses.asdict(engine)
        return EnginePool(lambda rank, owner: ProcessClient(FACTORY, data, config, owner=owner), 2, config)
