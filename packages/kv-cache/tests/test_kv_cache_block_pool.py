"""The free list against a plain list, and the prefix index against plain sets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire_interfaces import ConfigError
from quire_kv_cache.block_pool import BlockPool
from quire_kv_cache.prefix_index import PrefixIndex


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[bytes] = []
        self.pool = BlockPool(num_blocks, 1, lambda group, hashes: self.evicted.extend(hashes))
        self.free = list(range(1, num_blocks))
        self.references: Counter[int] = Counter()
        self.content: dict[int, bytes] = {}

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        taken = self.pool.take(count)
        assert taken == self.free[:count]
        del self.free[:count]
        self.references.update(taken)
        gone = {self.content.pop(block) for block in taken if block in self.content}
        assert set(self.evicted) == gone - set(self.content.values())
        assert len(self.evicted) == len(set(self.evicted))
        self.evicted.clear()

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        findable = sorted(self.content)
        if findable:
            block = data.draw(st.sampled_from(findable))
            self.pool.touch([0, block])
            self.references[block] += 1
            if block in self.free:
                self.free.remove(block)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(self.references.elements())
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.release([block, 0])
            self.references[block] -= 1
            if not self.references[block]:
                self.free.insert(len(self.free) if block in self.content else 0, block)

    @rule(data=st.data(), name=st.sampled_from([b"x", b"y"]))
    def forget(self, data: st.DataObject, name: bytes) -> None:
        findable = sorted(self.content)
        block_ids = data.draw(st.lists(st.sampled_from(findable), min_size=1, unique=True)) if findable else []
        self.pool.forget(dict.fromkeys(block_ids, name))
        gone = [block for block in block_ids if self.content.get(block) == name and block in self.free]
        for block in gone:
            del self.content[block]
            self.free.remove(block)
        self.free = gone[::-1] + self.free
        assert self.evicted == ([name] if gone and name not in self.content.values() else [])
        self.evicted.clear()

    @rule(data=st.data(), name=st.sampled_from([b"x", b"y"]))
    def store(self, data: st.DataObject, name: bytes) -> None:
        unnamed = sorted(block for block in self.references if self.references[block] and block not in self.content)
        if unnamed:
            block = data.draw(st.sampled_from(unnamed))
            assert self.pool.store(block, name, 0) == (name not in self.content.values())
            self.content[block] = name

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_block_ids() == self.free
        assert self.pool.num_free == len(self.free)
        assert set(self.pool.indexes[0].blocks) == set(self.content.values())
        for name, block in self.pool.indexes[0].blocks.items():
            assert self.content[block] == name


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_pool = PoolMachine.TestCase


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        BlockPool(1, 1, lambda group, hashes: None)


def test_twins_keep_a_hash_findable() -> None:
    index = PrefixIndex()
    assert index.insert(b"h", 1)
    assert not index.insert(b"h", 2)
    assert not index.insert(b"h", 3)
    assert not index.remove(b"h", 1)
    assert index.blocks[b"h"] in (2, 3)
    assert not index.remove(b"h", 3)
    assert index.blocks == {b"h": 2}
    assert index.twins == {}
    assert index.remove(b"h", 2)
    assert index.blocks == {}
