"""How models mark their thinking. Data: which markers, and what holds when neither prompt nor output says anything.

Sources: the models' published cards and chat templates.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REASONING_FORMATS", "ReasoningFormat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """One way of thinking before answering."""

    name: str
    start: tuple[str, ...]
    """Markers that open the thinking at the beginning of an output."""
    end: tuple[str, ...]
    """Markers that close it."""
    open_by_default: bool = False
    """Whether an output begins inside the thinking unless the prompt has closed it."""
    off_switches: tuple[str, ...] = ()
    """Template variables that switch the thinking off when they are false."""
    fingerprints: tuple[tuple[str, ...], ...] = ()
    """Texts that a chat template has all of, for one of the tuples."""
    needs_table: str | None = None
    """Tool format whose table already says how the thinking is marked."""
    always_on: bool = False
    """Whether an output may begin with thinking whatever the request says."""
    closing: str = ""
    """What ends the thinking in place of the model, where it is not the first of `end`."""
    turn: str = "\n\n"
    """What stands between the end of the thinking and a call."""
    answer: str = "\n\n"
    """What stands between the end of the thinking and the answer."""


_START, _END = ("<think>",), ("</think>",)
_OFF = ("thinking", "enable_thinking")


def _of(*formats: ReasoningFormat) -> dict[str, ReasoningFormat]:
    return {each.name: each for each in formats}


# In the order in which a template is compared with them: the telling fingerprints first.
REASONING_FORMATS = _of(
    ReasoningFormat(
        name="gpt_oss",
        start=(),
        end=(),
        needs_table="gpt_oss",
        always_on=True,
        closing="<|end|>",
        turn="<|start|>assistant",
        answer="<|start|>assistant<|channel|>final<|message|>",
        fingerprints=(("<|channel|>", "<|message|>"),),
    ),
    ReasoningFormat(
        name="seed_oss", start=("<seed:think>",), end=("</seed:think>",), open_by_default=True,
        fingerprints=(("seed:think",),),
    ),
    ReasoningFormat(name="mistral", start=("[THINK]",), end=("[/THINK]",), fingerprints=(("[THINK]",),)),
    ReasoningFormat(
        name="granite",
        start=("Here is my thought process:", "Here's my thought process:"),
        end=("Here is my response:", "Here's my response:"),
        fingerprints=(("my thought process",),),
    ),
    ReasoningFormat(
        name="kimi_k2", start=_START, end=_END, open_by_default=True, off_switches=_OFF,
        fingerprints=(("<|tool_calls_section_begin|>", "think>"),),
    ),
    ReasoningFormat(
        name="minimax_m2", start=_START, end=_END, open_by_default=True,
        fingerprints=(("<minimax:tool_call>", "think>"),),
    ),
    ReasoningFormat(name="step3", start=_START, end=_END, open_by_default=True, fingerprints=(("steptml", "think>"),)),
    ReasoningFormat(
        name="glm45", start=_START, end=_END, open_by_default=True, off_switches=_OFF,
        fingerprints=(("<arg_key>", "think>"),),
    ),
    ReasoningFormat(
        name="deepseek_r1", start=_START, end=_END, open_by_default=True,
        fingerprints=(("<｜Assistant｜><think>\\n",), ("<｜Assistant｜>", "split('</think>')[-1]", "'function'")),
    ),
    ReasoningFormat(
        name="deepseek_v3", start=_START, end=_END, open_by_default=True, off_switches=_OFF,
        fingerprints=(("<｜Assistant｜>", "think>"),),
    ),
    ReasoningFormat(name="holo2", start=_START, end=_END, open_by_default=True, off_switches=_OFF),
    ReasoningFormat(
        name="nemotron_v3", start=_START, end=_END, open_by_default=True, off_switches=_OFF,
        fingerprints=(("<SPECIAL_12>", "think>"), ("truncate_history_thinking", "think>")),
    ),
    ReasoningFormat(
        name="olmo3", start=_START, end=_END, open_by_default=True, fingerprints=(("<function_calls>", "think>"),)
    ),
    ReasoningFormat(
        name="qwen3", start=_START, end=_END, off_switches=("enable_thinking",), fingerprints=(("</think>",),)
    ),
)  # fmt: skip
"""Name -> format."""
