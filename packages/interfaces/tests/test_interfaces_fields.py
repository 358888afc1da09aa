"""Which fields of a JSON object were read, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest

from quire_interfaces import CheckpointError, Fields

VALUES: dict[str, Any] = {
    "bits": 4,
    "sym": False,
    "note": "",
    "damp_percent": 0.1,
    "damp_auto": 0.2,
    "rotation": "hadamard",
    "weights": {"num_bits": 4, "scale": None, "zero": {"dtype": "int8", "kind": "odd"}},
    "groups": {"a": {"bits": 2, "order": "x"}, "b": {"bits": 3}},
}


def test_fields_that_nobody_asked_for_are_left_unread() -> None:
    fields = Fields(VALUES, "config.json")
    assert fields.unread() == {name: value for name, value in VALUES.items() if value}
    assert fields.integer("bits") == 4
    fields.skip("damp_*", "rotation")
    assert list(fields.unread()) == ["weights", "groups"]
    assert fields.get("weights") is VALUES["weights"]  # taken whole
    assert list(fields.unread()) == ["groups"]


def test_fields_of_objects_inside_are_named_with_their_way() -> None:
    fields = Fields(VALUES, "config.json")
    fields.skip("damp_*", "rotation", "bits")
    weights = fields.object("weights")
    assert weights is not None
    assert weights.source == "config.json: weights"
    assert weights.integer("num_bits") == 4
    zero = weights.object("zero")
    assert zero is not None
    assert zero.source == "config.json: weights.zero"
    assert zero.text("dtype") == "int8"
    assert {name: group.integer("bits") for name, group in fields.objects("groups").items()} == {"a": 2, "b": 3}
    assert fields.unread() == {"weights.zero.kind": "odd", "groups.a.order": "x"}
    again = fields.object("weights")
    assert again is weights  # one record, whoever asks
    assert fields.object("absent") is None
    assert fields.objects("absent") == {}


def test_views_share_what_was_read() -> None:
    fields = Fields({"n_bits": 4, "inner": {"a": 1}}, "config.json")
    view = fields.named(bits="n_bits", inside="inner").with_default("other", 1)
    assert view.integer("bits") == 4
    inner = view.object("inside")
    assert inner is not None
    assert list(fields.unread()) == ["inner.a"]
    assert inner.integer("a") == 1
    assert fields.unread() == {}


def test_unread_fields_are_refused_with_file_field_and_value() -> None:
    fields = Fields({"bits": 4, "rotation": "hadamard"}, "some/config.json: quantization_config")
    fields.integer("bits")
    with pytest.raises(
        CheckpointError,
        match=r'^some/config\.json: quantization_config: rotation \("hadamard"\) is set, which is not supported; use',
    ):
        fields.refuse_unread("use another")
    more = Fields({"a": [1] * 100, "b": {"c": 1}}, "x.json")
    with pytest.raises(CheckpointError, match=r"x\.json: a \(\[1, 1.{90,100}\.\.\.\), b \(.*\) are set, which"):
        more.refuse_unread("use another")
    fields.skip("rotation")
    fields.refuse_unread("use another")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda fields: fields.object("bits"), "bits must be an object, is 4"),
        (lambda fields: fields.objects("weights"), "weights: num_bits must be an object, is 4"),
        (lambda fields: fields.texts("bits"), "bits must be a list of strings, is 4"),
    ],
)
def test_fields_of_another_kind_are_named(read: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {message}"):
        read(Fields(VALUES, "config.json"))
    assert Fields({"names": ["a", "b"]}, "x").texts("names") == ("a", "b")
    assert Fields({}, "x").texts("names") == ()
