"""Scripts that complete `quire` command lines in a shell: commands, flags, and values where few are allowed.

Each script is whole: completing starts no Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from quire_interfaces import ConfigError

__all__ = ["SHELLS", "CompletedFlag", "completion_script"]


class CompletedFlag(NamedTuple):
    """A flag of a command."""

    flag: str
    text: str
    """One line about it."""
    takes_value: bool
    choices: tuple[str, ...] = ()


Commands = Mapping[str, tuple[str, list[CompletedFlag]]]
"""Name -> what it does, and its flags."""


def completion_script(shell: str, commands: Commands) -> str:
    """The script for a shell.

    Raises:
        ConfigError: there is none for it.
    """
    if shell not in SHELLS:
        raise ConfigError(f"there is no completion for the shell {shell!r}; there is for {', '.join(SHELLS)}")
    return SHELLS[shell](commands)


def _bash(commands: Commands) -> str:
    cases = "\n".join(
        f'    {name}) flags="{" ".join(each.flag for each in flags)}" ;;' for name, (_, flags) in commands.items()
    )
    values = {each.flag: each for _, flags in commands.values() for each in flags if each.choices}
    choices = "\n".join(
        f'    {flag}) COMPREPLY=($(compgen -W "{" ".join(each.choices)}" -- "$word")); return ;;'
        for flag, each in values.items()
    )
    return f"""# bash completion of quire; put it into use with: source <(quire completion bash)
_quire() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" flags=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$word"))
    return
  fi
  case "$before" in
{choices}
  esac
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  else
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -F _quire quire
"""


def _zsh(commands: Commands) -> str:
    described = "\n".join(f"    {_quoted(f'{name}:{text}')}" for name, (text, _) in commands.items())
    cases = "\n".join(_zsh_case(name, flags) for name, (_, flags) in commands.items())
    return f"""#compdef quire
# zsh completion of quire; put it into use with: source <(quire completion zsh)
_quire() {{
  local -a commands
  commands=(
{described}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  local command="$words[2]"
  shift words
  (( CURRENT-- ))
  case "$command" in
{cases}
  esac
}}
compdef _quire quire
"""


def _zsh_case(name: str, flags: list[CompletedFlag]) -> str:
    specs = []
    for each in flags:
        text = each.text.replace("[", "(").replace("]", ")").replace(":", r"\:")
        value = ""
        if each.takes_value:
            value = f":value:({' '.join(each.choices)})" if each.choices else ":value:_files"
        specs.append(_quoted(f"*{each.flag}[{text}]{value}"))
    listed = " \\\n      ".join([*specs, _quoted("*:file:_files")])
    return f"    {name})\n    _arguments -s \\\n      {listed}\n    ;;"


def _fish(commands: Commands) -> str:
    names = " ".join(commands)
    lines = ["# fish completion of quire; put it into use with: quire completion fish | source"]
    for name, (text, flags) in commands.items():
        first = f"not __fish_seen_subcommand_from {names}"
        lines.append(f"complete -c quire -n {_quoted(first)} -f -a {name} -d {_quoted(text)}")
        for each in flags:
            kind = "-l" if each.flag.startswith("--") else "-o"
            line = f"complete -c quire -n {_quoted(f'__fish_seen_subcommand_from {name}')}"
            line += f" {kind} {each.flag.lstrip('-')} -d {_quoted(each.text)}"
            if each.takes_value:
                line += f" -x -a {_quoted(' '.join(each.choices))}" if each.choices else " -r"
            lines.append(line)
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""Shell -> what writes its script."""
