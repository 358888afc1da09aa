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
    answer_start: tuple[str, ...] = ()
    """Markers that may stand before the answer."""
    answer_end: tuple[str, ...] = ()
    """Markers that stand behind an answer that began with one."""
    silent: tuple[str, ...] = ()
    """Markers anywhere in the answer that are no text."""
    shown_as: str | None = None
    """What comes before the whole output where thinking and its markers are left in the text."""
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
        name="muse",
        start=("to=self<|message|>",),
        end=(),
        needs_table="muse",
        always_on=True,
        closing="<|eom|>",
        turn="<|start|>assistant ",
        answer="<|start|>assistant to=user<|message|>",
        fingerprints=(("<atem:function_calls>",), ("<|start|>", "<|eom|>", "to=self")),
    ),
    ReasoningFormat(
        name="inkling",
        start=("<|content_thinking|>",),
        end=(),
        needs_table="inkling",
        always_on=True,
        closing="<|end_message|>",
        turn="",
        answer="<|message_model|><|content_text|>",
        fingerprints=(("<|content_thinking|>",), ("<|message_model|>",)),
    ),
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
        name="apertus", start=("<|inner_prefix|>",), end=("<|inner_suffix|>",), fingerprints=(("<|inner_prefix|>",),),
    ),
    ReasoningFormat(
        name="cohere_command4", start=("<|START_THINKING|>",), end=("<|END_THINKING|>",),
        answer_start=("<|START_TEXT|>", "<|START_RESPONSE|>"), answer_end=("<|END_TEXT|>", "<|END_RESPONSE|>"),
        off_switches=("reasoning",), turn="", answer="<|START_TEXT|>",
        fingerprints=(("<|START_THINKING|>", "<|START_TEXT|>"),),
    ),
    ReasoningFormat(
        name="cohere_command3", start=("<|START_THINKING|>",), end=("<|END_THINKING|>",),
        answer_start=("<|START_RESPONSE|>", "<|START_TEXT|>"), answer_end=("<|END_RESPONSE|>", "<|END_TEXT|>"),
        off_switches=("reasoning",), turn="", answer="<|START_RESPONSE|>",
        fingerprints=(("<|START_THINKING|>",),),
    ),
    ReasoningFormat(
        name="gemma4", start=("<|channel>thought",), end=("<channel|>",), off_switches=("enable_thinking",), turn="",
        answer="", fingerprints=(("<|channel>",),),
    ),
    ReasoningFormat(
        name="kimi_k3", start=("<|open|>think<|sep|>",), end=("<|close|>think<|sep|>",), open_by_default=True,
        answer_start=("<|open|>response<|sep|>",), answer_end=("<|close|>response<|sep|>",),
        silent=("<|close|>message<|sep|>",), off_switches=_OFF, turn="", answer="<|open|>response<|sep|>",
        fingerprints=(("<|open|>think<|sep|>",), ("<|open|>", "<|sep|>", "think")),
    ),
    ReasoningFormat(
        name="minimax_m3", start=("<mm:think>",), end=("</mm:think>",), fingerprints=(("<mm:think>",),),
    ),
    ReasoningFormat(
        name="solar_open2", start=("<|think:start|>",), end=("<|think:end|>",), open_by_default=True,
        fingerprints=(("<|think:start|>",),),
    ),
    ReasoningFormat(
        name="hy_v3", start=("<think:opensource>", "<think>"), end=("</think:opensource>", "</think>"),
        fingerprints=(("<tool_sep", "think"), ("<think:opensource>",)),
    ),
    ReasoningFormat(
        name="hunyuan_a13b", start=_START, end=_END, answer_start=("<answer>",), answer_end=("</answer>",),
        off_switches=("enable_thinking",), turn="\n", answer="\n<answer>\n",
        fingerprints=(("</think>", "<answer>"),),
    ),
    ReasoningFormat(
        name="ernie45", start=_START, end=_END, open_by_default=True, answer_start=("<response>",),
        answer_end=("</response>",), off_switches=("enable_thinking",), answer="\n\n<response>\n",
        fingerprints=(("</think>", "<response>"),),
    ),
    ReasoningFormat(
        name="k2_horizon", start=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        end=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"), fingerprints=(("<ifm|think",),),
    ),
    ReasoningFormat(
        name="plamo3", start=("<|plamo:begin_think:plamo|>",), end=("<|plamo:end_think:plamo|>",),
        off_switches=("enable_thinking",), fingerprints=(("<|plamo:begin_think",), ("<|plamo:begin_", "think")),
    ),
    ReasoningFormat(name="kimi", start=("◁think▷",), end=("◁/think▷",), fingerprints=(("◁think▷",),)),
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
    ReasoningFormat(name="minimax_m2_append_think", start=(), end=(), shown_as="<think>"),
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
