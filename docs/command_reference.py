"""The page of all commands with their arguments and options: docs/options.md, from what ``--help`` prints.

``python docs/generate.py`` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from gym_serve.cli import main

HEAD = """\
<!-- Written by docs/generate.py; do not edit. -->
# Arguments and options

Every command with all it takes, as its `--help` prints it. [Commands](commands.md) says which
command does what, and leads to the guides.

An option without a value is a switch. A default of — says that you must give the value.
"""
COMMAND = r"gym-serve (?:list graph|dataset [a-z]+|sandbox [a-z]+|[a-z-]+)"


def options_page() -> str:
    """The text of options.md."""
    return "\n".join([HEAD, *_commands(typer.main.get_command(main), ())]).rstrip() + "\n"


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        elif not command.hidden:
            yield f"## {' '.join((*path, name))}\n"
            yield from map(_paragraph, command.help.strip().split("\n\n"))
            yield "| argument or option | value | default | meaning |\n|---|---|---|---|"
            yield from (_row(one) for one in command.params if not getattr(one, "hidden", False))
            yield ""


def _paragraph(text: str) -> str:
    """A paragraph of the help: commands as code, a list of exit statuses as a list."""
    text = re.sub(r"^(\d+) +", r"- \1: ", text, flags=re.MULTILINE)
    text = re.sub(r"(?:(?<=^Example: )|(?<=^A first run: ))gym-serve .+", r"`\g<0>`", text, flags=re.DOTALL)
    return _plain(text).replace(":\n- ", ":\n\n- ") + "\n"


def _row(one: Any) -> str:
    if one.param_type_name == "argument":
        names, value = f"`{one.metavar or one.name.upper()}`", ""
    else:
        names = ", ".join(f"`{name}`" for name in sorted({*one.opts, *one.secondary_opts}, key=len)[::-1])
        value = "" if one.is_flag or one.count else f"`{one.metavar or _type(one)}`"
    default = "—" if one.required else "" if one.default in (None, False, (), []) else f"`{one.default}`"
    meaning = one.help or ""
    if one.envvar:
        meaning += f" Environment variable: `{one.envvar}`."
    return f"| {names} | {_cell(value)} | {_cell(default)} | {_cell(meaning)} |"


def _type(one: Any) -> str:
    annotation = one.type_descriptor.annotation
    return {"int": "INTEGER", "float": "NUMBER", "Path": "FILE"}.get(annotation.__name__, "TEXT")


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _plain(text: str) -> str:
    """Text in which commands, options and names with underscores are code."""
    outside_of_code = r"(?=[^`]*(?:`[^`]*`[^`]*)*$)"
    return re.sub(rf"(?<![`\w,-])({COMMAND}|--[a-z][\w-]*|\w+_\w+)(?![`\w=]){outside_of_code}", r"`\1`", text)
