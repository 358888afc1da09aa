"""Texts as models of late interaction read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quire_interfaces import CheckpointError
from quire_pooling import LateInteractionSpec
from quire_pooling.late_interaction import LateInteractionTexts, document_tokens, query_tokens
from quire_renderers import load_tokenizer

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


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", ".", ","]


def test_a_tokenizer_says_the_ids_of_markers_masks_and_punctuation(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inner.add_tokens([AddedToken("[Q] "), AddedToken("[D] ")])
    PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="[MASK]").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    spec = LateInteractionSpec(
        query_prefix="[Q] ", document_prefix="[D] ", query_length=6, document_length=10, do_query_expansion=True,
        expansion_token="[MASK]", attend_to_expansion_tokens=True, skiplist_words=(".", "!", ","),
    )  # fmt: skip
    texts = LateInteractionTexts(spec, tokenizer)
    assert (texts.max_tokens(is_query=True), texts.max_tokens(is_query=False)) == (5, 9)
    assert texts.mark(tokenizer.encode("one two"), is_query=True) == ([2, 9, 5, 6, 3, 4], 6)
    assert texts.mark(tokenizer.encode("one ."), is_query=False) == ([2, 10, 5, 7, 3], 5)
    assert texts.skip_token_ids == (7, 8)
    unseen = LateInteractionTexts(dataclasses.replace(spec, attend_to_expansion_tokens=False), tokenizer)
    assert unseen.mark(tokenizer.encode("one two"), is_query=True) == ([2, 9, 5, 6, 3, 4], 5)
    plain = LateInteractionTexts(LateInteractionSpec(), tokenizer)
    assert (plain.max_tokens(is_query=True), plain.mark([2, 5, 3], is_query=True)) == (None, ([2, 5, 3], 3))
    with pytest.raises(CheckpointError, match=r"marked by '\[X\]', which is no token"):
        LateInteractionTexts(dataclasses.replace(spec, query_prefix="[X]"), tokenizer)
