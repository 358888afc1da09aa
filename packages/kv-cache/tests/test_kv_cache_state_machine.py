"""Random traffic against a simulated memory.

The model knows nothing of hashes, reference counts or free lists. It keeps, for every slot of every block, which
content was last written there, and before each step checks that every slot the step reads still holds what this request
(or one with the same beginning) wrote. A block shared wrongly, evicted while in use or given back too early is found
here, whatever the cause. What is findable is followed through the events; the longest prefix is searched by trying all.
Beside it stands a tier that keeps copies of blocks as they were in memory, and loads that bring them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_interfaces import (
    AllBlocksCleared,
    BlockKey,
    BlockRemoved,
    BlockStored,
    BlockTransfer,
    CachedPrefix,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    PromptMedia,
    Request,
    SlidingWindowSpec,
    StateTensor,
)
from quire_kv_cache import BlockHasher, KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_testkit.conformance.block_allocator import make_request

STATE = -1
"""Stands for the window of a state-space group: a token reads the state after the token before it."""


@dataclass(frozen=True)
class Chunk:
    """Stands for the window of a group whose tokens read their chunk up to themselves."""

    tokens: int
    """Whole blocks of every size there is."""


Window = int | Chunk | None
WINDOWS: list[tuple[Window, ...]] = [
    (None,), (1,), (3,), (6,), (None, 5), (4, None, 7), (None, None), (2, 9), (STATE,), (None, STATE),
    (STATE, 5, STATE), (Chunk(4),), (None, Chunk(8)), (Chunk(8), 5, Chunk(4)), (STATE, Chunk(4)),
]  # fmt: skip
ENCODER_INPUTS = [[7], [7, 8, 9], [7, 8, 8], [7, 8, 9, 7, 8]]
BASES = [[0] * 40, [0, 1] * 20, [0] * 9 + [1] * 31]
"""Prompts begin with one of these, so that beginnings meet often."""


@dataclass
class Sequence:
    """A request, and what the device knows of it that the scheduler does not."""

    request: Request
    tokens: list[int]
    """All true tokens, those of steps in flight included."""
    device_computed: int = 0
    results: list[tuple[int, list[int]]] = field(default_factory=list)
    """Per step in flight: drafts it rejects, tokens it gives."""
    table: tuple[list[int], ...] = ()
    """The block table as the runner has it: appended to, never corrected."""


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from(WINDOWS),
        num_cross=st.sampled_from([0, 0, 1, 2]),
        num_usable=st.integers(4, 40),
        algorithm=st.sampled_from(["sha256", "xxhash", "xxhash_cbor"]),
    )
    def start(
        self, block_size: int, windows: tuple[Window, ...], num_cross: int, num_usable: int, algorithm: str
    ) -> None:
        self.num_cross, self.hasher = num_cross, BlockHasher(algorithm, block_size)
        num_usable = max(num_usable, len(windows) + num_cross)  # the fewest that a plan takes
        self.size, self.windows, self.num_usable = block_size, windows, num_usable
        specs: dict[str, KVCacheSpec] = {}
        for i, window in enumerate(windows):
            common = {"block_size": block_size, "num_kv_heads": 1, "head_dim": i + 1, "dtype": "bfloat16"}
            if window is None:
                specs[str(i)] = FullAttentionSpec(**common)
            elif isinstance(window, Chunk):
                specs[str(i)] = ChunkedLocalSpec(**common, chunk_tokens=window.tokens)
            elif window == STATE:
                specs[str(i)] = MambaSpec(block_size=block_size, states=(StateTensor("ssm", (i + 1,), "float32"),))
            else:
                specs[str(i)] = SlidingWindowSpec(**common, sliding_window=window)
        for i in range(num_cross):
            specs[f"cross-{i}"] = CrossAttentionSpec(
                block_size=block_size, num_kv_heads=2, head_dim=i + 1, dtype="bfloat16", max_encoder_tokens=5
            )
        config = KVCacheConfig(block_size=block_size, prefix_caching_hash_algo=algorithm, enable_kv_cache_events=True)
        self.offered: list[BlockKey] = []
        self.tier: dict[BlockKey, list[Any]] = {}
        self.loads: dict[int, tuple[BlockTransfer, ...]] = {}
        self.held_by_loads: dict[int, list[int]] = {}
        self.num_loads = 0
        self.manager = KVCacheManager(
            plan_kv_cache(specs, num_blocks=num_usable + 1),
            config,
            on_computed=lambda group, hashes: self.offered.extend(BlockKey(group, each) for each in hashes),
        )
        planned = [group.spec for group in plan_kv_cache(specs, num_blocks=99).groups]
        assert planned == list(specs.values())
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_requests = 0
        self.memory: dict[tuple[int, int], Any] = {}
        self.contents: dict[Any, int] = {}
        self.findable: set[tuple[int, bytes]] = set()
        self.content_of_hash: dict[bytes, Any] = {}
        self.next_event = 0

    # What the slots hold

    def identities(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Per position, a number for everything its KV depends on: the tokens and media before it, and the salt."""
        request = sequence.request
        numbers = []
        last: Any = ("salt", request.options.cache_salt, tuple(request.encoder_token_ids))
        for position, token in enumerate(tokens):
            media = tuple((key, position - a) for a, b, key in request.cache_extra_keys if a <= position < b)
            last = self.contents.setdefault((last, token, media), len(self.contents))
            numbers.append(last)
        return numbers

    def encoder_slots(self, sequence: Sequence) -> dict[tuple[int, int], Any]:
        """(block, slot) -> what the request needs there of its encoder input; all of it depends on the whole input."""
        request = sequence.request
        content = (tuple(request.encoder_token_ids), request.options.cache_salt, request.cache_extra_keys)
        return {
            (sequence.table[group][position // self.size], position % self.size): (group, position, content)
            for group in range(len(self.windows), len(self.windows) + self.num_cross)
            for position in range(len(request.encoder_token_ids))
        }

    def first_read(self, window: Window, position: int) -> int:
        if window == STATE:
            return max(position - 1, 0)
        if isinstance(window, Chunk):
            return position - position % window.tokens
        return 0 if window is None else max(position - window + 1, 0)

    def check_readable(self, sequence: Sequence, position: int) -> None:
        """Everything that a token at `position` reads, other than itself, is in its place."""
        computed = sequence.device_computed
        numbers = self.identities(sequence, sequence.tokens[: max(position, computed)])
        held = self.manager.block_ids(sequence.request.request_id)
        for group, window in enumerate(self.windows):
            for past in range(self.first_read(window, position), position):
                block = sequence.table[group][past // self.size]
                assert block == held[group][past // self.size] != 0
                if window != STATE:
                    assert self.memory[block, past % self.size] == (group, numbers[past])
                    continue
                # A block keeps the state after the last of its tokens computed, which the scheduler may not know yet.
                last = max(past, min(past - past % self.size + self.size, computed) - 1)
                assert self.memory[block, 0] == (group, numbers[last])
        assert held[len(self.windows) :] == sequence.table[len(self.windows) :]
        assert all(self.memory[place] == content for place, content in self.encoder_slots(sequence).items())

    def execute(self, sequence: Sequence, tokens: list[int], num_wrong: int) -> None:
        """Compute `tokens` at the device's position; the last `num_wrong` are drafts that are not true. States are
        stored once that is known, of tokens before those."""
        start = sequence.device_computed
        self.check_readable(sequence, start)
        numbers = self.identities(sequence, sequence.tokens[:start] + tokens)
        for group, window in enumerate(self.windows):
            end = start + len(tokens) - (num_wrong if window == STATE else 0)
            for position in range(start, end):
                block = sequence.table[group][position // self.size]
                if window != STATE:
                    assert block != 0
                    self.memory[block, position % self.size] = (group, numbers[position])
                elif position == end - 1 or (position + 1) % self.size == 0:
                    assert block != 0 or position < end - 1
                    if block:
                        self.memory.update({(block, slot): (group, numbers[position]) for slot in range(self.size)})

    # What allocation owes us

    def needed_and_free(
        self, sequence: Sequence, start: int, end: int, num_slots: int, cached: CachedPrefix | None
    ) -> tuple[int, int]:
        request = sequence.request
        used: set[int] = set()
        num_held_blocks = 0
        for other in self.running:
            tables = self.manager.block_ids(other.request.request_id)
            used.update(block for table in tables[len(self.windows) :] for block in table)
            for group, table in enumerate(tables[: len(self.windows)]):
                first = 0
                if other is sequence:
                    earliest = min(start, request.num_tokens)
                    first = self.first_read(self.windows[group], earliest) // self.size
                    num_held_blocks = len(table)
                used.update(table[first:])
        if cached is not None:
            num_held_blocks = cached.num_tokens // self.size
            used.update(block for table in cached.block_ids for block in table)
        num_free = self.num_usable - len((used | self.blocks_of_loads()) - {0})
        new_blocks = range(num_held_blocks, -(-num_slots // self.size))
        needed = sum(
            window != STATE or block >= min(end, request.num_tokens) // self.size - 1
            for window in self.windows
            for block in new_blocks
        )
        if cached is not None and not cached.has_encoder:
            needed += self.num_cross * -(-len(request.encoder_token_ids) // self.size)
        return needed, num_free

    def allocate(self, sequence: Sequence, num_new: int, lookahead: int, cached: CachedPrefix | None = None) -> bool:
        request = sequence.request
        start = request.num_computed_tokens if cached is None else cached.num_tokens
        end = start + num_new
        needed, num_free = self.needed_and_free(sequence, start, end, end + lookahead, cached)
        before = None if cached else self.manager.block_ids(request.request_id)
        blocks = self.manager.allocate(request, num_new, cached, lookahead)
        assert (blocks is None) == (needed > num_free)
        if blocks is None:
            if before is not None:
                assert self.manager.block_ids(request.request_id) == before
            return False
        if cached is None:
            sequence.table = tuple(old + new for old, new in zip(sequence.table, blocks, strict=True))
        else:
            sequence.table = blocks
        assert self.manager.num_slots(request.request_id) >= start + num_new + lookahead
        return True

    # Traffic

    @rule(
        base=st.sampled_from(BASES),
        num_base=st.integers(0, 24),
        tail=st.lists(st.integers(0, 2), max_size=4),
        salt=st.sampled_from([None, None, None, "s"]),
        keys=st.sampled_from([(), (), (), ((3, 6, "cat"),), ((3, 6, "dog"),), ((0, 100, "adapter"),)]),
        reads=st.sampled_from([True, True, True, False]),
        encoder=st.sampled_from(ENCODER_INPUTS),
    )
    def add(
        self, base: list[int], num_base: int, tail: list[int], salt: Any, keys: Any, reads: bool, encoder: list[int]
    ) -> None:
        tokens = base[:num_base] + tail or [0]
        self.num_requests += 1
        request = make_request(
            f"r{self.num_requests}", tokens, cache_salt=salt, cache_extra_keys=keys, reads_prefix_cache=reads
        )
        request.encoder_token_ids = encoder if self.num_cross else []
        request.media = PromptMedia(spans=()) if len(encoder) == 3 else None
        self.waiting.append(Sequence(request, tokens))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=st.integers(1, 30), lookahead=st.integers(0, 3))
    def admit(self, data: st.DataObject, chunk: int, lookahead: int) -> None:
        sequence = data.draw(st.sampled_from(self.waiting))
        request = sequence.request
        cached = self.manager.find_cached_prefix(request)
        assert cached.num_tokens == self.longest_findable(request)
        assert cached.has_encoder == self.finds_encoder(request)
        num_new = min(chunk, request.num_tokens - cached.num_tokens)
        if not self.allocate(sequence, num_new, lookahead, cached):
            return
        self.waiting.remove(sequence)
        self.running.append(sequence)
        request.num_computed_tokens = sequence.device_computed = cached.num_tokens
        if not cached.has_encoder:
            self.memory.update(self.encoder_slots(sequence))
        self.launch(sequence, num_new, [], data.draw(st.integers(0, 2)))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        chunk=st.integers(1, 30),
        drafts=st.lists(st.integers(0, 2), max_size=3),
        lookahead=st.integers(0, 2),
    )
    def step(self, data: st.DataObject, chunk: int, drafts: list[int], lookahead: int) -> None:
        """One more step for one request, while up to one step before it is in flight."""
        sequence = data.draw(st.sampled_from(self.running))
        request = sequence.request
        num_left = request.num_tokens - request.num_computed_tokens
        if len(sequence.results) == 2:
            return
        if sequence.results:
            drafts, num_new = [], 1
        elif num_left > 1:
            drafts, num_new = [], min(chunk, num_left)
        else:
            num_new = 1 + len(drafts)
        if not self.allocate(sequence, num_new, lookahead):
            return
        # The scheduler may be wrong about where this step begins; it begins nowhere before the known tokens' end.
        self.check_readable(sequence, min(request.num_computed_tokens, request.num_tokens))
        self.launch(sequence, num_new, drafts, data.draw(st.integers(0, 2)))

    def launch(self, sequence: Sequence, num_new: int, drafts: list[int], bonus: int) -> None:
        request = sequence.request
        start = sequence.device_computed
        num_true = num_new - len(drafts)
        true_tokens = sequence.tokens[start : start + num_true]
        assert len(true_tokens) == num_true
        num_accepted = next((i for i, draft in enumerate(drafts) if draft == bonus), len(drafts))
        self.execute(sequence, true_tokens + drafts, len(drafts) - num_accepted)
        request.num_computed_tokens += num_new
        sequence.device_computed = start + num_true + num_accepted
        if sequence.device_computed - num_accepted == len(sequence.tokens):
            given_tokens = [*drafts[:num_accepted], bonus]
            sequence.tokens = sequence.tokens + given_tokens
            sequence.results.append((len(drafts) - num_accepted, given_tokens))
        self.cache(sequence)

    def cache(self, sequence: Sequence) -> None:
        request = sequence.request
        num_certain = min(request.num_computed_tokens, request.num_tokens)
        # Not after each step: whatever was left out has to come with the next call.
        if num_certain % 3 != self.num_requests % 3:
            self.manager.cache_blocks(request, num_certain)
        self.follow_events()

    @precondition(lambda self: any(sequence.results for sequence in self.running))
    @rule(data=st.data())
    def take_result(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([sequence for sequence in self.running if sequence.results]))
        num_rejected, tokens = sequence.results.pop(0)
        sequence.request.num_computed_tokens -= num_rejected
        sequence.request.output_token_ids.extend(tokens)
        self.cache(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempt=st.booleans())
    def leave(self, data: st.DataObject, preempt: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        request = sequence.request
        self.running.remove(sequence)
        self.manager.free(request)
        assert self.manager.num_slots(request.request_id) == 0
        if preempt:
            sequence.tokens = request.token_ids(0, request.num_tokens)
            sequence.results.clear()
            request.num_computed_tokens = sequence.device_computed = 0
            request.num_preemptions += 1
            self.waiting.append(sequence)

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (not self.running)
        if not self.running:
            self.held_by_loads = {job: [] for job in self.loads}

    # The tier

    def blocks_of_loads(self) -> set[int]:
        targets = {block.block_id for blocks in self.loads.values() for block in blocks}
        return targets.union(*self.held_by_loads.values())

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        """Copy some of what was offered, as far as it is still in memory."""
        num_taken = data.draw(st.integers(1, len(self.offered)))
        taken, self.offered = self.offered[:num_taken], self.offered[num_taken:]
        for key in taken:
            block = self.manager.cached_block_id(key)
            assert (block is None) == ((key.group, key.block_hash) not in self.findable)
            if block is not None:
                self.tier[key] = [self.memory[block, slot] for slot in range(self.size)]

    @precondition(lambda self: self.tier and self.waiting)
    @rule(data=st.data())
    def begin_load(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting)).request
        cached = self.manager.find_cached_prefix(request)
        prefix = self.manager.find_loadable_prefix(request, cached, self.tier.__contains__)
        in_reach = self.findable | {(key.group, key.block_hash) for key in self.tier}
        assert prefix.num_tokens == self.longest_findable(request, in_reach)
        assert bool(prefix.missing) == (prefix.num_tokens > cached.num_tokens)
        if not prefix.missing:
            return
        read = [
            (group, block)
            for group, window in enumerate(self.windows)
            for block in range(self.first_read(window, prefix.num_tokens) // self.size, prefix.num_tokens // self.size)
        ]
        in_memory = [
            self.manager.cached_block_id(BlockKey(group, request.block_hashes[block])) for group, block in read
        ]
        assert sorted(prefix.missing) == sorted(
            place for place, block in zip(read, in_memory, strict=True) if block is None
        )
        num_free = self.manager.usage().num_free_blocks
        blocks = self.manager.begin_load(self.num_loads, request, prefix)
        assert (blocks is None) == (prefix.num_blocks_wanted > num_free)
        if blocks is not None:
            assert self.manager.usage().num_free_blocks == num_free - prefix.num_blocks_wanted
            self.loads[self.num_loads] = blocks
            self.held_by_loads[self.num_loads] = [block for block in in_memory if block is not None]
            self.num_loads += 1

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), all_arrive=st.booleans())
    def end_load(self, data: st.DataObject, all_arrive: bool) -> None:
        """Whatever happened meanwhile, nobody else has had the blocks; some may not have come."""
        job = data.draw(st.sampled_from(sorted(self.loads)))
        blocks = self.loads.pop(job)
        del self.held_by_loads[job]
        arrived = [all_arrive or data.draw(st.booleans()) for _ in blocks]
        for block, is_there in zip(blocks, arrived, strict=True):
            for slot in range(self.size):
                self.memory[block.block_id, slot] = self.tier[block.key][slot] if is_there else "rubbish"
        num_offered = len(self.offered)
        self.manager.end_load(job, arrived)
        assert len(self.offered) == num_offered, "what a tier brought is not offered to it again"
        self.follow_events()
        for block, is_there in zip(blocks, arrived, strict=True):
            assert not is_there or (block.key.group, block.key.block_hash) in self.findable

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def explain(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting)).request
        miss = self.manager.explain_miss(request)
        assert miss.num_hit_tokens == self.manager.find_cached_prefix(request).num_tokens
        whole = (request.num_tokens - 1) // self.size * self.size
        assert (miss.reason == "not_readable") == (not request.reads_prefix_cache)
        if request.reads_prefix_cache:
            assert (miss.reason in ("full_hit", "partial_block")) == (miss.num_hit_tokens == whole)

    # What is findable

    def follow_events(self) -> None:
        for event in self.manager.take_events():
            assert event.sequence_number == self.next_event
            self.next_event += 1
            if isinstance(event, BlockStored):
                self.follow_stored(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self.findable.remove((event.group, block_hash))
            else:
                assert isinstance(event, AllBlocksCleared)
                self.findable.clear()

    def follow_stored(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        is_full = len(event.token_ids) == len(event.block_hashes) * self.size
        assert is_full or (event.group >= len(self.windows) and len(event.block_hashes) == 1)
        for i, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[i * self.size : (i + 1) * self.size])
            content = (parent, tokens, event.extra_keys[i])
            assert self.content_of_hash.setdefault(block_hash, content) == content
            assert (event.group, block_hash) not in self.findable
            self.findable.add((event.group, block_hash))
            parent = block_hash

    def finds_encoder(self, request: Request) -> bool:
        groups = range(len(self.windows), len(self.windows) + self.num_cross)
        hashes = self.hasher.encoder_block_hashes(request) if self.num_cross else []
        return bool(hashes) and {(group, each) for group in groups for each in hashes} <= self.findable

    def longest_findable(self, request: Request, where: set[tuple[int, bytes]] | None = None) -> int:
        self.follow_events()
        where = self.findable if where is None else where
        if not request.reads_prefix_cache:
            return 0
        longest = 0
        for end in range(0, request.num_tokens, self.size):
            if all(
                (group, request.block_hashes[position // self.size]) in where
                for group, window in enumerate(self.windows)
                for position in range(self.first_read(window, end), end)
            ):
                longest = end
        return longest

    @invariant()
    def is_whole(self) -> None:
        self.manager.check_integrity()
        self.follow_events()
        usage = self.manager.usage()
        assert usage.num_total_blocks == self.num_usable
        tables = [self.manager.block_ids(sequence.request.request_id) for sequence in self.running]
        held = {block for groups in tables for table in groups for block in table} - {0}
        held |= self.blocks_of_loads()
        assert usage.num_free_blocks == self.num_usable - len(held)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for sequence in self.running:
                self.manager.free(sequence.request)
            for job, blocks in self.loads.items():
                self.manager.end_load(job, [False] * len(blocks))
            self.manager.check_integrity()
            assert self.manager.usage().num_free_blocks == self.num_usable


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_random_traffic = CacheMachine.TestCase
