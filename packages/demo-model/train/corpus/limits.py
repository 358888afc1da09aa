"""Requests that a very small model without tools cannot fulfil, and the polite answer."""

from __future__ import annotations

from corpus.arithmetic import MAX_FACTOR, PRODUCT_ASKS
from corpus.exchange import REMARKS, Exchange, ask
from corpus.tools import tool_request
from corpus.words import CITIES, ITEMS, LANGUAGES, NAMES, WORDS, Source, held_out

REFUSAL = "I cannot do that. I am a very small model: ask me about Quire, sums, spelling, JSON or tools."
_PROGRAM_LANGUAGES = "Python Java JavaScript C Rust Go Bash SQL HTML".split()
_JOBS = (
    "prints hello|adds two numbers|sorts a list|reads a file|counts words|reverses a string|finds prime numbers|"
    "draws a {w}|computes a factorial|downloads a page|plays a game|renames files"
).split("|")
_TEXTS = (
    "good morning|hello|thank you|how are you|I love you|where is the station|the {w} is {v}|a {w} and a {v}|"
    "good night|my name is {n}|see you tomorrow|{w}|the {w}|I like the {w}"
).split("|")
_TRANSLATE = (
    'Translate "{t}" into {l}.',
    'Translate "{t}" to {l}.',
    "Translate {t} into {l}.",
    "translate {t} to {l}",
    "Translate to {l}: {t}",
    "Translate this into {l}: {t}",
    'How do you say "{t}" in {l}?',
    "How do you say {t} in {l}?",
    "What is {t} in {l}?",
    'What does "{t}" mean in {l}?',
    "Can you translate {t} into {l}?",
    'Please translate "{t}" into {l}.',
    "Say {t} in {l}.",
    "Write {t} in {l}.",
    "Can you speak {l}?",
    "Do you speak {l}?",
    "Answer in {l}.",
    "Translate this sentence into {l}.",
    "Translate into {l}",
)
_PROGRAM = (
    "Write a program that {j}.",
    "Write a {p} program that {j}.",
    "Write a {p} function that {j}.",
    "Write a {p} script that {j}.",
    "Write a function that {j}.",
    "Write code that {j}.",
    "Write code for a {w}.",
    "Write {p} code for a {w}.",
    "Write a program.",
    "Write a program in {p}.",
    "write a {p} program",
    "Write some code.",
    "Can you write a program?",
    "Can you write {p} code?",
    "Can you program in {p}?",
    "Can you code?",
    "Please write a {p} function that {j}.",
    "Give me a {p} program that {j}.",
    "Fix my {p} program.",
    "Find the bug in my code.",
    "How do I write a {p} program that {j}?",
    "Program a {w} in {p}.",
    "Implement a {w} in {p}.",
    "I need a {p} script that {j}.",
)
_OTHER = (
    "What is the weather?",
    "What is the weather like?",
    "What is the weather today?",
    "How is the weather?",
    "How is the weather today?",
    "What's the weather like today?",
    "What is the weather in {c}?",
    "How is the weather in {c}?",
    "Will it rain tomorrow?",
    "Will it rain in {c}?",
    "What time is it?",
    "What time is it in {c}?",
    "what time is it",
    "What day is it today?",
    "What is the date?",
    "What is today's date?",
    "What is the news?",
    "Tell me the news.",
    "Write an essay about the {w}.",
    "Write an essay.",
    "Write a letter to {n}.",
    "Write an email to {n}.",
    "Write a story.",
    "Tell me a story.",
    "Tell me a story about a {w}.",
    "Write a song about {c}.",
    "Write a song.",
    "Sing a song.",
    "Can you draw a {w}?",
    "Draw a {w}.",
    "Draw me a picture.",
    "Make a picture of a {w}.",
    "Summarize this text.",
    "Summarize the book about the {w}.",
    "Search the web for {w}.",
    "Look up {w} on the internet.",
    "Open the {w}.",
    "Play some music.",
    "Call {n}.",
    "Set an alarm.",
    "Remind me to buy a {w}.",
    "Book a flight to {c}.",
    "Book a hotel in {c}.",
    "Order a pizza.",
    "Buy a {w} for me.",
    "Send a message to {n}.",
    "Solve this equation.",
    "What is {a} divided by {b}?",
    "{a} / {b}",
    "Divide {a} by {b}.",
    "What is the square root of {a}?",
    "Plan a trip to {c}.",
    "Give me a recipe for {w}.",
    "Cook a {w} for me.",
    "What is on television?",
    "Make me a coffee.",
)


def _large_product(source: Source) -> str:
    r = source.rng
    factors = [r.randint(MAX_FACTOR + 1, 99), r.randint(2, 99)]
    r.shuffle(factors)
    return r.choice(PRODUCT_ASKS).format(a=factors[0], b=factors[1], n=r.choice(NAMES), i=r.choice(ITEMS))


def _request(source: Source) -> str:
    r = source.rng
    draw = r.random()
    if draw < 0.15:
        return tool_request(source)
    if draw < 0.25:
        return _large_product(source)
    wordings = r.choices((_TRANSLATE, _PROGRAM, _OTHER), (2, 2, 3))[0]
    w, v, n = r.choice(WORDS), r.choice(WORDS), r.choice(NAMES)
    return r.choice(wordings).format(
        t=r.choice(_TEXTS).format(w=w, v=v, n=n),
        j=r.choice(_JOBS).format(w=w),
        l=r.choice(LANGUAGES),
        p=r.choice(_PROGRAM_LANGUAGES),
        c=r.choice(CITIES),
        w=w,
        n=n,
        a=r.randint(2, 99),
        b=r.randint(2, 99),
    )


def refusal(source: Source) -> Exchange:
    """One request, without a tool that could help; the wording as a whole is on the source's side of the split."""
    while True:
        question = source.rng.choice(REMARKS).format(_request(source))
        if held_out("refusal", question) == source.held:
            return ask("refusal", question, REFUSAL, "I cannot do that.")
