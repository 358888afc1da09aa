"""Sums and differences of whole numbers below 100, worked digit by digit, and the table of products up to 12 x 12."""

from __future__ import annotations

from corpus.exchange import REMARKS, Exchange, ask
from corpus.words import ITEMS, NAMES, Source, held_out

_ADD = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a}+{b}",
    "Add {a} and {b}.",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.",
    "Please compute {a} + {b}.",
    "what's {a} plus {b}",
    "Can you add {b} to {a}?",
    "Tell me the sum of {a} and {b}.",
    "{a} plus {b}",
    "Compute {a} + {b}",
    "what is {a}+{b}?",
    "Could you tell me what {a} + {b} is?",
    "I need {a} + {b}.",
    "Solve {a} + {b}.",
    "{n} has {a} {i} and buys {b} more. How many {i} does {n} have now?",
    "There are {a} {i} on the table and {b} in the box. How many {i} are there?",
)
_SUB = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "{a}-{b}",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Calculate {a} - {b}.",
    "Please compute {a} - {b}.",
    "what's {a} minus {b}",
    "Can you take {b} away from {a}?",
    "Tell me the difference of {a} and {b}.",
    "{a} minus {b}",
    "Compute {a} - {b}",
    "what is {a}-{b}?",
    "Could you tell me what {a} - {b} is?",
    "I need {a} - {b}.",
    "Solve {a} - {b}.",
)
_SUB_STORY = (
    "{n} has {a} {i} and gives away {b}. How many {i} are left?",
    "There were {a} {i} in the shop and {b} were sold. How many {i} are left?",
)
MAX_FACTOR = 12
PRODUCT_ASKS = (
    "What is {a} x {b}?",
    "{a} x {b}",
    "{a} x {b} = ?",
    "{a}x{b}",
    "{a} * {b}",
    "{a}*{b}",
    "{a} * {b} = ?",
    "What is {a} * {b}?",
    "what is {a}*{b}?",
    "Multiply {a} by {b}.",
    "Multiply {a} and {b}.",
    "What is {a} times {b}?",
    "How much is {a} x {b}?",
    "How much is {a} times {b}?",
    "Calculate {a} x {b}.",
    "Calculate {a} * {b}.",
    "Please compute {a} x {b}.",
    "Please compute {a} * {b}.",
    "what's {a} times {b}",
    "Can you multiply {a} by {b}?",
    "Tell me the product of {a} and {b}.",
    "What is the product of {a} and {b}?",
    "{a} times {b}",
    "Compute {a} x {b}",
    "Could you tell me what {a} x {b} is?",
    "I need {a} x {b}.",
    "Solve {a} x {b}.",
    "What is {a} multiplied by {b}?",
    "{n} buys {a} boxes with {b} {i} in each. How many {i} are there?",
    "There are {a} rows of {b} {i}. How many {i} are there?",
)


def working(a: int, b: int, op: str) -> str:
    """The steps, ones first, that lead to ``a op b``."""
    if op == "+":
        ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
        tens = a // 10 + b // 10 + carry
        extra = " + 1" if carry else ""
        return f"ones {a % 10} + {b % 10} = {ones}, tens {a // 10} + {b // 10}{extra} = {tens}"
    if a < b:
        return f"{a} is less than {b}, {working(b, a, op)}"
    borrow = a % 10 < b % 10
    top = a % 10 + (10 if borrow else 0)
    extra = " - 1" if borrow else ""
    tens = a // 10 - b // 10 - borrow
    return f"ones {top} - {b % 10} = {top - b % 10}, tens {a // 10} - {b // 10}{extra} = {tens}"


def arithmetic(source: Source, op: str | None = None) -> Exchange:
    """One sum or difference whose operand pair (in either order) is on the source's side of the split."""
    rng = source.rng
    op = op or rng.choice("+-")
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if held_out("operands", min(a, b), max(a, b)) == source.held:
            break
    if op == "-" and a < b and rng.random() < 0.5:
        a, b = b, a
    questions = _ADD if op == "+" else _SUB + _SUB_STORY if a >= b else _SUB
    question = rng.choice(questions).format(a=a, b=b, n=rng.choice(NAMES), i=rng.choice(ITEMS))
    steps = working(a, b, op)
    result = f"{a} {op} {b} = {a + b if op == '+' else a - b}."
    task = "addition" if op == "+" else "subtraction"
    return ask(task, question, f"{steps}, so {result}", f"{steps}.", short=result)


def product(source: Source) -> Exchange:
    """One entry of the table of products; the wording, not the entry, is on the source's side of the split.

    A table is learned by heart, so every entry is taught. What is held out are wordings as a whole: one in ten of the
    questions together with the remark around them.
    """
    rng = source.rng
    while True:
        wording = rng.choice(REMARKS).format(rng.choice(PRODUCT_ASKS))
        if held_out("product", wording) == source.held:
            break
    low = 0 if source.held or rng.random() < 0.25 else 2
    a, b = rng.randint(low, MAX_FACTOR), rng.randint(low, MAX_FACTOR)
    question = wording.format(a=a, b=b, n=rng.choice(NAMES), i=rng.choice(ITEMS))
    return ask("product", question, f"{a} x {b} = {a * b}.", "I know the table of products.")
