"""What gym_serve exports: complete, sorted, documented, and importable without Ray."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gym_serve
import gym_serve.deployments
import gym_serve.environments
from gym_serve.types import errors

PACKAGES = (gym_serve, gym_serve.deployments, gym_serve.environments)
WITHOUT_RAY = (
    "gym_serve.cli",
    "gym_serve.deployments.chat_model",
    "gym_serve.deployments.openai_model",
    "gym_serve.deployments.scripted_model",
    "gym_serve.deployments.simple_agent",
    "gym_serve.environments.mcqa",
    "gym_serve.environments.simple_weather",
    "gym_serve.graph",
    "gym_serve.servers",
    "gym_serve.types.errors",
)


LAYERS = (
    *("types", "observe", "metrics", "workers", "sandbox", "capture", "grading", "servers", "judging"),
    *("transports", "rollouts", "graph", "gateway", "assembly", "evaluation", "cluster", "client"),
    *("training", "view", "interop", "cli"),
)
"""The library from the bottom up: a module imports what is below it, or beside it."""

FOR_AUTHORS = LAYERS[: LAYERS.index("transports")]
"""What concrete models, agents and environments import."""


def module_names() -> list[str]:
    """Every module whose name, and those of the packages around it, have no underscore in front."""
    walked = (m.name for p in PACKAGES for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}."))
    names = {package.__name__ for package in PACKAGES}.union(walked)
    return sorted(name for name in names if "._" not in name)


def test_the_list_is_sorted_and_complete() -> None:
    exported = gym_serve.__all__
    assert exported == sorted(set(exported))
    imported = {
        name
        for name, value in vars(gym_serve).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("gym_serve.")
    }
    assert imported <= set(exported)
    assert {name for name in errors.__all__ if name[0].isupper() and not name.isupper()} <= set(exported)


@pytest.mark.parametrize("name", gym_serve.__all__)
def test_every_exported_name_is_there_and_documented(name: str) -> None:
    value = getattr(gym_serve, name)
    assert value.__doc__


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Gin"):
        gym_serve.Gin  # noqa: B018


@pytest.mark.parametrize("name", module_names())
def test_what_a_module_exports_is_there_and_documented(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(exported) == len(set(exported))
    defined = [
        public
        for public, value in vars(module).items()
        if not public.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and value.__module__ == name
    ]
    assert module.__doc__ or not (exported or defined)
    for public in {*exported, *defined}:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__, public


def test_importing_needs_no_ray() -> None:
    code = f"import sys, gym_serve, {', '.join(WITHOUT_RAY)}; print('ray' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


@cache
def trees() -> dict[str, ast.Module]:
    """The source of every module."""
    folders = {package.__name__: Path(package.__path__[0]) for package in PACKAGES}
    return {
        ".".join([name, *file.relative_to(folder).with_suffix("").parts]): ast.parse(file.read_bytes())
        for name, folder in folders.items()
        for file in folder.rglob("*.py")
    }


@cache
def imports() -> list[tuple[str, str]]:
    """Every module, and each module of this package that it imports, also inside of functions."""
    found = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(module, name) for name in names if name.startswith("gym_serve.")]
    return found


def private_parts_of_ray(tree: ast.AST) -> Iterator[str]:
    """Imports and attributes of Ray that its documentation does not have."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            top, *parts = name.split(".")
            if top in ("ray", "serve") and any(p.startswith("_") or p == "internal_kv" for p in parts):
                yield name


def test_the_private_parts_of_ray_are_used_in_one_module() -> None:
    assert "ray._private.worker" in private_parts_of_ray(ast.parse("from ray._private import worker"))
    assert {module for module, tree in trees().items() if any(private_parts_of_ray(tree))} == {
        "gym_serve.cluster.serve_compat"
    }


def test_imports_point_one_way() -> None:
    wrong = []
    for module, imported in imports():
        own, other = module.split(".")[1], imported.split(".")[1]
        if own in ("deployments", "environments"):
            fine = other in (own, *FOR_AUTHORS)
        elif own in LAYERS and other in LAYERS:
            fine = LAYERS.index(other) <= LAYERS.index(own)
        else:
            fine = other not in ("deployments", "environments") or own == "interop"
        if not fine:
            wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_there_is_no_circle_of_files() -> None:
    """A package that re-exports what is in its own files is none."""
    importers: dict[str, set[str]] = {name.removesuffix(".__init__"): set() for name, _ in imports()}
    for module, name in imports():
        own, imported = module.removesuffix(".__init__"), name
        if name not in importers:
            imported = name.rpartition(".")[0]
        if not (imported == own or (own != module and imported.startswith(f"{own}."))):
            importers[own].add(imported)
    TopologicalSorter(importers).prepare()  # raises CycleError


def test_only_the_cluster_and_what_stands_on_it_know_ray() -> None:
    """So the rest is tested, and an environment runs, without it."""
    below = LAYERS[: LAYERS.index("cluster")]
    for module, tree in trees().items():
        names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level]
        if module.split(".")[1] in below:
            assert not [name for name in names if name.split(".")[0] == "ray"], module


def test_an_environment_imports_no_other_environment() -> None:
    wrong = []
    for module, imported in imports():
        if module.split(".")[1] == imported.split(".")[1] == "environments":
            own, other = module.split(".")[2], ([*imported.split("."), ""])[2]
            if own != other:
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_the_page_of_the_architecture_names_the_layers_and_files_that_there_are() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page[page.index("| layer | holds |") :].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(reversed(LAYERS))
    named = set(re.findall(r"`([\w/]+(?:/|\.py))`", page)) - {"journey.py"}
    assert len(named) > 20
    missing = {name for name in named if not any((root / top / name).exists() for top in ("", "gym_serve"))}
    assert missing == set()
