"""A dialect of answers: calls as `->name {"argument": value}<-`, thinking between `(musing)` and `(/musing)`."""

from __future__ import annotations

from quire_renderers.format_families import named_calls
from quire_renderers.format_states import Go
from quire_renderers.reasoning_formats import ReasoningFormat
from quire_renderers.tool_formats import ToolFormat

__all__ = ["ARROW_CALLS", "MUSING"]

ARROW_CALLS = ToolFormat(
    name="arrow",
    models="models that were trained on arrows",
    content={"->": "name"},
    states=lambda: named_calls(
        {"{": Go("arguments", keeps_marker=True)}, {"->": "name", "<-": Go("after", commits=True)}
    ),
    prefix="->NAME ",
    suffix="<-",
    trigger="->",
)

MUSING = ReasoningFormat(name="musing", start=("(musing)",), end=("(/musing)",))
