"""What compiling a constraint may cost, guessed from its text alone: an order, no measure, and wrong now and then.

Repetitions are what makes a short pattern large: counts inside each other multiply.
"""

from __future__ import annotations

import re

from quire_interfaces import GrammarSpec

__all__ = ["MAX_COST", "expected_cost"]

_COUNT = re.compile(r"\{(\d{0,9}),?(\d{0,9})\}")
_BOUND = re.compile(r'"(?:minItems|maxItems|minLength|maxLength|minProperties|maxProperties)":(\d{1,9})')
MAX_COST = 1e12


def expected_cost(spec: GrammarSpec) -> float:
    """Characters, and what its repetitions may make of them. In time linear in its length."""
    product = 1.0
    for low, high in _COUNT.findall(spec.text):
        product = min(MAX_COST, product * max(1, int(low or 0), int(high or 0)))
    largest = max((int(bound) for bound in _BOUND.findall(spec.text)), default=0)
    return min(MAX_COST, len(spec.text) + product + largest)
