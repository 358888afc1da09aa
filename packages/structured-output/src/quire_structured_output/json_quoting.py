"""Patterns and Lark grammars of a text, changed so that they match the text as it is written inside a JSON string.

Each character stands for itself, but quotes, backslashes and control characters for their short escapes; other control
characters are left out. So a text has one spelling.

Escapes are two characters that begin alike, and llguidance's lexer does not go back: a terminal that may go on with one
escape would swallow the beginning of another. So a grammar without recursion becomes one terminal, which has no such
borders; in others, runs of plain characters and escapes become terminals of their own. Knows the notation of
llguidance's Lark.
"""

from __future__ import annotations

import json
import re
import warnings

__all__ = ["quoted_lark", "quoted_pattern"]

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
"""Character -> as JSON writes it."""
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", '"': '"', "\\": "\\"}
"""Letter behind a backslash in a pattern -> the character it stands for, where that is escaped in JSON."""
_PLAIN = r'[^"\\\x00-\x1F]'
_GROUP = re.compile(r"\(\?(?:P?<\w+>|[imsux-]*:|[=!]|<[=!])?")
_COUNT = re.compile(r"\{\d*,?\d*\}")
_ESCAPE = re.compile(r"\\(?:[xu]\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[pP]\{[^}]*\}|[pP]\w|.)", re.DOTALL)
_ANCHORS = ("\\b", "\\B", "\\A", "\\z", "\\Z")

_COMMON = {
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
"""Terminals of Lark's library in which a character is escaped."""
_TOKEN = re.compile(
    r"(?P<comment>(?://|#)[^\n]*)"
    r'|(?P<range>"(?:\\.|[^"\\\n])"\s*\.\.\s*"(?:\\.|[^"\\\n])")'
    r'|(?P<text>"(?:\\.|[^"\\\n])*")(?P<any_case>i?)'
    r"|/(?P<pattern>(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+)/(?P<flags>[imslux]*)"
    r"|(?P<import>%import[ \t]+common[ \t]*"
    r"(?:\.[ \t]*(?P<name>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|\((?P<names>[^)]*)\)))"
    r"|(?P<nested>%(?:json|lark|regex)\b)"
)
_HEAD = re.compile(r"^[ \t]*[!?]?(_?[A-Za-z]\w*)(?:\.\d+)?[ \t]*:", re.MULTILINE)
_NAME = re.compile(r"_?[A-Za-z]\w*")
_TREE_NAME = re.compile(r"->\s*\w+")
_IRREGULAR = re.compile(r"%(?:ignore|override|extend|declare)|[<@]|\w\[|\w\{[^\d,}]")
"""What a terminal cannot hold: ignored text, special tokens, attributes, templates."""
_ONE_CLASS = re.compile(r"(\()?(\.|\[(?:\\.|[^\]\\])+\]|\\[wWdDsS])([*+?])(?(1)\))")


def quoted_lark(grammar: str) -> str:
    """A Lark grammar for what its texts are inside a JSON string.

    Raises:
        ValueError: it holds a grammar of another notation.
    """
    rules = _rules(grammar)
    if rules is None:
        return _TOKEN.sub(lambda token: _quoted_token(token, is_terminal=False), grammar)
    lines = [f"{_terminal(name)}: {_as_terminal(body)}" for name, body in rules.items()]
    imports = [_imported(token) for token in _TOKEN.finditer(grammar) if token["import"] is not None]
    return "\n".join([f"start: {_terminal('start')}", *lines, *imports])


def _rules(grammar: str) -> dict[str, str] | None:
    """Name -> body of all rules and terminals; None for a grammar that is more than a regular expression."""
    if _IRREGULAR.search(_TOKEN.sub(" ", grammar)):
        return None
    heads = list(_HEAD.finditer(grammar))
    ends = [head.start() for head in heads[1:]] + [len(grammar)]
    rules = {head[1]: grammar[head.end() : end] for head, end in zip(heads, ends, strict=bool(heads))}
    if "start" not in rules or len(rules) < len(heads):
        return None
    used = {name: set(_NAME.findall(_without_literals(body))) for name, body in rules.items()}
    imported = {alias for token in _TOKEN.finditer(grammar) if token["import"] for _, alias in _import_names(token)}
    if not set().union(*used.values()) <= rules.keys() | imported:
        return None  # a name that is missing is told as it was written
    used = {name: others & rules.keys() for name, others in used.items()}
    while leaves := [name for name, others in used.items() if not others]:
        used = {name: others.difference(leaves) for name, others in used.items() if others}
    return None if used else rules


def _without_literals(body: str) -> str:
    return _TREE_NAME.sub(" ", _TOKEN.sub(" ", body))


def _terminal(name: str) -> str:
    """The name of the terminal that stands for a rule."""
    return name if name == name.upper() else f"{name.upper()}_R"


def _as_terminal(body: str) -> str:
    """The body of a rule as that of a terminal, in one line."""
    written, place = [], 0
    for token in _TOKEN.finditer(body):
        written.append(_with_terminals(body[place : token.start()]))
        if token["comment"] is None and token["import"] is None:
            written.append(_quoted_token(token, is_terminal=True))
        place = token.end()
    written.append(_with_terminals(body[place:]))
    return " ".join("".join(written).split())


def _with_terminals(text: str) -> str:
    return _NAME.sub(lambda name: _terminal(name[0]), _TREE_NAME.sub(" ", text))


def _quoted_token(token: re.Match[str], *, is_terminal: bool) -> str:
    if token["comment"] is not None:
        return token[0]
    if token["range"] is not None:
        first, last = (json.loads(each) for each in re.findall(r'"(?:\\.|[^"\\])"', token[0]))
        return f"/{quoted_pattern(f'[{re.escape(first)}-{re.escape(last)}]')}/"
    if token["text"] is not None:
        return _quoted_text(token["text"], token["any_case"], is_whole=is_terminal)
    if token["pattern"] is not None:
        if not is_terminal and (run := _run(token["pattern"], token["flags"])) is not None:
            return run
        return f"/{quoted_pattern(token['pattern'], token['flags'])}/{token['flags']}"
    if token["import"] is not None:
        return _imported(token)
    raise ValueError(f"{token[0]} inside a grammar of JSON text is not supported; write it as Lark")


def _run(pattern: str, flags: str) -> str | None:
    """A class that may come again, as a choice of plain runs and escapes; None for another pattern, or without any."""
    match = _ONE_CLASS.fullmatch(pattern)
    if match is None:
        return None
    atom = _class(match[2], flags)
    escapes = [json.dumps(escaped) for char, escaped in _ESCAPES.items() if _matches(atom, char, flags)]
    many = "" if match[3] == "?" else "+"
    return f"(/[{atom}&&{_PLAIN}]{many}/{flags} | {' | '.join(escapes)}){match[3]}" if escapes else None


def _quoted_text(literal: str, any_case: str, *, is_whole: bool) -> str:
    """A literal. Escapes have no case, so they are written apart where case does not matter."""
    text = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", literal))
    pieces = [text] if is_whole and not any_case else re.split(r'(["\\\x00-\x1f])', text)
    written = [
        json.dumps(json.dumps(piece, ensure_ascii=False)[1:-1], ensure_ascii=False) + ("" if index % 2 else any_case)
        for index, piece in enumerate(pieces)
        if piece
    ]
    return "(" + " ".join(written) + ")" if len(written) > 1 else "".join(written) or '""'


def _import_names(token: re.Match[str]) -> list[tuple[str, str]]:
    """(name in Lark's library, name in the grammar) of an import."""
    if token["name"]:
        return [(token["name"], token["alias"] or token["name"])]
    return [(name.strip(), name.strip()) for name in token["names"].split(",") if name.strip()]


def _imported(token: re.Match[str]) -> str:
    """Terminals of Lark's library: those with characters that are escaped are written out."""
    lines = []
    for name, alias in _import_names(token):
        if name in _COMMON:
            lines.append(f"{alias}: /{quoted_pattern(_COMMON[name])}/")
        else:
            lines.append(f"%import common.{name}" + (f" -> {alias}" if alias != name else ""))
    return "\n".join(lines)


def quoted_pattern(pattern: str, flags: str = "") -> str:
    """A regular expression for what its texts are inside a JSON string."""
    written, place = [], 0
    while place < len(pattern):
        if group := _GROUP.match(pattern, place):
            written.append(group[0])
            place = group.end()
        elif pattern[place] == "{" and (count := _COUNT.match(pattern, place)):
            written.append(count[0])
            place = count.end()
        elif pattern[place] in "()|*+?^$":
            written.append(pattern[place])
            place += 1
        else:
            end = _atom_end(pattern, place)
            written.append(_quoted_atom(pattern[place:end], flags))
            place = end
    return "".join(written)


def _atom_end(pattern: str, place: int) -> int:
    """Where the class, escape or character ends that begins here."""
    if pattern[place] == "\\":
        escape = _ESCAPE.match(pattern, place)
        return len(pattern) if escape is None else escape.end()
    if pattern[place] != "[":
        return place + 1
    depth, at = 0, place
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            at += 1 if pattern[at + 1 : at + 2] == "^" else 0
            at += 1 if pattern[at + 1 : at + 2] == "]" else 0  # a first bracket is a member
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(pattern)


def _class(atom: str, flags: str) -> str:
    """A dot as the class it stands for."""
    if atom != ".":
        return atom
    return r"[\s\S]" if "s" in flags else r"[^\n]"


def _quoted_atom(atom: str, flags: str) -> str:
    atom = _class(atom, flags)
    if atom[0] == "\\" and atom[1:] in _LETTERS:
        return _written(_ESCAPES[_LETTERS[atom[1:]]])
    if atom in _ANCHORS:
        return atom
    if atom[0] not in "[\\" or (len(atom) == 2 and not atom[1].isalnum()):
        return _written(_ESCAPES[atom[-1]]) if atom[-1] in _ESCAPES else atom
    escapes = "|".join(_written(escaped) for char, escaped in _ESCAPES.items() if _matches(atom, char, flags))
    plain = f"[{atom}&&{_PLAIN}]"
    if escapes and not any(_matches(atom, chr(code), flags) for code in range(0x20, 0x180) if chr(code) not in '"\\'):
        plain = ""  # a class of nothing but what is escaped
    return f"(?:{'|'.join(filter(None, (plain, escapes)))})"


def _matches(atom: str, char: str, flags: str) -> bool:
    """Whether a class or an escape matches a character."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.fullmatch(atom, char, re.IGNORECASE if "i" in flags else 0) is not None
    except re.error:
        return False  # a notation of Rust's alone, as properties of Unicode


def _written(escaped: str) -> str:
    """An escape as a pattern of its characters."""
    return "(?:" + "".join(f"\\{char}" if char == "\\" else char for char in escaped) + ")"
