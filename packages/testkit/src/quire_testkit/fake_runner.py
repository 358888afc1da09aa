"""A runner without a model: executes step plans, checks them strictly, and answers with predictable tokens.

`FakeRunner` keeps rows and a KV cache like a real runner does, but what it "computes" for a position is only a digest
of all tokens up to there, and the token it "samples" is a pure function of that digest and the seeds. So a request's
output must be the same however it was batched, chunked, preempted, cached or drafted, and however many steps were in
flight. The digests are written to and read from the blocks of the plan's block tables: a block that was shared,
reused or remembered wrongly is noticed by what is in it.

`FakeExecutor` puts it behind the `Executor` Protocol, for engines and servers that need no weights.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from quire_interfaces import (
    NULL_BLOCK_ID,
    ModelRunnerOutput,
    NewRow,
    PooledOutput,
    PoolingParams,
    RequestFailure,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)

__all__ = ["FakeExecutor", "FakeRunner", "PlanError", "expected_output", "expected_pooled"]

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class PlanError(AssertionError):
    """A `SchedulerOutput` broke one of the promises written in `quire_interfaces.step`."""


@dataclass(slots=True)
class _Row:
    """What a runner knows of one request."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_tables: tuple[list[int], ...]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    pooling_params: PoolingParams | None
    first_position: int
    """Where its last step began: with a sliding window, nothing earlier than the window before it is read again."""
    digests: list[int]
    """Of each computed position; digests[p] stands for all tokens up to and with p."""


def _mix(a: int, b: int) -> int:
    """A 64-bit digest of two numbers (multiply and fold, after Knuth's multiplicative hashing)."""
    x = ((a ^ (b + 0x632BE59BD9B4E019)) * _MIX) & _MASK
    return ((x ^ (x >> 29)) * _MIX) & _MASK


def _check(ok: bool, complaint: str) -> None:
    if not ok:
        raise PlanError(complaint)


class _Sampler:
    """Token ids as a function of digest and seeds, in [first_token_id, first_token_id + num_token_ids)."""

    def __init__(self, seed: int, first_token_id: int, num_token_ids: int) -> None:
        self._seed = seed
        self._first = first_token_id
        self._num = num_token_ids

    def sample(self, digest: int, seed: int, masked: frozenset[int]) -> int:
        """The token that follows; the next one that is not `masked`."""
        drawn = (_mix(_mix(digest, seed & _MASK), self._seed) >> 17) % self._num
        for offset in range(self._num):
            token = self._first + (drawn + offset) % self._num
            if token not in masked:
                return token
        raise ValueError(f"all {self._num} token ids are masked; give the fake runner a larger vocabulary")


def expected_pooled(token_ids: Sequence[int]) -> PooledOutput:
    """What a `FakeRunner` pools of a prompt, for whatever task: two numbers that tell all its tokens."""
    digest = 0
    for token_id in token_ids:
        digest = _mix(digest, token_id)
    return PooledOutput(struct.pack("<2f", digest % 65521 / 65521, len(token_ids)), (2,))


def _pooled_parts(token_ids: Sequence[int], params: PoolingParams) -> PooledOutput:
    """`expected_pooled` of a prompt, or of each of its parts one behind the other (late chunking)."""
    if (edges := params.late_chunk_edges) is None:
        return expected_pooled(token_ids)
    parts = [expected_pooled(token_ids[start:end]).data for start, end in pairwise(edges)]
    return PooledOutput(b"".join(parts), (len(parts), 2))


def expected_output(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    *,
    request_seed: int,
    stop_token_ids: Iterable[int] = (),
    min_tokens: int = 0,
    seed: int = 0,
    first_token_id: int = 0,
    num_token_ids: int = 1000,
) -> list[int]:
    """The output tokens of a request run alone, by direct recurrence: the oracle for anything a `FakeRunner` served.

    Args:
        prompt_token_ids: The prompt.
        num_tokens: Most output tokens.
        request_seed: The request's seed.
        stop_token_ids: Tokens that end the output (kept as its last).
        min_tokens: No stop token among the first so many.
        seed: Seed of the runner.
        first_token_id: As given to the runner.
        num_token_ids: As given to the runner.
    """
    sampler = _Sampler(seed, first_token_id, num_token_ids)
    stop = frozenset(stop_token_ids)
    digest = 0
    for token in prompt_token_ids:
        digest = _mix(digest, token)
    output: list[int] = []
    while len(output) < num_tokens:
        token = sampler.sample(digest, request_seed, stop if len(output) < min_tokens else frozenset())
        output.append(token)
        if token in stop:
            break
        digest = _mix(digest, token)
    return output


class FakeRunner:
    """Executes `SchedulerOutput`s without a model.

    Args:
        num_rows: Rows, as the scheduler's max_num_seqs.
        block_sizes: Token slots per block, one per KV cache group.
        sliding_windows: Per group, the window in tokens or None; None for all groups means full attention.
        num_blocks: Blocks of the pool, the null block included; None does not check block ids against it.
        seed: Changes all outputs.
        first_token_id: Lowest token id sampled.
        num_token_ids: How many different ids are sampled.
        max_model_len: Positions at or beyond it are refused; None does not check.
        num_draft_tokens: Drafts proposed for each row that sampled; 0 proposes none.
        draft_accuracy: Share of proposed tokens that are right (each chosen by its position's digest).
        num_forced_tokens: Most tokens that are said to be certain after a sampled one (how many is a function of the
            digest); 0 says so of none.
        check_kv: Read all KV back in each step (slow for long requests; switch off to serve).

    Attributes:
        raise_on: Ids of requests that make the whole step raise; the step then leaves no trace. May be changed.
        fail_on: Request id -> message: requests reported in `failed_rows`. May be changed.
        rests_in: Ids of steps whose results bring no proposals, and say that none follow. May be changed.

    Raises:
        PlanError: From `execute`, when a plan breaks a promise.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        block_sizes: Sequence[int] = (16,),
        sliding_windows: Sequence[int | None] | None = None,
        num_blocks: int | None = None,
        seed: int = 0,
        first_token_id: int = 0,
        num_token_ids: int = 1000,
        max_model_len: int | None = None,
        num_draft_tokens: int = 0,
        draft_accuracy: float = 0.5,
        num_forced_tokens: int = 0,
        check_kv: bool = True,
    ) -> None:
        self.raise_on: set[str] = set()
        self.fail_on: dict[str, str] = {}
        self.rests_in: Container[int] = ()
        self._rows: list[_Row | None] = [None] * num_rows
        self._block_sizes = tuple(block_sizes)
        self._windows = tuple(sliding_windows) if sliding_windows else (None,) * len(self._block_sizes)
        self._num_blocks = num_blocks
        self._sampler = _Sampler(seed, first_token_id, num_token_ids)
        self._first_token_id = first_token_id
        self._num_token_ids = num_token_ids
        self._max_model_len = max_model_len
        self._num_draft_tokens = num_draft_tokens
        self._draft_accuracy = draft_accuracy
        self._num_forced_tokens = num_forced_tokens
        self._check_kv = check_kv
        self._kv: dict[tuple[int, int], int] = {}
        self._last_step_id = -1
        self._unsettled: set[int] = set()
        """Rows of steps that raised, until they are freed or filled anew."""
        self._has_raised = False

    @property
    def num_filled_rows(self) -> int:
        """Rows that hold a request."""
        return sum(row is not None for row in self._rows)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Check and run one step."""
        _check(output.step_id > self._last_step_id, f"step {output.step_id} after step {self._last_step_id}")
        self._last_step_id = output.step_id
        self._raise_if_broken(output)
        self._check_shape(output)
        self._free(output.freed_rows)
        for new in output.new_rows:
            self._fill(new)
        self._append_blocks(output)
        starts_of_drafts = [self._compute(output, index) for index in range(len(output.rows))]
        if self._check_kv:
            self._check_sharing()
            for row_number in output.rows:
                self._read_back(row_number)
        return self._results(output, starts_of_drafts)

    def _raise_if_broken(self, output: SchedulerOutput) -> None:
        """Raise, before anything is changed, for a step with a poisoned request, or one built on a step that raised."""
        new = {new.row for new in output.new_rows}
        poisoned = sorted(self.raise_on.intersection(output.request_ids))
        orphans = sorted(self._unsettled.intersection(output.rows) - new)
        if poisoned or orphans:
            self._has_raised = True
            self._unsettled.update(output.rows, output.freed_rows)
            if poisoned:
                raise RuntimeError(f"request {poisoned[0]} broke the step")
            raise RuntimeError(f"row {orphans[0]} goes on from a step that raised")

    def _check_shape(self, output: SchedulerOutput) -> None:
        """What can be said of a plan without knowing the rows."""
        num_entries = len(output.rows)
        for name in ("request_ids", "num_computed_tokens", "num_scheduled_tokens", "samples"):
            _check(len(getattr(output, name)) == num_entries, f"{name} has not one element per entry")
        _check(len(set(output.rows)) == num_entries, f"a row has two entries: {output.rows}")
        _check(all(n >= 1 for n in output.num_scheduled_tokens), f"no tokens: {output.num_scheduled_tokens}")
        total = sum(output.num_scheduled_tokens)
        _check(output.total_num_scheduled_tokens == total, f"total {output.total_num_scheduled_tokens}, not {total}")
        new = [new.row for new in output.new_rows]
        _check(len(set(new)) == len(new), f"a row is filled twice: {new}")
        _check(len(set(output.freed_rows)) == len(output.freed_rows), f"freed twice: {output.freed_rows}")
        entries = set(output.rows)
        _check(entries.issuperset(new), f"new rows {new} without an entry in {output.rows}")
        _check(entries.issuperset(output.new_block_ids), "blocks for a row without an entry")
        _check(not set(new).intersection(output.new_block_ids), "a new row is listed in new_block_ids too")
        _check(entries.issuperset(output.draft_token_ids), "drafts for a row without an entry")
        _check(output.forced_rows.issubset(output.draft_token_ids), "certain drafts for a row without drafts")

    def _free(self, rows: list[int]) -> None:
        for number in rows:
            # A step that raised, or one planned after it, may be taken back, and then names its freed rows again.
            _check(self._rows[number] is not None or self._has_raised, f"row {number} is freed while empty")
            self._rows[number] = None
        self._unsettled.difference_update(rows)

    def _fill(self, new: NewRow) -> None:
        # A step that was to free the row may have raised while the one that fills it was planned already.
        free = self._rows[new.row] is None or new.row in self._unsettled
        _check(free, f"row {new.row} is filled while in use")
        self._unsettled.discard(new.row)
        num_tokens = len(new.token_ids)
        _check(0 < new.num_prompt_tokens <= num_tokens, f"{new.num_prompt_tokens} prompt tokens of {num_tokens}")
        _check(0 <= new.num_computed_tokens < num_tokens, f"{new.num_computed_tokens} computed of {num_tokens}")
        _check(len(new.block_ids) == len(self._block_sizes), f"block tables for {len(new.block_ids)} groups")
        digests: list[int] = []
        digest = 0
        for token in new.token_ids[: new.num_computed_tokens]:
            digest = _mix(digest, token)
            digests.append(digest)
        tables = tuple(list(blocks) for blocks in new.block_ids)
        for blocks in tables:
            self._check_blocks(blocks)
        self._rows[new.row] = _Row(
            request_id=new.request_id,
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_tables=tables,
            params=new.sampling_params,
            seed=new.seed,
            stop_token_ids=new.stop_token_ids,
            pooling_params=new.pooling_params,
            first_position=new.num_computed_tokens,
            digests=digests,
        )

    def _check_blocks(self, blocks: list[int]) -> None:
        if self._num_blocks is not None:
            _check(all(0 <= block < self._num_blocks for block in blocks), f"block ids out of range: {blocks}")

    def _append_blocks(self, output: SchedulerOutput) -> None:
        for number, groups in output.new_block_ids.items():
            row = self._row(number)
            _check(len(groups) == len(self._block_sizes), f"new blocks for {len(groups)} groups")
            for table, blocks in zip(row.block_tables, groups, strict=True):
                self._check_blocks(blocks)
                table.extend(blocks)

    def _row(self, number: int) -> _Row:
        row = self._rows[number]
        if row is None:
            raise PlanError(f"row {number} is used but was never filled")
        return row

    def _compute(self, output: SchedulerOutput, index: int) -> int:
        """Write the KV of one entry. Returns the number of known tokens before the drafts."""
        number = output.rows[index]
        row = self._row(number)
        where = f"row {number} ({row.request_id})"
        _check(output.request_ids[index] == row.request_id, f"{where} is called {output.request_ids[index]}")
        start, num_new = output.num_computed_tokens[index], output.num_scheduled_tokens[index]
        drafts = output.draft_token_ids.get(number, [])
        num_known = len(row.token_ids)
        end = start + num_new
        if row.request_id in self.fail_on:
            return num_known  # it went wrong once; whatever steps come until the row is freed are of no use
        _check(start == row.num_computed_tokens, f"{where} goes on at {start}, but {row.num_computed_tokens} computed")
        _check(end <= num_known + len(drafts), f"{where} computes up to {end} of {num_known} + {len(drafts)} tokens")
        _check(not drafts or end == num_known + len(drafts), f"{where} has drafts that are not computed")
        _check(output.samples[index] == (end >= num_known), f"{where}: samples is {output.samples[index]}")
        if self._max_model_len is not None:
            _check(end <= self._max_model_len, f"{where} leaves the context: {end} > {self._max_model_len}")
        digest = row.digests[start - 1] if start else 0
        for position in range(start, end):
            token = row.token_ids[position] if position < num_known else drafts[position - num_known]
            digest = _mix(digest, token)
            row.digests.append(digest)
            self._write(row, where, position, digest)
        row.num_computed_tokens = end
        row.first_position = start
        return num_known

    def _write(self, row: _Row, where: str, position: int, digest: int) -> None:
        for group, (table, size) in enumerate(zip(row.block_tables, self._block_sizes, strict=True)):
            index, offset = divmod(position, size)
            _check(index < len(table), f"{where} has no slot for position {position} in group {group}")
            _check(table[index] != NULL_BLOCK_ID, f"{where} writes position {position} to the null block")
            if self._check_kv:
                self._kv[table[index], offset] = digest

    def _blocks_in_use(self, row: _Row) -> Iterator[tuple[int, int, int, int]]:
        """(block id, its first position, the first one that is read, the position after it) of what a row uses."""
        if row.request_id in self.fail_on:
            return  # it computes nothing any more, so its window stands still while the scheduler's moves on
        for table, size, window in zip(row.block_tables, self._block_sizes, self._windows, strict=True):
            # Blocks that left the window are not reported to the runner: its table may still name them.
            first_read = 0 if window is None else max(0, row.first_position - window + 1)
            for index in range(first_read // size, len(table)):
                yield table[index], index * size, max(first_read, index * size), (index + 1) * size

    def _check_sharing(self) -> None:
        """A block may be in two rows only where both have computed all of it."""
        owners: dict[int, tuple[str, bool]] = {}
        for number, row in enumerate(self._rows):
            # The step that was to free an unsettled row raised; its blocks may be somebody else's by now.
            if row is None or number in self._unsettled:
                continue
            for block, _, _, end in self._blocks_in_use(row):
                full = end <= row.num_computed_tokens
                other, other_full = owners.setdefault(block, (row.request_id, full))
                _check(
                    other == row.request_id or (full and other_full),
                    f"block {block} is in the tables of {other} and {row.request_id}, but not full",
                )

    def _read_back(self, number: int) -> None:
        """All KV that a row reads must be its own; the null block has none to read."""
        row = self._row(number)
        for block, first, first_read, end in self._blocks_in_use(row):
            for position in range(first_read, min(end, len(row.digests))):
                _check(
                    self._kv.get((block, position - first)) == row.digests[position],
                    f"row {number} ({row.request_id}) reads another request's KV at position {position}, block {block}",
                )

    def _results(self, output: SchedulerOutput, num_known: list[int]) -> ModelRunnerOutput:
        follow = output.step_id not in self.rests_in
        result = ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[], drafts_follow=follow)
        for index, number in enumerate(output.rows):
            row = self._row(number)
            if row.request_id in self.fail_on:
                result.failed_rows[number] = RequestFailure(self.fail_on[row.request_id])
                result.sampled_token_ids.append([])
                continue
            start = output.num_computed_tokens[index]
            if row.params.prompt_logprobs is not None and start < row.num_prompt_tokens - 1:
                end = min(row.num_computed_tokens, row.num_prompt_tokens - 1)
                result.prompt_logprobs[number] = [
                    self._logprobs(row.token_ids[p + 1], p + 1, row.params.prompt_logprobs) for p in range(start, end)
                ]
            if not output.samples[index]:
                result.sampled_token_ids.append([])
                continue
            if row.pooling_params is not None:
                result.pooled[number] = _pooled_parts(row.token_ids, row.pooling_params)
                result.sampled_token_ids.append([min(row.stop_token_ids)])
                continue
            drafts = output.draft_token_ids.get(number, [])
            tokens = self._verify(row, drafts, num_known[index])
            _check(
                number not in output.forced_rows or tokens[:-1] == drafts,
                f"row {number} ({row.request_id}) was told that {drafts} are certain, but {tokens} follow",
            )
            result.sampled_token_ids.append(tokens)
            if row.params.logprobs is not None:
                named = row.params.logprob_token_ids
                result.logprobs[number] = [
                    self._logprobs(token, num_known[index] + i, row.params.logprobs, named)
                    for i, token in enumerate(tokens)
                ]
            if self._num_forced_tokens and (forced := self._forced(row)):
                result.forced_token_ids[number] = forced
            elif self._num_draft_tokens and result.drafts_follow:
                result.draft_token_ids[number] = self._propose(row)
        return result

    def _logprobs(self, token: int, position: int, num_top: int, named: tuple[int, ...] | None = None) -> TokenLogprobs:
        """Made up, but a function of token and position only, in which the token itself is the most likely one."""
        top = named or [(token + i) % (self._first_token_id + self._num_token_ids) for i in range(num_top)]
        return TokenLogprobs([token, *top], [-0.001 * (position + i) for i in (0, *range(num_top))], 1)

    def _forced(self, row: _Row) -> list[int]:
        """Some of the tokens that will be sampled after the last one."""
        digest = _mix(row.digests[-1], row.token_ids[-1])
        forced: list[int] = []
        # As with a grammar, what is certain after a token stays so after the next: a run ends at a fixed position.
        while len(forced) < self._num_forced_tokens and (digest >> 35) % 3:
            token = self._sampler.sample(digest, row.seed, self._masked(row, len(forced)))
            forced.append(token)
            digest = _mix(digest, token)
        return forced

    def _masked(self, row: _Row, num_ahead: int = 0) -> frozenset[int]:
        num_output = len(row.token_ids) + num_ahead - row.num_prompt_tokens
        return row.stop_token_ids if num_output < row.params.min_tokens else frozenset()

    def _verify(self, row: _Row, drafts: list[int], num_known: int) -> list[int]:
        """Accept drafts while they are what would have been sampled, then sample one more."""
        tokens: list[int] = []
        for draft in [*drafts, None]:
            digest = row.digests[num_known - 1 + len(tokens)]
            token = self._sampler.sample(digest, row.seed, self._masked(row))
            tokens.append(token)
            row.token_ids.append(token)
            if token != draft:
                break
        row.num_computed_tokens = len(row.token_ids) - 1
        del row.digests[row.num_computed_tokens :]
        return tokens

    def _propose(self, row: _Row) -> list[int]:
        """Draft tokens, some right and some wrong."""
        digest = _mix(row.digests[-1], row.token_ids[-1])
        drafts: list[int] = []
        for _ in range(self._num_draft_tokens):
            token = self._sampler.sample(digest, row.seed, frozenset())
            if (digest >> 40) % 1000 >= self._draft_accuracy * 1000:
                token = self._first_token_id + (token + 1 - self._first_token_id) % self._num_token_ids
            drafts.append(token)
            digest = _mix(digest, token)
        return drafts


class FakeExecutor:
    """An `Executor` over a `FakeRunner`.

    Args:
        runner: Does the work.
        step_time_s: Time a step pretends to take. 0 runs each step in the calling thread and returns a finished future;
            otherwise one worker thread runs the steps in order, so that several can be in flight.
        token_time_s: Further time per scheduled token.
    """

    def __init__(self, runner: FakeRunner, *, step_time_s: float = 0.0, token_time_s: float = 0.0) -> None:
        self.runner = runner
        self._step_time_s = step_time_s
        self._token_time_s = token_time_s
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "fake-executor") if step_time_s or token_time_s else None

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step. See `quire_interfaces.Executor.execute`.

        Raises:
            RuntimeError: The executor was closed.
        """
        if self._closed:
            raise RuntimeError("this executor was closed; make a new one")
        if self._thread is not None:
            return self._thread.submit(self._run, output)
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self.runner.execute(output))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self._step_time_s + self._token_time_s * output.total_num_scheduled_tokens)
        return self.runner.execute(output)

    def close(self) -> None:
        """Finish running steps. Idempotent."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
