"""vLLM's settings that are no settings here: what they say is so anyway, or there is nothing like it.

A command line, a file or a call that was written for vLLM then runs, or is told what to do instead; nothing that would
make a difference is passed over in silence. The answers are in `quire.vllm_table`; what Quire can set is a setting of
its own.
"""

from __future__ import annotations

import logging
from typing import Any

from quire.vllm_table import OTHER_SPELLINGS, VLLM_SETTINGS, VLLMSetting
from quire_interfaces import ConfigError

__all__ = ["OTHER_SPELLINGS", "VLLM_SETTINGS", "VLLMSetting", "is_settled", "other_name"]


def other_name(name: str) -> str:
    """Name of our setting that one of vLLM's is another spelling of; `name` itself where it is none."""
    ours = OTHER_SPELLINGS.get("--" + name.replace("_", "-"), "")
    # "--no-..." turns a value round, and a short flag is no setting: the command line alone takes these.
    return ours.removeprefix("--").replace("-", "_") if ours.startswith("--") and ours[:5] != "--no-" else name


def is_settled(name: str, value: Any, source: str = "command line") -> bool:
    """Whether `name` is one of them and `value` needs nothing done; says so where someone may expect more.

    Raises:
        ConfigError: one of them with a value that Quire cannot follow; it is spelled as in `source`.
    """
    setting = VLLM_SETTINGS.get(name)
    if setting is None:
        return False
    if not _is_accepted(setting, value):
        raise ConfigError(f"{_spelled(name, value, source)} is not supported: {setting.words}", field=name)
    if setting.is_noted and value is not None and value is not False:
        logging.getLogger("quire").warning("quire: %s has no effect: %s", name, setting.words)
    return True


def _is_accepted(setting: VLLMSetting, value: Any) -> bool:
    if value is None or setting.values is None:
        return True
    texts = [str(each).strip().lower() for each in (value if isinstance(value, (list, tuple, set)) else [value])]
    return all(
        text in ("", "none", "null") or any(_is_same(text, accepted) for accepted in setting.values) for text in texts
    )


def _is_same(text: str, value: str) -> bool:
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value


def _spelled(name: str, value: Any, source: str) -> str:
    """The setting and its value as they were given."""
    if source != "command line":
        return f"{name}={value!r} ({source})"
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
