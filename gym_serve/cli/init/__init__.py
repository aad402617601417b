"""`gym-serve init`: writes a new environment, with its tests and its graph, that works as it is.

The files come from ``template``. A project may have several environments: the shared file,
``pyproject.toml``, is written once and then left as it is. In paths and texts of the templates, ``NAME`` and
``{{name}}`` stand for the package's name, ``{{Class}}`` for the server class. Templates end in ``.tmpl``, so
that no tool takes them for code of this package.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from gym_serve.cli.options import App, JsonOption
from gym_serve.cli.printing import print_json
from gym_serve.graph.spec import RESERVED_NAMES
from gym_serve.types.errors import BadRequest, Conflict

init = App(name="init", no_args_is_help=True, help="Start an environment of your own.")


@init.callback()
def _group() -> None:
    """Start an environment of your own."""


@init.command()
def environment(
    name: Annotated[str, typer.Argument(help="Name of the package, in lower case: my_environment.")],
    *,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of the project; by default the current folder."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a working environment: a package with a tool and a verifier, tests, data and a graph.

    They are added to the project in the current folder; existing files are not
    changed. There, pytest (pip install pytest) and gym-serve test NAME pass (without Ray), and
    serve run graphs/NAME.yaml serves the environment to a scripted model.

    Exit status: 0, or 1 if the name or the folder cannot be used, or a file
    exists already.

    Example: gym-serve init environment my_environment
    """
    target = folder or Path()
    files = write_environment(name, target)
    if as_json:
        print_json({"ok": True, "folder": str(target), "files": [str(file) for file in files]})
        return
    for file in files:
        typer.echo(file)
    typer.echo("\nnext:" + (f"\n  cd {folder}" if folder else ""))
    typer.echo(f"  gym-serve test {name}\n  pip install pytest\n  pytest\n  serve run graphs/{name}.yaml")


_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")
_SUFFIX = ".tmpl"
_TEMPLATES = Path(__file__).with_name("template")
_SHARED = "pyproject.toml"


def write_environment(name: str, folder: Path) -> list[Path]:
    """Write the package ``name`` into the folder of a project, which is made if it is not there.

    Returns:
        the files that were written; without ``pyproject.toml`` if there was one.

    Raises:
        BadRequest: the name cannot be that of a package, or the folder cannot be written.
        Conflict: the name is taken by another package, or one of the files is there.
    """
    _check_name(name)
    if name in sys.stdlib_module_names or _is_installed(name):
        raise Conflict(f"a package {name!r} exists already; choose another name")
    files = {}
    for template in sorted(_TEMPLATES.rglob(f"*{_SUFFIX}")):
        path = template.relative_to(_TEMPLATES).as_posix().removesuffix(_SUFFIX)
        files[folder / path.replace("NAME", name)] = template
    files = {file: template for file, template in files.items() if file.name != _SHARED or not file.exists()}
    if there := next((file for file in files if file.exists()), None):
        raise Conflict(f"{there} exists already; choose another name, or another folder with --folder")
    try:
        for file, template in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            text = template.read_text("utf-8")
            file.write_text(text.replace("{{name}}", name).replace("{{Class}}", class_name(name)), "utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write {folder}: {error.strerror or error}") from error
    return list(files)


def class_name(name: str) -> str:
    """The class of an environment: ``my_environment`` -> ``MyEnvironment``."""
    return "".join(part.capitalize() for part in name.split("_"))


def _is_installed(name: str) -> bool:
    """Whether a module is there to be imported; a folder that happens to have its name is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        proposal = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")
        hint = f", e.g. {proposal}" if _NAME.fullmatch(proposal) and proposal != name else ""
        raise BadRequest(
            f"a package name must have only lower case letters, digits and _, got {name!r}{hint}"
        )
    if name in RESERVED_NAMES:
        raise BadRequest(f"{name!r} is a route of every graph; choose another name")
    if name in {"tests", "graphs"}:
        raise BadRequest(f"{name!r} is a folder of the project; choose another name")
