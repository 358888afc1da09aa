"""Extracting named fields from a sentence as JSON; a field the sentence lacks is null."""

from __future__ import annotations

import json
from collections.abc import Callable

from corpus.exchange import Exchange, ask
from corpus.words import ITEMS, JOBS, LANGUAGES, Source

_Values = dict[str, str | int]


def _person(s: Source) -> tuple[str, _Values]:
    v: _Values = {"name": s.name(), "age": s.integer(18, 90), "city": s.city(), "job": s.rng.choice(JOBS)}
    options = [
        ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
        ("{name} works as a {job} in {city}.", ("name", "job", "city")),
        ("{name}, {age}, is a {job} from {city}.", ("name", "age", "job", "city")),
        ("My neighbour {name} moved to {city} last year.", ("name", "city")),
        ("At the age of {age}, {name} became a {job}.", ("age", "name", "job")),
        ("I met {name} in {city}; {name} is a {job}.", ("name", "city", "job")),
    ]
    return _fill(s, options, v)


def _order(s: Source) -> tuple[str, _Values]:
    v: _Values = {
        "customer": s.name(),
        "quantity": s.integer(2, 400),
        "item": s.rng.choice(ITEMS),
        "price": s.integer(5, 999),
        "order": s.code(),
        "date": s.date(),
    }
    options = [
        ("{customer} ordered {quantity} {item} for {price} euros.", ("customer", "quantity", "item", "price")),
        ("Order {order}: {quantity} {item}, paid by {customer}.", ("order", "quantity", "item", "customer")),
        ("On {date} {customer} bought {quantity} {item}.", ("date", "customer", "quantity", "item")),
        ("Please send {quantity} {item} to {customer} before {date}.", ("quantity", "item", "customer", "date")),
        ("Order {order} costs {price} euros.", ("order", "price")),
    ]
    return _fill(s, options, v)


def _event(s: Source) -> tuple[str, _Values]:
    v: _Values = {
        "title": s.phrase(),
        "date": s.date(),
        "time": s.time(),
        "city": s.city(),
        "organizer": s.name(),
        "email": s.email(),
        "language": s.rng.choice(LANGUAGES),
    }
    options = [
        ('The event "{title}" takes place in {city} on {date}.', ("title", "city", "date")),
        ('{organizer} invites you to "{title}" at {time} in {city}.', ("organizer", "title", "time", "city")),
        ("The meeting with {organizer} is on {date} at {time}.", ("organizer", "date", "time")),
        ("Write to {email} if you want to join {organizer} in {city}.", ("email", "organizer", "city")),
        ('{organizer} speaks {language} and gives the talk "{title}".', ("organizer", "language", "title")),
    ]
    return _fill(s, options, v)


def _fill(s: Source, options: list[tuple[str, tuple[str, ...]]], v: _Values) -> tuple[str, _Values]:
    template, fields = s.rng.choice(options)
    return template.format(**v), {name: v[name] for name in fields}


_KINDS: tuple[Callable[[Source], tuple[str, _Values]], ...] = (_person, _order, _event)
_ALL_FIELDS = "name age city job customer quantity item price order date title time organizer email language".split()
_PEOPLE = {"name", "customer", "organizer"}
_ASKS = (
    "Extract {f} as JSON: {s}",
    "Extract the fields {f} from this sentence as JSON.\n{s}",
    "Give me {f} as JSON.\n\n{s}",
    "{s}\n\nReturn {f} as JSON.",
    "{s} Extract {f} as JSON.",
    'Return a JSON object with {f} for: "{s}"',
    "Reply with JSON only, fields {f}. Sentence: {s}",
    "Turn this into JSON with the keys {f}: {s}",
    "What are {f} here? Answer in JSON. {s}",
)


def _join(names: list[str], quoted: bool) -> str:
    shown = [f'"{name}"' if quoted else name for name in names]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


def extract(source: Source) -> Exchange:
    """One sentence and the fields wanted from it, in the order in which they were asked for."""
    rng = source.rng
    sentence, values = rng.choice(_KINDS)(source)
    names = rng.sample(list(values), rng.randint(1, len(values)))
    if rng.random() < 0.15:
        known = set(values) | (_PEOPLE if _PEOPLE & set(values) else set())
        missing = rng.choice([name for name in _ALL_FIELDS if name not in known])
        names.insert(rng.randint(0, len(names)), missing)
    listing = _join(names, quoted=rng.random() < 0.3)
    question = rng.choice(_ASKS).format(f=listing, s=sentence)
    answer = json.dumps({name: values.get(name) for name in names})
    return ask("json", question, answer, f"The fields are {_join(names, quoted=False)}.")
