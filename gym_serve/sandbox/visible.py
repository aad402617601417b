"""What of this machine's files a sandbox shows: Python, the system's libraries, and the packages asked for.

Everything else is not there: not the other packages of the virtual environment, not gym_serve with its
verifiers and data, no programs, no settings of the system.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["PACKAGES", "packages_of", "python_and_libraries", "shown_packages"]

logger = logging.getLogger("gym_serve")

PACKAGES = "/sandbox/packages"
"""Where packages are, in the sandbox."""

_LINKS = ("/lib", "/lib32", "/lib64", "/libx32", "/usr/lib64")
_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/usr/share/zoneinfo")
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_REQUIRED = re.compile(r"([A-Za-z0-9._-]+)(?!.*\bextra\b)")


def python_and_libraries() -> list[str]:
    """Arguments of ``bwrap`` that show Python without any packages, and what it is linked to."""
    folders, arguments = _libraries()
    prefixes = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    prefixes |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    shown = [*folders, *(sysconfig.get_path(name, vars=prefixes) for name in ("stdlib", "platstdlib"))]
    base = Path(sys.base_prefix, "lib")
    files = [os.path.realpath(sys.executable), *map(str, sorted(base.glob("lib*.so*"))), *_FILES]
    for path in dict.fromkeys(filter(os.path.exists, (*shown, *files))):
        if not any(Path(path).is_relative_to(folder) for folder in shown if folder != path):
            arguments += _shown(path, path)
    for folder in shown:
        for name in _PACKAGE_FOLDERS:
            if os.path.isdir(packages := os.path.join(folder, name)):
                arguments += ["--tmpfs", packages, "--remount-ro", packages]
    return arguments


def _libraries() -> tuple[list[str], list[str]]:
    """Folders of the system's libraries, and arguments for the links to them."""
    arguments, folders = [], []
    triple = sysconfig.get_config_var("MULTIARCH") or "-"
    for folder in filter(os.path.isdir, (*_LINKS, f"/usr/lib/{triple}", "/usr/lib")):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif folder != "/usr/lib" or not os.path.isdir(f"/usr/lib/{triple}"):
            folders.append(folder)
    return folders, arguments


def shown_packages(names: Iterable[str]) -> list[str]:
    """Arguments of ``bwrap`` that show packages, those that they require included, and no others."""
    arguments = ["--dir", PACKAGES]
    entries = {Path(path).name: path for name in packages_of(names) for path in _entries(name)}
    for name, path in sorted(entries.items()):
        arguments += _shown(path, f"{PACKAGES}/{name}")
    return arguments


def _shown(path: str, place: str) -> list[str]:
    # What bwrap makes on the way to a place by itself is for its own user alone, who may be root.
    return ["--dir", os.path.dirname(place), "--ro-bind", path, place]


def packages_of(names: Iterable[str]) -> list[str]:
    """Packages with all that they require, less what is not installed."""
    found: dict[str, None] = {}
    wanted = list(names)
    missing = []
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop(0)).lower()
        if name in found:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        found[name] = None
        wanted += [match[1] for match in map(_REQUIRED.match, required) if match]
    if missing:
        logger.info("not installed, and so not to be imported by sandboxed code: %s", ", ".join(missing))
    return list(found)


def _entries(name: str) -> Iterator[str]:
    """The files and folders that a package has in the folder of packages."""
    package = importlib.metadata.distribution(name)
    tops = dict.fromkeys(file.parts[0] for file in package.files or ())
    for top in tops:
        path = str(package.locate_file(top))
        if top not in ("..", "__pycache__") and os.path.exists(path):
            yield path
