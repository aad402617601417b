"""`write_environment`: a package, its tests and its graph, made from the files in ``template``.

A project may have several environments: what is shared, its ``pyproject.toml``, is written once and then left
as it is. In the templates' paths and texts, ``NAME`` and ``{{name}}`` stand for the package's name,
``{{Class}}`` for the server class. They end in ``.tmpl``, so that no tool takes them for this package's code.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

from gym_serve.graph.names import RESERVED_NAMES
from gym_serve.types.errors import BadRequest, Conflict

__all__ = ["class_name", "write_environment"]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")
_SUFFIX = ".tmpl"
_TEMPLATES = Path(__file__).with_name("template")
_SHARED = "pyproject.toml"


def write_environment(name: str, folder: Path) -> list[Path]:
    """Write a new environment.

    Args:
        name: of its package.
        folder: of the project; made if it is not there.

    Returns:
        the files that were written; without ``pyproject.toml`` if there was one.

    Raises:
        BadRequest: the name cannot be that of a package, or the folder cannot be written.
        Conflict: the name is taken by another package, or one of the files is there.
    """
    _check_name(name)
    if name in sys.stdlib_module_names or _is_installed(name):
        raise Conflict(f"there is a package {name!r} already; choose another name")
    files = {}
    for template in sorted(_TEMPLATES.rglob(f"*{_SUFFIX}")):
        path = template.relative_to(_TEMPLATES).as_posix().removesuffix(_SUFFIX)
        files[folder / path.replace("NAME", name)] = template
    files = {file: template for file, template in files.items() if file.name != _SHARED or not file.exists()}
    if there := next((file for file in files if file.exists()), None):
        raise Conflict(f"{there} is there already; choose another name, or another folder with --folder")
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
            f"{name!r} is no name of a package: it must have lower case letters, digits and _ only{hint}"
        )
    if name in RESERVED_NAMES:
        raise BadRequest(f"{name!r} is a route of every graph; choose another name")
    if name in {"tests", "graphs"}:
        raise BadRequest(f"{name!r} is a folder of the project; choose another name")
