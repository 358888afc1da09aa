"""Parity cases of encoders' classes with heads."""

from __future__ import annotations

import dataclasses

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.encoder_cases import ENCODER_CASES

__all__ = ["HEAD_CASES", "HEAD_SAMPLE"]

HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")


def _with_classes(body: ParityCase) -> ParityCase:
    """The case of a body, with as many classes as make the largest logit a fair scale of errors."""
    return dataclasses.replace(body, fields={**body.fields, "num_labels": 12})


HEAD_CASES: dict[str, ParityCase] = {
    name.removesuffix("Model") + head: _with_classes(body)
    for name, body in ENCODER_CASES.items()
    if name.endswith("Model") and not name.endswith("EncoderModel")
    for head in HEADS
}
"""Class -> its case: every head of every encoder."""

HEAD_SAMPLE = ("BertForSequenceClassification", "EuroBertForSequenceClassification", "ElectraForMaskedLM")
"""Those that the test suite verifies as a whole; the tests of quire-models hold all of them to Transformers."""
