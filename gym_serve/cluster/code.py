"""The code of a graph's own classes: where it is, a hash of it, and how it comes to a cluster that lacks it.

*Own* code is what is installed nowhere: the top-level package, or the single module, of a server's class, and
those beside it that it imports, also from inside of functions.

A folder of code may hold keys, data and links to anywhere. Of it go Python files, and what the
``pyproject.toml`` above it declares under ``tool.setuptools.package-data``. Nothing goes whose name, or that
of a folder on the way, begins with a dot, that a ``.gitignore`` names, or that a link brings in.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gym_serve.cluster.starting import START_LOG
from gym_serve.graph.spec import Graph
from gym_serve.types.errors import BadRequest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_log = logging.getLogger(START_LOG)

_INSTALLED = {"site-packages", "dist-packages"}
_NO_CODE = {"__pycache__", "venv"}


def own_code(cls: type) -> list[Path]:
    """What a class needs that is installed nowhere: folders of packages, and files of single modules,
    sorted."""
    files: dict[Path, None] = {}
    ahead, visited = [_top(cls.__module__)], set()
    while ahead:
        if (name := ahead.pop()) in visited:
            continue
        visited.add(name)
        for place in _places(name):
            files[place] = None
            for file in _python(place):
                ahead += _imported_by(file, file.stat().st_mtime_ns)
    return sorted(files)


def code_hash(cls: type) -> str:
    """A hash of the Python source of a class: of its `own_code`, or else of its package or module, if any."""
    places = own_code(cls)
    if not places and (file := getattr(sys.modules.get(cls.__module__), "__file__", None)):
        places = [Path(file).parent if Path(file).name == "__init__.py" else Path(file)]
    digest = hashlib.sha256()
    for place in places:
        for file in _python(place):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(place.parent)} {content}\n".encode())
    return digest.hexdigest() if places else ""


def shipped_files(place: Path) -> list[Path]:
    """What of an `own_code` place goes to a cluster, sorted."""
    files = [place] if place.is_file() else _files(place)
    declared = _declared(place)

    def is_data(file: Path) -> bool:
        inside = ((folder, pattern) for folder, pattern in declared if folder in file.parents)
        return any(file.relative_to(folder).match(pattern) for folder, pattern in inside)

    return [file for file in files if file.suffix == ".py" or is_data(file)]


def files_of(graph: Graph) -> list[Path]:
    """The `shipped_files` of a graph's classes, sorted."""
    shipped = _shipped(_needed(graph))
    return [file for place in sorted(shipped) for file in shipped[place]]


def ship(graph: Graph) -> dict[str, str]:
    """Upload the own code of a graph's classes to the connected cluster, from which its nodes fetch it.

    Returns an URI by the name of each server that has own code, for ``py_modules`` of its ``runtime_env``. It
    is a hash of the files, so code that has not changed is not sent again, and keeps its URI.
    """
    needed = _needed(graph)
    shipped = _shipped(needed)
    if files := [file for place in shipped for file in shipped[place]]:
        size = sum(file.stat().st_size for file in files)
        _log.info("Sending %d files of the graph's own code (%.1f KB)…", len(files), size / 1000)
    own = {tuple(places) for places in needed.values() if places}
    uris = {places: _uploaded({place: shipped[place] for place in places}) for places in own}
    return {name: uris[tuple(places)] for name, places in needed.items() if places}


def with_code(runtime_env: Mapping[str, Any] | None, uris: list[str]) -> dict[str, Any]:
    """A server's ``runtime_env`` with shipped code in it."""
    environment = dict(runtime_env or {})
    return (
        {**environment, "py_modules": [*(environment.get("py_modules") or []), *uris]}
        if uris
        else environment
    )


def _needed(graph: Graph) -> dict[str, list[Path]]:
    return {name: own_code(node.cls) for name, node in graph.nodes.items() if node.cls is not None}


def _shipped(needed: Mapping[str, list[Path]]) -> dict[Path, list[Path]]:
    return {place: shipped_files(place) for places in needed.values() for place in places}


def _uploaded(shipped: Mapping[Path, list[Path]]) -> str:
    from gym_serve.cluster.serve_compat import upload_code

    with TemporaryDirectory(prefix="gym-serve-code-") as folder:
        # In one folder: Ray's hash of a package leaves out the package's name.
        for place, files in shipped.items():
            for file in files:
                copy = Path(folder, file.relative_to(place.parent))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
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
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    for place in map(Path, places):
        if place.exists() and place.name and not _INSTALLED & set(place.parts):
            yield place.resolve()


def _python(place: Path) -> list[Path]:
    return [file for file in shipped_files(place) if file.suffix == ".py"]


def _files(folder: Path) -> list[Path]:
    """The regular files of a folder that are the repository's own; links to folders are not followed."""
    from gym_serve.cluster.serve_compat import ignoring

    # Up to the root of the repository; without one, no further than what stands beside the folder.
    above = next((n for n, at in enumerate((folder, *folder.parents)) if (at / ".git").exists()), 1)
    ignored = [ignoring(file) for at in (folder, *folder.parents)[: above + 1] for file in _ignore_file(at)]
    files = []
    for at, folders, names in os.walk(folder):
        ignored += [ignoring(file) for file in _ignore_file(Path(at)) if Path(at) != folder]
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in _NO_CODE)
        for name in names:
            file = Path(at, name)
            own = file.resolve().is_relative_to(folder) and file.is_file() and not name.startswith(".")
            if own and not any(is_ignored(file) for is_ignored in ignored):
                files.append(file)
    return sorted(files)


def _ignore_file(folder: Path) -> Iterator[Path]:
    if (file := folder / ".gitignore").is_file():
        yield file


def _declared(place: Path) -> list[tuple[Path, str]]:
    """Patterns of package data, each with the folder of the package to which it is relative."""
    project = next((file for at in place.parents if (file := at / "pyproject.toml").is_file()), None)
    if project is None or not place.is_dir():
        return []
    try:
        tool = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
        package_data = dict(tool.get("setuptools", {}).get("package-data", {}))
    except (ValueError, AttributeError) as error:
        raise BadRequest(f"{project}: {error}") from None
    return [
        (place if package == "*" else Path(place.parent, *package.split(".")), pattern)
        for package, patterns in package_data.items()
        for pattern in patterns
    ]


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
