"""The sandbox chat templates run in: jinja2's immutable sandbox, with limits on time and memory.

Templates come with checkpoints and may come with requests: they are untrusted. jinja2's sandbox keeps them away from
Python's internals; this module adds what it does not bound: loops (a deadline, looked at in every round and in every
macro call), repetition and padding (`"x" * 10**9`, `"%999999999d"`), string building, and the size of the result.
Knows jinja2; knows no messages.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TemplateLimitError", "TemplateSandbox"]

_WIDE_FORMAT = re.compile(r"\d{6,}")
_GROWING_METHODS = frozenset({"replace", "join", "translate"})
_FORMAT_METHODS = frozenset({"format", "format_map"})


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template asked for more time or memory than it may have."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said, for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace() without underscore names, which would reach its own internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass self=...
        self, *rest = args
        attrs = dict(*rest, **kwargs)
        for name in attrs:
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"namespace attributes must not begin with an underscore, got {name!r}")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """One environment for all templates of a renderer. Thread-safe.

    Args:
        max_chars: Bound on the rendered text and on every string and repetition on the way.
        timeout_s: Bound on the time of one rendering.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, max_chars: int, timeout_s: float) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._max_chars = max_chars
        self._timeout_s = timeout_s
        self._running = threading.local()
        self.filters |= {"tojson": _tojson, "parsed_json": _parsed_json}
        self.filters = {name: self._guard_filter(function) for name, function in self.filters.items()}
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile with a look at the clock in every loop and macro.

        Raises:
            jinja2.TemplateSyntaxError: the template is not jinja2.
        """
        tree = self.parse(source)
        _add_guards(tree)
        return jinja2.Template.from_code(self, self.compile(tree, "chat_template"), self.make_globals(None))

    def run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render within the limits.

        Raises:
            TemplateLimitError: too long or too slow.
            jinja2.TemplateError: the template failed.
        """
        self._running.deadline_s = time.monotonic() + self._timeout_s
        size, parts = 0, []
        try:
            for part in template.generate(variables):
                size += len(part)
                if size > self._max_chars:
                    raise self._too_large("the rendered text")
                parts.append(part)
        except (RecursionError, MemoryError) as error:
            raise TemplateLimitError(f"the template needs too much memory ({type(error).__name__})") from error
        return "".join(parts)

    def tick(self) -> str:
        """Called by compiled templates in every loop round and macro call."""
        if time.monotonic() > self._running.deadline_s:
            raise TemplateLimitError(f"the template ran longer than {self._timeout_s:g} s")
        return ""

    def join_values(self, *values: Any) -> str:
        """The `~` operator of compiled templates."""
        texts = [str(value) for value in values]
        self._check_chars(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse operations whose result would be huge before they are done."""
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self._check_chars(len(left) + len(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            self._check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left)
            self._check_arguments(right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Refuse calls that pad or multiply strings beyond the limit."""
        self.tick()
        self._check_arguments((*args, *kwargs.values()))
        method = getattr(obj, "__wrapped__", obj)  # jinja2's sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _FORMAT_METHODS:
                self._check_format(owner)
            elif name in _GROWING_METHODS:
                self._check_growth(owner, name, args)
        return super().call(context, obj, *args, **kwargs)

    def _guard_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Filters call Python directly: the same look at their arguments, and at the size of what they return."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._check_arguments((*args, *kwargs.values()))
            if function.__name__ == "do_format" and isinstance(args[0], str):
                self._check_format(args[0])
            elif function.__name__ == "do_replace":
                self._check_growth(str(args[-3] if len(args) > 3 else args[0]), "replace", args[-2:])
            result = function(*args, **kwargs)
            if isinstance(result, str):
                self._check_chars(len(result))
            return result

        return guarded

    def _check_growth(self, text: str, method: str, args: tuple[Any, ...]) -> None:
        if method == "replace" and len(args) >= 2 and isinstance(args[1], str):
            old = str(args[0])
            self._check_chars(len(text) + text.count(old) * max(0, len(args[1]) - len(old)))
        elif method == "join" and args and isinstance(args[0], (list, tuple)):
            self._check_chars(sum(len(item) + len(text) for item in args[0] if isinstance(item, str)))

    def _check_format(self, text: str) -> None:
        wide = _WIDE_FORMAT.search(text)
        if wide is not None and ("%" in text or "{" in text):
            raise self._too_large(f"a format of width {wide.group()[:20]}")

    def _check_arguments(self, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) is int and value > self._max_chars:
                raise self._too_large(f"a call with the number {value}" if value < 2**63 else "a huge number")

    def _check_product(self, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                self._check_chars(len(value) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            self._check_chars(left.bit_length() + right.bit_length())

    def _check_power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int) and right > 0:
            self._check_chars(left.bit_length() * right)

    def _check_chars(self, size: int) -> None:
        if size > self._max_chars:
            raise self._too_large("a value in the template")

    def _too_large(self, what: str) -> TemplateLimitError:
        return TemplateLimitError(f"{what} is larger than the limit of {self._max_chars} characters")


def _add_guards(tree: nodes.Template) -> None:
    """Put `tick()` at the head of every loop and macro body, and route `~` through `join_values()`."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
    for owner in [tree, *tree.find_all(nodes.Node)]:
        for name, value in owner.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(owner, name, _guarded_concat(value))
            elif isinstance(value, list):
                value[:] = [_guarded_concat(item) if isinstance(item, nodes.Concat) else item for item in value]
    tree.set_environment(tree.environment)  # type: ignore[arg-type]  # None for a tree of no parser


def _guarded_concat(node: nodes.Concat) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute("join_values"), node.nodes, [], None, None)
    call.set_lineno(node.lineno)
    return call


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON (jinja2's own filter escapes for HTML)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _parsed_json(text: Any) -> Any:
    """What a JSON text says, and any other text itself."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


class TemplateRaisedError(jinja2.TemplateRuntimeError):
    """The template itself refused its input through raise_exception()."""


def _raise_exception(message: Any) -> str:
    raise TemplateRaisedError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
