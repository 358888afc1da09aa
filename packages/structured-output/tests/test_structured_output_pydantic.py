"""Random pydantic models: their schemas are taken, and the models take what comes of them."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import pathlib
import random
import re
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from pydantic import Field
from pydantic.json_schema import GenerateJsonSchema

from quire_interfaces import StructuredOutputsParams
from quire_structured_output import OutputMatcher
from quire_testkit.conformance.grammar_backend import EOS, TOKENS, walk


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Card(pydantic.BaseModel):
    kind: Literal["card"] = "card"
    number: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class Cash(pydantic.BaseModel):
    kind: Literal["cash"] = "cash"
    amount: decimal.Decimal


class Node(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: bool
    next: Node | None = None


LEAVES: list[Any] = [
    int, float, bool, str, None, bytes, pathlib.Path, decimal.Decimal, uuid.UUID, datetime.date, datetime.datetime,
    datetime.time, ipaddress.IPv4Address, pydantic.SecretStr, Color, Literal["a", 3, None], Node, Card,
    Annotated[int, Field(ge=-(2**63), le=2**63 - 1)], Annotated[int, Field(gt=0, lt=2**64)],
    Annotated[int, Field(multiple_of=7)], Annotated[float, Field(ge=-1.5, lt=2)],
    Annotated[str, Field(pattern="^[a-z]{2,4}$")], Annotated[str, Field(min_length=1, max_length=5)],
    Annotated[Card | Cash, Field(discriminator="kind")], set[Color], set[Literal["x", "y", "z"]], frozenset[bool],
    dict[Color, int], dict[Literal["l", "r"], bool], dict[uuid.UUID, bool],
    Annotated[dict[str, bool], Field(min_length=1, max_length=2)], pydantic.Json[Any] | None,
]  # fmt: skip


class WithPatterns(GenerateJsonSchema):
    """Decimals have their pattern, as before pydantic 2.14."""

    def get_decimal_pattern(self, schema: Any) -> str | None:
        build = getattr(self, "build_decimal_pattern", super().get_decimal_pattern)
        return build(schema)  # type: ignore[no-any-return]


def random_type(rng: random.Random, depth: int) -> Any:
    if depth > 2 or rng.random() < 0.6:
        return rng.choice(LEAVES)
    one = random_type(rng, depth + 1)
    kind = rng.randrange(5)
    if kind == 0:
        return one | None if one is not None else int
    if kind == 1:
        return Annotated[list[one], Field(min_length=rng.randrange(2), max_length=2)]
    if kind == 2:
        return tuple[one, random_type(rng, depth + 1)]
    if kind == 3:
        return dict[Annotated[str, Field(max_length=3)], one]
    return random_model(rng, depth + 1)


def random_model(rng: random.Random, depth: int = 0) -> type[pydantic.BaseModel]:
    fields: dict[str, Any] = {}
    for number in range(rng.randint(1, 3)):
        kind = random_type(rng, depth)
        fields[f"field_{number}"] = (kind | None, None) if kind is not None and rng.random() < 0.3 else (kind, ...)
    config = pydantic.ConfigDict(extra="forbid")
    return pydantic.create_model(f"Model{rng.randrange(10**9)}", __config__=config, **fields)


@pytest.mark.parametrize("seed", range(60))
def test_models_take_what_comes_of_their_schemas(backend: Any, seed: int) -> None:
    model = random_model(random.Random(seed))
    schema = model.model_json_schema(schema_generator=WithPatterns)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    grammar = backend.compile(params.spec())
    for walk_seed in range(2):
        matcher = OutputMatcher(grammar.new_matcher(), EOS, None, 32)
        text = b"".join(TOKENS[i] for i in walk(matcher, len(TOKENS), walk_seed)).decode()
        value = pydantic.TypeAdapter(Any).validate_json(text)
        validator.validate(value)
        # What JSON Schema calls an annotation; and numbers that no double holds.
        if "contentMediaType" not in str(schema) and not re.search(r"[0-9][eE][+-]?[0-9]", text):
            model.model_validate_json(text)
