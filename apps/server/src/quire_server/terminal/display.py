"""How an answer is shown while it comes: Markdown on a terminal, plain text elsewhere. Knows no server.

What a model says never reaches a terminal with its control characters: they could move the cursor, or worse.
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["AnswerDisplay", "MarkdownDisplay", "PlainDisplay", "displays_markdown", "printable", "split_blocks"]

REFRESHES_PER_S = 12
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline, and what turns the direction of text."""
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def printable(text: str) -> str:
    """The text without control characters."""
    return _CONTROL.sub("", text)


def displays_markdown(file: IO[str] | None = None) -> bool:
    """Whether output is for a terminal that can show more than lines."""
    return (file or sys.stdout).isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ


def split_blocks(text: str) -> tuple[str, str]:
    """The Markdown blocks at the head that nothing can change any more, and the rest.

    A block is closed when an unindented line follows an empty one outside of fenced code.
    """
    lines, fence, end, place = text.split("\n"), "", 0, 0
    was_empty = False
    for number, line in enumerate(lines):
        is_whole = number < len(lines) - 1
        found = _FENCE.match(line)
        if was_empty and not fence and line and not line[0].isspace():
            end = place
        if found and is_whole:
            if not fence:
                fence = found[1]
            elif found[1].startswith(fence) and not found[2].strip():
                fence = ""
        was_empty = not line.strip() and not fence
        place += len(line) + 1
    return text[:end], text[end:]


class AnswerDisplay(Protocol):
    """Where the pieces of one answer go."""

    def show_reasoning(self, text: str) -> None:
        """A piece of what the model thinks."""

    def show_text(self, text: str) -> None:
        """A piece of what it says."""

    def close(self) -> None:
        """The answer has ended, or was stopped."""


class PlainDisplay:
    """Text as it comes.

    Args:
        file: Takes it.
        shows_reasoning: Whether what the model thinks is for the reader, too; a program wants the answer alone.
    """

    def __init__(self, file: IO[str], *, shows_reasoning: bool = False) -> None:
        self._file, self._shows_reasoning = file, shows_reasoning
        self._is_terminal = file.isatty()
        self._kind = ""
        self._last = "\n"

    def show_reasoning(self, text: str) -> None:
        if self._shows_reasoning:
            self._write("thinking", text)

    def show_text(self, text: str) -> None:
        self._write("answer", text)

    def _write(self, kind: str, text: str) -> None:
        text = printable(text) if self._is_terminal else text
        if kind != self._kind and self._shows_reasoning and (self._kind or kind == "thinking"):
            self._file.write(f"{'' if self._last == chr(10) else chr(10)}[{kind}]\n")
        self._kind, self._last = kind, text[-1:] or self._last
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        if self._last != "\n":
            self._file.write("\n")
        self._file.flush()


class _Tail:
    """The last lines of Markdown that a screen has room for."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markdown import Markdown
        from rich.segment import Segment

        lines = console.render_lines(Markdown(self._text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.size.height - 2) :]:
            yield from line
            yield Segment.line()


class MarkdownDisplay:
    """Blocks that are whole are printed for good; the one that grows is drawn anew below them, so that nothing flickers
    and the screen's history holds the answer once."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        # Drawn by this thread alone: rich's own thread may write between what it reads of the screen and what it draws.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn_s = 0.0
        self._text = self._thoughts = ""
        self._live.start()

    def show_reasoning(self, text: str) -> None:
        from rich.text import Text

        self._thoughts += printable(text)
        *whole, self._thoughts = self._thoughts.split("\n")
        for line in whole:
            self._live.console.print(Text(line, style="dim italic"))
        self._draw(Text(self._thoughts, style="dim italic"))

    def show_text(self, text: str) -> None:
        from rich.markdown import Markdown

        self._close_thoughts()
        self._text += printable(text)
        whole, self._text = split_blocks(self._text)
        if whole:
            self._live.update("")
            self._live.console.print(Markdown(whole))
            self._live.console.print()
        self._draw(_Tail(self._text))

    def _draw(self, growing: RenderableType) -> None:
        """Show what grows, not more often than eyes can see."""
        is_due = time.monotonic() - self._drawn_s >= 1 / REFRESHES_PER_S
        self._live.update(growing, refresh=is_due)
        if is_due:
            self._drawn_s = time.monotonic()

    def _close_thoughts(self) -> None:
        from rich.text import Text

        if self._thoughts:
            self._live.update("")
            self._live.console.print(Text(self._thoughts, style="dim italic"))
            self._live.console.print()
            self._thoughts = ""

    def close(self) -> None:
        from rich.markdown import Markdown

        self._close_thoughts()
        self._live.update("")
        self._live.stop()
        if self._text.strip():
            self._console.print(Markdown(self._text))
