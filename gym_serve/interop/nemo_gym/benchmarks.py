"""Benchmarks of NeMo Gym by name: ``gym-serve eval nemo_gym:aime24``.

The config is imported as by ``import-nemo-gym``, so the environment is our counterpart or NeMo Gym's own
server, hosted. Rows and prompt are the benchmark's own; where there are no rows yet, its prepare script makes
them, in a process of its own. NAME is found in the wheel that is installed here, or in the folder
``NEMO_GYM`` (a checkout, or the ``site-packages`` of another venv, whose Python then runs the script); a path
is a benchmark's folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gym_serve.interop.nemo_gym import import_config
from gym_serve.rollouts.expansion import PromptTemplate
from gym_serve.rollouts.rows import read_rows
from gym_serve.types.errors import InvalidRequest, NotFound, Unavailable
from gym_serve.types.requests import JSON

HOME = "NEMO_GYM"
"""Variable with the folder that has ``benchmarks``."""

_JUDGE = "judge"
_TAIL = 500  # characters of a script's error


def nemo_gym_benchmark(name: str) -> JSON:
    """What a benchmark file would say of a benchmark of NeMo Gym. Raises NotFound: there is none;
    InvalidRequest: it has no data set or no environment; GraphError: its servers cannot be imported."""
    folder = _folder(name)
    imported = import_config([folder / "config.yaml"])
    graph = imported.config["applications"][0]["args"]
    if not imported.datasets:
        raise InvalidRequest(f"{folder} has no data set")
    data = imported.datasets[0]
    agents, resources = graph.get("agents", {}), graph.get("resources", {})
    agent = dict(agents.get(data.get("agent")) or next(iter(agents.values()), {}))
    server = agent.pop("resources", None)
    if server not in resources:
        raise InvalidRequest(f"{folder}: its agent has no environment of the graph")
    agent.pop("model", None)
    models = graph.get("models", {}).keys()
    environment = {key: _with_judge(value, models) for key, value in resources[server].items()}
    if environment.get("should_use_judge") is False:
        environment.pop(_JUDGE, None)
    return {
        "name": folder.name,
        "description": f"{folder.name} of NeMo Gym.",
        "license": "that of the data set",
        "rows": {
            "function": f"{__name__}:benchmark_rows",
            "arguments": {"folder": str(folder), "data": data},
        },
        "environment": environment,
        "agent": agent,
        "repeats": data.get("repeats") or 1,
    }


def benchmark_rows(split: str, *, folder: str, data: Mapping[str, Any]) -> Iterator[JSON]:
    """The rows of a benchmark, which has one split. Raises Unavailable: they are not there, and cannot be
    prepared."""
    root = Path(folder).parents[1]
    file = root / data["rows"]
    if not file.is_file():
        _prepare(Path(folder))
    prompt = None if data.get("prompt") is None else PromptTemplate.of(root / data["prompt"])
    for where, row, problem in read_rows(file):
        if row is None:
            raise InvalidRequest(f"{where}: {problem}")
        yield row if prompt is None else prompt.apply(row)


def _folder(name: str) -> Path:
    if (Path(name) / "config.yaml").is_file():
        return Path(name).resolve()
    homes = [Path(os.environ[HOME])] if HOME in os.environ else []
    if (installed := find_spec("nemo_gym")) is not None and installed.origin is not None:
        homes.append(Path(installed.origin).parents[1])
    if not homes:
        raise NotFound(
            f"nemo_gym:{name}: NeMo Gym is not installed here; {HOME} names a folder with benchmarks"
        )
    for home in homes:
        if (home / "benchmarks" / name / "config.yaml").is_file():
            return (home / "benchmarks" / name).resolve()
    raise NotFound(f"NeMo Gym has no benchmark {name!r} in {', '.join(map(str, homes))}")


def _with_judge(value: Any, models: Any) -> Any:
    """A setting, with the caller's judge in place of a model of the config."""
    return _JUDGE if isinstance(value, str) and value in models else value


def _prepare(folder: Path) -> None:
    script, root = folder / "prepare.py", folder.parents[1]
    if not script.is_file():
        raise Unavailable(f"{folder} has neither rows nor a script that prepares them")
    own = [parent / "bin" / "python" for parent in folder.parents]  # of the venv that the folder is in
    python = next((str(path) for path in own if path.exists()), sys.executable)
    done = subprocess.run(
        [python, str(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Unavailable(f"{script} failed: {done.stderr.strip()[-_TAIL:]}")
