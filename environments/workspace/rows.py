"""Rows of tasks: of Harbor's format, by a folder or the name of a data set, and of SWE-bench's form."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from gym_serve.environments.workspace.images import cache_folder
from gym_serve.environments.workspace.tasks import TESTS, first_folder
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

logger = logging.getLogger("gym_serve")

_DATA_SET = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?@[A-Za-z0-9][\w.-]*", re.ASCII)


def harbor_folder(name: str) -> Path:
    """The folder of a name: itself, or that of a data set in Harbor's registry, ``NAME@VERSION``.

    Harbor's own program fetches a data set once, into the cache of this machine. Raises InvalidRequest: there
    is no such folder, the program is not here, or it fails.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    if not _DATA_SET.fullmatch(name):
        raise InvalidRequest(f"{name} must be a folder, or a data set of Harbor's registry, NAME@VERSION")
    kept = cache_folder().with_name("harbor") / name
    if not kept.is_dir():
        _fetch(name, kept)
    return kept


def _fetch(name: str, kept: Path) -> None:
    command = ["harbor"] if shutil.which("harbor") else ["uvx", "harbor"]
    if not shutil.which(command[0]):
        raise InvalidRequest(
            f"{name} is no folder here, and Harbor's program, which would fetch it, is not installed: `uv "
            "tool install harbor`, or make a folder of it by `harbor download` on another machine"
        )
    logger.warning("fetching %s by Harbor's program into %s", name, kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=kept.parent, prefix=".") as folder:
        done = subprocess.run(
            [*command, "download", name, "--output-dir", folder, "--export"],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=False,
        )
        folders = [*Path(folder).iterdir()]
        if done.returncode or len(folders) != 1:
            raise InvalidRequest(f"Harbor's program did not fetch {name}: it ended with {done.returncode}")
        try:
            folders[0].rename(kept)
        except OSError:
            if not kept.is_dir():  # another process was not faster
                raise


class HarborRows:
    """Rows of tasks, for ``gym-serve collect harbor:FOLDER`` or ``harbor:NAME@VERSION``; ``graph`` is their
    default."""

    graph = "workspace"

    def rows(self, folder: Path | str) -> Iterator[JSON]:
        """Rows of the task that a folder is, or of the tasks in it; its name is that of `harbor_folder`."""
        folder = harbor_folder(str(folder))
        files = (folder / "task.toml", *sorted(folder.glob("*/task.toml")))
        folders = [file.parent for file in files if file.is_file()]
        if not folders:
            raise InvalidRequest(f"{folder} has no task.toml, nor has a folder in it")
        for task in folders:
            instruction = first_folder(task) / "instruction.md"
            text = instruction.read_text("utf-8") if instruction.is_file() else ""
            if not text.strip():
                raise InvalidRequest(f"{instruction} must say what to do, and is empty or not there")
            yield {
                "responses_create_params": {"input": [{"role": "user", "content": text}]},
                "task": str(task.resolve()),
            }


_TOUCHED = re.compile(r"^(?:---|\+\+\+) [ab]/(.+?)\t?$", re.MULTILINE)
_PATCH = "patch --batch --forward --silent --strip=1"
_PYTEST = Path(__file__).with_name("all_passed.py")
_RUN = (
    f"{_PATCH} <{TESTS}/test.patch && "
    f"xargs --arg-file={TESTS}/ids --delimiter='\\n' python3 {TESTS}/{_PYTEST.name}"
)


class SweBenchRows:
    """Rows of SWE-bench's form, for ``gym-serve collect swe_bench:FOLDER``: its ``rows.jsonl`` has
    ``instance_id``, ``problem_statement``, ``test_patch``, ``FAIL_TO_PASS``, ``PASS_TO_PASS`` and, for the
    agent ``oracle``, ``patch``; ``images/INSTANCE_ID`` has a Dockerfile that makes the repository at its base
    commit, in ``/testbed``."""

    graph = "workspace"

    def rows(self, folder: Path | str) -> Iterator[JSON]:
        """The rows. Raises InvalidRequest with the line of one that cannot be used."""
        file = Path(folder).resolve() / "rows.jsonl"
        if not file.is_file():
            raise InvalidRequest(f"{folder} has no rows.jsonl")
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            try:
                yield _swe_bench_row(json.loads(line), file.parent / "images")
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequest(f"{file}:{number} is no row of SWE-bench: {error!r}") from None


def _swe_bench_row(row: JSON, images: Path) -> JSON:
    """The tests that must pass are named in full, so the exit status of pytest is the outcome."""
    lists = [row["FAIL_TO_PASS"], row["PASS_TO_PASS"]]  # lists, or as in the data set, JSON of them
    fixed, kept = (json.loads(each) if isinstance(each, str) else each for each in lists)
    if strange := [name for name in (*fixed, *kept) if "::" not in name]:
        raise ValueError(f"tests must be pytest's, FILE.py::NAME, got {strange[0]!r}")
    return {
        "responses_create_params": {"input": [{"role": "user", "content": row["problem_statement"]}]},
        "image": str(images / row["instance_id"]),
        "workdir": "/testbed",
        "restored": sorted(set(_TOUCHED.findall(row["test_patch"]))),
        "tests": {
            "test.patch": row["test_patch"],
            "ids": "\n".join([*fixed, *kept]),
            _PYTEST.name: _PYTEST.read_text("utf-8"),
        },
        "test_command": _RUN,
        "must_fail": {"ids": "\n".join(fixed), "one_must_fail": ""},
        "solution": f"{_PATCH} <<'END-OF-PATCH'\n{row['patch']}\nEND-OF-PATCH\n" if "patch" in row else None,
    }


def harbor_benchmark(folder: str) -> JSON:
    """What a benchmark file would say of tasks, for ``gym-serve eval harbor:FOLDER`` or
    ``harbor:NAME@VERSION``."""
    place = harbor_folder(folder)
    return {
        "name": place.name,
        "description": f"The tasks of {folder}.",
        "license": "that of the tasks",
        "rows": {"function": f"{__name__}:harbor_rows", "arguments": {"folder": str(place)}},
        "environment": {"type": "workspace", "test_timeout": 1700},
        "agent": {"type": "simple_agent", "max_steps": 64, "seed_timeout": 1800, "verify_timeout": 1800},
        "tools": "environment",
        "metric": "share of tasks solved",
    }


def harbor_rows(split: str, *, folder: str) -> Iterator[JSON]:
    """The rows of a folder of tasks, which has no splits. They are named as the tasks' folders are."""
    for row in HarborRows().rows(folder):
        yield {**row, "benchmark_row": Path(row["task"]).name}
