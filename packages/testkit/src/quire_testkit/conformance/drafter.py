"""What every `Drafter` must do, as tests to inherit.

    class TestMyDrafter(DrafterSuite):
        def make_drafter(self): return MyDrafter(...)

The suite does not ask for good proposals, only for ones that verification and the scheduler can rely on.
"""

from __future__ import annotations

import random
from array import array

from quire_interfaces import Drafter

__all__ = ["DrafterSuite"]


class DrafterSuite:
    """Tests of the `Drafter` contract. Implement `make_drafter`; override nothing else."""

    vocab_size = 1000
    """Proposed ids must be below this; the suite's sequences hold ids below it."""

    def make_drafter(self) -> Drafter:
        raise NotImplementedError

    def _sequences(self) -> list[list[int]]:
        rng = random.Random(0)
        lengths = [1, 2, 3, 7, 50, 400]
        random_ones = [[rng.randrange(self.vocab_size) for _ in range(length)] for length in lengths]
        few_tokens = [[rng.randrange(3) for _ in range(length)] for length in lengths]
        return [[0], *random_ones, *few_tokens, [5] * 64, list(range(20)) * 4]

    def test_never_proposes_more_than_asked(self) -> None:
        drafter = self.make_drafter()
        for token_ids in self._sequences():
            for max_tokens in (0, 1, 2, 5, 64):
                assert len(drafter.propose(token_ids, max_tokens)) <= max_tokens

    def test_proposes_plain_token_ids(self) -> None:
        drafter = self.make_drafter()
        for token_ids in self._sequences():
            for token_id in drafter.propose(token_ids, 8):
                assert type(token_id) is int
                assert 0 <= token_id < self.vocab_size

    def test_is_deterministic_whatever_came_between(self) -> None:
        drafter = self.make_drafter()
        sequences = self._sequences()
        first = [drafter.propose(token_ids, 6) for token_ids in sequences]
        again = [drafter.propose(token_ids, 6) for token_ids in reversed(sequences)]
        fresh = [self.make_drafter().propose(token_ids, 6) for token_ids in sequences]
        assert first == again[::-1] == fresh

    def test_leaves_the_sequence_alone(self) -> None:
        drafter = self.make_drafter()
        for token_ids in self._sequences():
            given = list(token_ids)
            drafter.propose(given, 5)
            assert given == token_ids

    def test_any_kind_of_sequence_will_do(self) -> None:
        drafter = self.make_drafter()
        for token_ids in self._sequences():
            expected = drafter.propose(token_ids, 5)
            assert drafter.propose(tuple(token_ids), 5) == expected
            assert drafter.propose(array("i", token_ids), 5) == expected
            assert drafter.propose(array("q", token_ids), 5) == expected
