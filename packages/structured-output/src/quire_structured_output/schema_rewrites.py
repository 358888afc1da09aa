"""Schemas in terms of what llguidance (1.9) follows: each rewriting means the same, or allows less.

Every function takes one schema, whose inner ones were rewritten before, and the root for its references. What cannot be
written otherwise stays, and is refused by the library.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from quire_structured_output.finite_patterns import finite_language

__all__ = ["resolved", "rewritten"]

Schema = dict[str, Any]

_MAX_ALTERNATIVES = 64
_MAX_PERMUTED, _MAX_CHOSEN = 4, 7
"""Distinct values of which a set may be written in every order, and in the schema's order: as alternatives."""

_LARGEST_INTEGER = (1 << 63) - 1024
"""The largest one below 2**63 that is a double, as which the library reads bounds."""
_LARGEST_NUMBER = 10**18
"""The library's patterns of numbers go no further than some 2**63."""
_EXACT = 1 << 53

_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
_NARROWER_FORMATS = {
    "idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "iri-reference": "uri", "uri-reference": "uri",
    "uri-template": "uri",
}  # fmt: skip
_FORMAT_PATTERNS = {
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "regex": "^[A-Za-z0-9 _-]*$",
}
_NAME_PATTERNS = {
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "date": "^[0-9]{3}[1-9]-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])$",
}
"""Of formats that names of properties may have: some of their texts."""
_DIALECT = re.compile(r"^https?://json-schema\.org/draft(?:-0[4-7]|/2019-09|/2020-12)/schema#?$")
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "$dynamicRef"))
"""Keywords whose schemas see the same value."""

_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
_ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
_KNOWN_BEGINNINGS = {
    # pydantic's Decimal: digits that may have a sign and a point, at least one of them.
    rf"{_DECIMAL}\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
    # zod's email: no point at the beginning, none after another.
    _ZOD_EMAIL: r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@",
}
"""Beginnings of patterns with a negative look-ahead, and the same without."""
_DECIMAL_DIGITS = re.compile(
    re.escape(_DECIMAL) + r"\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<all>\d+)\}0\*\$\)"
    r"\\d\{0,(?P=whole)\}\\\.\\d\{0,(?P<places>\d+)\}0\*\$\)"
)
"""pydantic's Decimal with max_digits and decimal_places."""
_LOOK_AHEAD = re.compile(r"^\^\(\?=")


def rewritten(schema: Schema, root: Any) -> Any:
    """One schema in the library's terms.

    Args:
        schema: Changed in place, where it is not given back changed.
        root: The whole schema, for references.

    Raises:
        ValueError: a pattern is no regular expression.
    """
    if isinstance(schema.get("$schema"), str) and not _DIALECT.match(schema["$schema"]):
        del schema["$schema"]  # a dialect of somebody's own, which the library would look for
    for rewrite in (_bounds, _format, _pattern, _conditions, _unevaluated, _names, _finite_names, _unique, _contains):
        rewrite(schema, root)
    for rewrite in (_dependent, _counted, _without, _tagged):
        rewrite(schema, root)
    return schema


def resolved(schema: Any, root: Any) -> Any:
    """What a schema refers to, if it is a reference within the root that can be followed; else the schema."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        target = root
        for part in unquote(reference[1:]).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
                target = target[int(part)]
            elif isinstance(target, dict) and part in target:
                target = target[part]
            else:
                return schema
        schema = target
    return schema


# Numbers.


def _bounds(schema: Schema, root: Any) -> None:
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        # As draft 4 has it.
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and inclusive in schema:
            schema[exclusive] = schema.pop(inclusive)
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    is_integer = "integer" in types and "number" not in types
    limit = _LARGEST_INTEGER if is_integer else _LARGEST_NUMBER
    for name, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        value = schema.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if sign * value > limit:
            del schema[name]
            inclusive = name.removeprefix("exclusive").lower()
            schema.setdefault(inclusive, sign * limit)
        elif isinstance(value, int) and abs(value) > _EXACT:
            schema[name] = _inward(value, sign)
            if is_integer and -sign * value > 0:  # far from zero: the library wants both ends
                schema.setdefault("maximum" if sign < 0 else "minimum", -sign * limit)


def _inward(value: int, sign: int) -> int:
    """The nearest integer that is a double, on the side that allows less."""
    nearest = float(value)
    if sign * int(nearest) > sign * value:
        nearest = math.nextafter(nearest, -sign * math.inf)
    return int(nearest)


# Texts.


def _format(schema: Schema, root: Any) -> None:
    """Formats are annotations: those that the library does not know are left out, or have a narrower one."""
    name = schema.get("format")
    if not isinstance(name, str) or name in _FORMATS:
        return
    del schema["format"]
    if name in _NARROWER_FORMATS:
        schema["format"] = _NARROWER_FORMATS[name]
    elif name in _FORMAT_PATTERNS:
        _also(schema, {"pattern": _FORMAT_PATTERNS[name]})


def _pattern(schema: Schema, root: Any) -> None:
    if isinstance(schema.get("pattern"), str):
        first, *more = _without_look_ahead(schema["pattern"])
        schema["pattern"] = first
        for each in more:
            _also(schema, {"pattern": each})


def _without_look_ahead(pattern: str) -> list[str]:
    """Patterns that match together what the pattern does, without look-aheads at its beginning."""
    for beginning, same in _KNOWN_BEGINNINGS.items():
        if pattern.startswith(beginning):
            return [same + pattern[len(beginning) :]]
    if match := _DECIMAL_DIGITS.match(pattern):
        whole, places, digits = int(match["whole"]), int(match["places"]), int(match["all"]) - 1
        if whole + places <= digits:
            return [rf"^[+-]?0*(?:\d{{1,{whole}}}(?:\.\d{{0,{places}}})?|\.\d{{1,{places}}})$"]
    patterns = []
    while match := _LOOK_AHEAD.match(pattern):
        end = _closing(pattern, match.end())
        if end is None:
            break
        patterns.append(f"^(?:{pattern[match.end() : end]})")
        pattern = f"^{pattern[end + 1 :]}"
    return [pattern, *patterns]


def _closing(pattern: str, begin: int) -> int | None:
    """Place of the parenthesis that ends the group whose content begins at `begin`."""
    depth, place, in_class = 1, begin, False
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 1
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if depth == 0:
                return place
        place += 1
    return None


# Objects.


def _names(schema: Schema, root: Any) -> None:
    """`propertyNames` as properties or as a pattern of names."""
    names = schema.get("propertyNames")
    rule = resolved(names, root) if isinstance(names, dict) else names
    if rule is True or (isinstance(rule, dict) and not rule.keys() - {"type", "title", "description"}):
        if rule is True or rule.get("type", "string") == "string":
            del schema["propertyNames"]
        return
    if not isinstance(rule, dict) or "patternProperties" in schema:
        return
    known, others = dict(_mapping(schema, "properties")), schema.get("additionalProperties", True)
    allowed = [rule["const"]] if "const" in rule else rule.get("enum")
    if isinstance(allowed, list) and rule.keys() <= {"enum", "const", "type", "title", "description", "default"}:
        properties: Schema = {name: known.get(name, others) for name in allowed if isinstance(name, str)}
        schema["properties"] = properties | {name: False for name in known if name not in properties}
        schema["additionalProperties"] = False
        del schema["propertyNames"]
    elif not known and (pattern := _name_pattern(rule)) is not None:
        schema["patternProperties"] = {pattern: others}
        schema["additionalProperties"] = False
        del schema["propertyNames"]


def _name_pattern(rule: Schema) -> str | None:
    """A pattern for what a schema of names says, if one can say it."""
    keys = rule.keys() - {"type", "title", "description", "default"}
    if keys == {"pattern"} and isinstance(rule["pattern"], str):
        patterns = _without_look_ahead(rule["pattern"])
        return patterns[0] if len(patterns) == 1 else None
    if keys == {"format"}:
        return _NAME_PATTERNS.get(rule["format"], "^") if isinstance(rule["format"], str) else None
    if keys and keys <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"
    return None


def _finite_names(schema: Schema, root: Any) -> None:
    """A pattern that only names of properties match goes into these; the library finds that nothing can match it."""
    patterns = _mapping(schema, "patternProperties")
    if not patterns:
        return
    properties, rest = dict(_mapping(schema, "properties")), {}
    for pattern, value in patterns.items():
        names = finite_language(pattern, _MAX_ALTERNATIVES)
        if names is None or not properties.keys() >= {*names}:
            rest[pattern] = value
            continue
        for name in names:
            properties[name] = {"allOf": [properties[name], value]}
    schema["properties"], schema["patternProperties"] = properties, rest
    if not rest:
        del schema["patternProperties"]


def _unevaluated(schema: Schema, root: Any) -> None:
    """Where no other keyword of the schema looks at the value, these are what the usual ones leave over."""
    if _IN_PLACE & schema.keys():
        return
    if "unevaluatedProperties" in schema:
        rule = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", rule)
    if "unevaluatedItems" in schema and "contains" not in schema:
        rule = schema.pop("unevaluatedItems")
        schema.setdefault("items", rule)


def _dependent(schema: Schema, root: Any) -> None:
    """What follows from the presence of a property: it is absent, or that holds."""
    rules: dict[tuple[str, str], Any] = {}
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = schema.get(keyword)
        if isinstance(value, dict):
            rules |= {(keyword, name): rule for name, rule in value.items()}
            del schema[keyword]
    for (_, name), rule in rules.items():
        then = {"required": rule} if isinstance(rule, list) else rule
        if then is True or then == {"required": []}:
            continue
        absent = {"properties": {name: False}}
        _also(schema, absent if then is False else {"anyOf": [absent, then]})


def _counted(schema: Schema, root: Any) -> None:
    """`minProperties` and `maxProperties` of objects with optional properties: which of them there are."""
    properties, required = _mapping(schema, "properties"), set(_texts(schema.get("required")))
    optional = [name for name in properties if name not in required and properties[name] is not False]
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    low, high = schema.get("minProperties"), schema.get("maxProperties")
    if isinstance(low, int) and low <= len(required):
        del schema["minProperties"]
        low = None
    if isinstance(high, int) and is_closed and high >= len(properties):
        del schema["maxProperties"]
        high = None
    if not optional:
        return
    if isinstance(high, int):
        room = min(high - len(required), len(optional))
        if room < 0 or math.comb(len(optional), room) > _MAX_ALTERNATIVES:
            return
        del schema["maxProperties"]
        schema["additionalProperties"] = False
        schema.pop("patternProperties", None)
        _also(schema, {"anyOf": [_none_of(set(optional) - {*kept}) for kept in itertools.combinations(optional, room)]})
    if isinstance(low, int):
        missing = low - len(required)
        if missing > len(optional) or math.comb(len(optional), missing) > _MAX_ALTERNATIVES:
            return
        del schema["minProperties"]
        _also(schema, {"anyOf": [{"required": [*some]} for some in itertools.combinations(optional, missing)]})


def _none_of(names: Iterable[str]) -> Schema:
    return {"properties": dict.fromkeys(sorted(names), False)}


# Lists.


def _unique(schema: Schema, root: Any) -> None:
    """Lists without repetitions, where there are few values: all of them."""
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("uniqueItems") is not True:
        return
    low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if high <= 1:
        del schema["uniqueItems"]
        return
    rule = resolved(schema.get("items"), root)
    values = _finite_values(rule)
    if values is None or len(values) > _MAX_CHOSEN or {"prefixItems", "contains"} & schema.keys():
        return
    choose = itertools.permutations if len(values) <= _MAX_PERMUTED else itertools.combinations
    sizes = range(int(low), int(min(high, len(values))) + 1)
    lists = [[*chosen] for size in sizes for chosen in choose(values, size)]
    if lists and schema.get("type") == "array":
        for keyword in ("uniqueItems", "items", "minItems", "maxItems"):
            schema.pop(keyword, None)
        schema["enum"] = lists


def _finite_values(rule: Any) -> list[Any] | None:
    """The values of a schema that lists them, without repetitions."""
    if not isinstance(rule, dict) or rule.keys() - {"type", "enum", "const", "title", "description", "default"}:
        return None
    if "const" in rule:
        return [rule["const"]]
    values = [True, False] if rule.get("type") == "boolean" and "enum" not in rule else rule.get("enum")
    if not isinstance(values, list):
        return None
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _contains(schema: Schema, root: Any) -> None:
    """The first elements are those that must be in it."""
    least = schema.get("minContains", 1)
    if "contains" not in schema or "maxContains" in schema or "prefixItems" in schema or not isinstance(least, int):
        return
    items = schema.get("items", True)
    if isinstance(items, list) or least > _MAX_ALTERNATIVES:
        return
    rule = schema.pop("contains")
    schema.pop("minContains", None)
    if least > 0:
        schema["prefixItems"] = [rule if items is True else {"allOf": [rule, items]}] * least
        schema["minItems"] = max(least, schema.get("minItems", 0))


# Alternatives and exceptions.


def _conditions(schema: Schema, root: Any) -> None:
    """`if` without `then` and `else`, and these without it, say nothing."""
    if "if" not in schema or not {"then", "else"} & schema.keys():
        for keyword in ("if", "then", "else"):
            schema.pop(keyword, None)


def _without(schema: Schema, root: Any) -> None:
    """`not` of types, of listed values beside listed ones, and of a single property's presence."""
    rule = resolved(schema.get("not"), root) if isinstance(schema.get("not"), dict) else None
    if not isinstance(rule, dict):
        return
    if rule.keys() == {"type"}:
        refused = {rule["type"]} if isinstance(rule["type"], str) else set(_texts(rule["type"]))
        types = schema.get("type", list(_TYPES))
        remaining = [each for each in (types if isinstance(types, list) else [types]) if each not in refused]
        if "number" in refused:
            remaining = [each for each in remaining if each != "integer"]
        if remaining and not ("integer" in refused and "number" in remaining):
            schema["type"] = remaining
            del schema["not"]
        return
    if rule.keys() == {"required"} and len(_texts(rule["required"])) == 1:
        del schema["not"]
        _also(schema, _none_of(_texts(rule["required"])))
        return
    refused_values, values = _finite_values(rule), schema.get("enum")
    if refused_values is not None and isinstance(values, list) and rule.keys() <= {"enum", "const"}:
        texts = {json.dumps(value, sort_keys=True) for value in refused_values}
        schema["enum"] = [value for value in values if json.dumps(value, sort_keys=True) not in texts]
        del schema["not"]


def _tagged(schema: Schema, root: Any) -> None:
    """`oneOf` whose parts a property or a required property tells apart: each part says so."""
    parts = schema.get("oneOf")
    if not isinstance(parts, list) or len(parts) < 2:
        return
    if (tag := _tag_of(schema, parts, root)) is not None:
        schema["oneOf"] = [{"allOf": [part, {"required": [tag]}]} if "$ref" in part else _requiring(part, tag)
                           for part in parts]  # fmt: skip
        return
    required = [_texts(part.get("required")) if isinstance(part, dict) else [] for part in parts]
    says_no_more = all(isinstance(part, dict) and part.keys() == {"required"} for part in parts)
    everyone = {name for names in required for name in names}
    if says_no_more and all(len(names) == 1 for names in required) and len(everyone) == len(parts):
        del schema["oneOf"]
        _also(schema, {"anyOf": [{"required": names, **_none_of(everyone - {*names})} for names in required]})


def _tag_of(schema: Schema, parts: list[Any], root: Any) -> str | None:
    """A property that has other values in each part, and need not be there in some."""
    whole = [resolved(part, root) for part in parts]
    if not all(isinstance(part, dict) for part in whole):
        return None
    discriminator = schema.get("discriminator")
    named = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    names = [named] if isinstance(named, str) else list(_mapping(whole[0], "properties"))
    for name in names:
        values = [_finite_values(resolved(_mapping(part, "properties").get(name), root)) for part in whole]
        if any(each is None for each in values):
            continue
        texts = [json.dumps(value, sort_keys=True) for each in values for value in each or ()]
        if len(texts) == len(set(texts)):
            is_required = all(name in _texts(part.get("required")) for part in whole)
            return None if is_required else name
    return None


def _requiring(part: Schema, name: str) -> Schema:
    return {**part, "required": list(dict.fromkeys([*_texts(part.get("required")), name]))}


def _also(schema: Schema, rule: Schema) -> None:
    others = schema.get("allOf")
    schema["allOf"] = [*(others if isinstance(others, list) else []), rule]


def _mapping(schema: Any, keyword: str) -> Schema:
    value = schema.get(keyword) if isinstance(schema, dict) else None
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
