"""Texts as models of late interaction read them."""

from __future__ import annotations

from quire_pooling import LateInteractionSpec
from quire_pooling.late_interaction import document_tokens, query_tokens

SPEC = LateInteractionSpec(query_length=8, document_length=10, do_query_expansion=True)


def test_a_query_is_marked_and_filled_up() -> None:
    tokens = query_tokens(SPEC, [2, 5, 6, 3], prefix_id=90, mask_id=4)
    assert tokens.token_ids == [2, 90, 5, 6, 3, 4, 4, 4]
    assert tokens.num_attended == 5
    assert query_tokens(SPEC, [2, 5, 3], prefix_id=None, mask_id=4).token_ids == [2, 5, 3, 4, 4, 4, 4, 4]


def test_an_expansion_may_be_attended_to_or_left_out() -> None:
    seen = LateInteractionSpec(query_length=8, do_query_expansion=True, attend_to_expansion_tokens=True)
    assert query_tokens(seen, [2, 3], prefix_id=90, mask_id=4) == ([2, 90, 3, 4, 4, 4, 4, 4], 8)
    none = LateInteractionSpec(query_length=8)
    assert query_tokens(none, [2, 3], prefix_id=90, mask_id=4) == ([2, 90, 3], 3)
    assert query_tokens(SPEC, [2, 3], prefix_id=90, mask_id=None) == ([2, 90, 3], 3)


def test_a_query_as_long_as_is_read_stays() -> None:
    assert query_tokens(SPEC, [2, *range(10, 15), 3], prefix_id=90, mask_id=4) == ([2, 90, *range(10, 15), 3], 8)


def test_a_document_is_marked() -> None:
    assert document_tokens([2, 5, 6, 3], prefix_id=91) == ([2, 91, 5, 6, 3], 5)
    assert document_tokens([2, 5, 6, 3], prefix_id=None) == ([2, 5, 6, 3], 4)
