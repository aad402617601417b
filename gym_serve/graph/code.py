"""The code of a graph's own classes: where it is, a hash of it, and how it comes to a cluster that lacks it.

*Own* code is what is installed nowhere: the top-level package, or the single module, of a server's class, and
those beside it that it imports, also from inside of functions. What is in site-packages must be on the nodes
already, or in the server's ``runtime_env``; gym_serve itself is.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gym_serve.graph.spec import Graph

_INSTALLED = {"site-packages", "dist-packages"}
_NOT_CODE = ("__pycache__", "*.pyc", ".git", ".venv", "venv")


def own_code(cls: type) -> list[Path]:
    """What a class needs that is installed nowhere: folders of packages, and files of single modules.

    They are sorted. A class of gym_serve, of an installed package or of ``__main__`` has none.
    """
    found: dict[Path, None] = {}
    ahead, seen = [_top(cls.__module__)], set()
    while ahead:
        if (name := ahead.pop()) in seen:
            continue
        seen.add(name)
        for place in _places(name):
            found[place] = None
            for file in _sources(place):
                ahead += _imported_by(file, file.stat().st_mtime_ns)
    return sorted(found)


def code_hash(cls: type) -> str:
    """A hash of the Python source of a class: of its `own_code`, or else of its package or module.

    Empty for a class without a file.
    """
    places = own_code(cls)
    if not places and (file := getattr(sys.modules.get(cls.__module__), "__file__", None)):
        places = [Path(file).parent if Path(file).name == "__init__.py" else Path(file)]
    digest = hashlib.sha256()
    for place in places:
        for file in _sources(place):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(place.parent)} {content}\n".encode())
    return digest.hexdigest() if places else ""


def ship(graph: Graph) -> dict[str, str]:
    """Upload the own code of a graph's classes to the connected cluster, from which its nodes fetch it.

    Returns:
        an URI by the name of each server that has own code, for ``py_modules`` of its ``runtime_env``. It is
        a hash of the files, so code that has not changed is not sent again, and keeps its URI.

    Raises:
        Unavailable: the cluster does not take it, e.g. because it is larger than Ray allows.
    """
    needed = {name: own_code(node.cls) for name, node in graph.nodes.items() if node.cls is not None}
    uris = {tuple(places): _uploaded(places) for places in needed.values() if places}
    return {name: uris[tuple(places)] for name, places in needed.items() if places}


def with_code(runtime_env: Mapping[str, Any] | None, uris: list[str]) -> dict[str, Any]:
    """A server's ``runtime_env`` with shipped code in it."""
    given = dict(runtime_env or {})
    return {**given, "py_modules": [*(given.get("py_modules") or []), *uris]} if uris else given


def _uploaded(places: list[Path]) -> str:
    from gym_serve.routing.serve_compat import upload_code

    with TemporaryDirectory(prefix="gym-serve-code-") as folder:
        # In one folder: Ray's hash of a package leaves out the package's name.
        for place in places:
            if place.is_dir():
                shutil.copytree(place, Path(folder, place.name), ignore=shutil.ignore_patterns(*_NOT_CODE))
            else:
                shutil.copy(place, folder)
        return upload_code(Path(folder))


def _places(name: str) -> Iterator[Path]:
    """Where an own top-level package or module is; nothing for any other."""
    if name in sys.stdlib_module_names or name in ("__main__", "gym_serve"):
        return
    spec = None
    with suppress(ImportError, ValueError):  # a module that was made by hand has no spec
        spec = find_spec(name)
    if spec is None:
        return
    found = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    for place in map(Path, found):
        if place.exists() and place.name and not _INSTALLED & set(place.parts):
            yield place.resolve()


def _sources(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


@lru_cache(maxsize=4096)
def _imported_by(file: Path, changed: int) -> tuple[str, ...]:
    """The top-level modules that a source file imports anywhere in it."""
    names: dict[str, None] = {}
    with suppress(SyntaxError, ValueError):  # a template, or no Python at all
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names |= dict.fromkeys(_top(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names[_top(node.module)] = None
    return tuple(names)


def _top(module: str) -> str:
    return module.partition(".")[0]
