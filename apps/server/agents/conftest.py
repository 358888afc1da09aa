"""What the scenarios of all agents share. A new agent is a folder with its lock file and a file `NAME_scenarios.py`."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports this folder by path, and the engine's process by name

from npm_package import NoAgentError, install
from recording_proxy import Exchange, recording_proxy
from scripted_server import Rule, scripted_server

from quire_testkit.checkpoints import make_checkpoint

RUN_S = 120
"""Longest run of an agent."""
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
"""A PNG image."""

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


@dataclass(slots=True)
class Workplace:
    """A home, a folder to work in and a scripted server, for one scenario."""

    home: Path
    work: Path
    url: str
    exchanges: list[Exchange] = field(default_factory=list)

    def run(self, command: Sequence[str], **environment: str) -> str:
        """What an agent prints. It sees no other home and no network but this machine's own; it must end well."""
        own = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(self.home), "NO_PROXY": "127.0.0.1",
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
        }  # fmt: skip
        done = subprocess.run(
            list(command), cwd=self.work, env={**own, **environment}, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_S, check=False,
        )  # fmt: skip
        statuses = [(each.path, each.status, each.answer[:400]) for each in self.exchanges if each.status >= 400]
        assert done.returncode == 0, (done.stdout, statuses)
        return done.stdout

    def bodies(self, path: str) -> list[Any]:
        """Bodies of the requests to this path so far."""
        return [each.body for each in self.exchanges if each.path.split("?")[0] == path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template that shows tools, calls and results."""
    folder = make_checkpoint(tmp_path_factory.mktemp("scripted") / "model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Installs an agent by the name of its folder, once; the folder of its programs."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            try:
                folders[name] = install(Path(__file__).parent / name, tmp_path_factory.mktemp(name))
            except NoAgentError as error:
                print(f"\n{'!' * 100}\nNOT TESTED: {name}: {error}\n{'!' * 100}", file=sys.__stderr__)
                pytest.skip(str(error))
        return folders[name]

    return get


@pytest.fixture
def workplace(checkpoint: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes the workplace of a scenario, for the rules of its model."""
    with contextlib.ExitStack() as stack:

        def make(rules: Sequence[Rule], **settings: Any) -> Workplace:
            address = stack.enter_context(scripted_server(checkpoint, rules, **settings))
            url, exchanges = stack.enter_context(recording_proxy(address))
            home, work = tmp_path / "home", tmp_path / "work"
            home.mkdir()
            work.mkdir()
            (work / "pixel.png").write_bytes(PIXEL)
            return Workplace(home, work, url, exchanges)

        yield make
