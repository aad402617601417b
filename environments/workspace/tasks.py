"""`Task`: what an episode of `Workspace` needs, from a row or from a folder in Harbor's format (1.4).

Tests and solution are bytes of this process: they enter a box when it is their turn, and not before.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    SecretStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from typing_extensions import Self

from gym_serve.environments.workspace.health import HealthCheck
from gym_serve.environments.workspace.images import DOCKERFILE, archive_of
from gym_serve.sandbox import SandboxSpec
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON, problems_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger("gym_serve")

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
PUBLISHED = f"{LOGS}/artifacts"  # folder whose files go to the tests of every task of Harbor

HARNESSES = Path(__file__).with_name("harnesses")
"""Images of programs that work in a box, by name."""

Texts = dict[str, str]


class HarnessBox(BaseModel):
    """What the program of a `HarnessAgent` needs of the agent's box; the box of the tests has none of it."""

    image: str | None = None
    """Folder with a Dockerfile, on the machine of the environment, or the name of one in ``harnesses``: the
    files that it makes are in the box, over those of the task."""

    def folder(self) -> Path | None:
        """The folder of the image. Raises InvalidRequest: there is none."""
        if self.image is None:
            return None
        folder = Path(self.image) if "/" in self.image else HARNESSES / self.image
        if not (folder / DOCKERFILE).is_file():
            names = ", ".join(sorted(path.name for path in HARNESSES.iterdir()))
            raise InvalidRequest(
                f"image must be a folder with a {DOCKERFILE}, or one of {names}; got {self.image!r}"
            )
        return folder


class WorkspaceRow(BaseModel):
    """The row's own keys: a task of its own, or the folder of one."""

    task: str | None = None
    """Folder of a task in Harbor's format, on the machine of the environment; all other keys are its then."""
    files: Texts = {}  # files of the work folder at the beginning, by name
    image: str | None = None  # folder with a Dockerfile, on the machine of the environment
    workdir: Annotated[str, Field(pattern=r"^/.")] = "/app"
    """The work folder. All that is in it at the end is there when the tests run, and nothing else."""
    restored: list[str] = []
    """Files of the work folder, by name, that the tests see as the image has them, whatever became of them in
    the agent's box; those that it lacks are removed."""
    tests: Texts = {}  # hidden files of the folder ``/tests``, by name
    test_command: str | None = None  # runs in the work folder of a fresh box; exit status 0 is a reward of 1
    must_fail: Texts = {}
    """Further hidden tests that fail whatever the agent wrote: if the command succeeds with them too, the
    agent's code has forged its status, and the reward is 0."""
    solution: str | None = None
    """A script for `OracleAgent`, run in the work folder; the policy never sees it."""
    oracle: bool = False  # set by `OracleAgent`: the session may run the solution
    harness_box: HarnessBox | None = None  # set by `HarnessAgent`: what its program needs of the box

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.task is None) == (self.test_command is None):
            raise ValueError("set task, or test_command (with tests), one of the two")
        return self


@dataclass(frozen=True)
class Task:
    """A task: the agent's box, archives of its work folder, of ``/tests`` (none if the image of the tests has
    them), of tests that ``must_fail`` and of ``/solution``. The tests see the ``carried`` folders of the
    agent's box, and its work folder if ``carries_workdir``. Their command writes a reward, or its exit status
    is one.
    """

    spec: SandboxSpec
    test_command: str
    tests: tuple[bytes, ...] = ()
    reads_reward: bool = False
    must_fail: bytes | None = None
    image: Path | None = None
    test_image: Path | None = None
    agent_timeout: float = math.inf
    build_timeout: float = 600.0
    files: bytes | None = None
    carried: tuple[str, ...] = ()
    carries_workdir: bool = True
    restored: tuple[str, ...] = ()
    health: HealthCheck | None = None
    test_health: HealthCheck | None = None
    test_spec: SandboxSpec | None = None
    test_env: dict[str, str] = field(default_factory=dict)
    test_user: str | int | None = None
    test_timeout: float = 600.0
    solution: bytes | None = None
    solution_env: dict[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    final: bool = False  # whether the last step's reward is that of all, in place of the mean


@dataclass(frozen=True)
class Step:
    """A step of a task of Harbor: what the agent is told, what its box gets before that, the tests and the
    solution of a task of its own, and the rewards below which no further step follows."""

    instruction: str
    files: bytes | None
    setup: bool
    health: HealthCheck | None
    task: Task
    least: Mapping[str, float]


def task_of(row: WorkspaceRow, variables: Mapping[str, SecretStr] | None = None) -> Task:
    """The task of a row, which may read ``variables``. Raises InvalidRequest: its folder is no task,
    or asks for what is not supported, or for a variable that is not there."""
    if row.task is not None:
        return _of_folder(Path(row.task), variables or {}, oracle=row.oracle)
    assert row.test_command is not None
    return Task(
        spec=SandboxSpec(workdir=row.workdir),
        image=None if row.image is None else Path(row.image),
        files=archive_of(row.files) if row.files else None,
        tests=(archive_of(row.tests),),
        test_command=row.test_command,
        must_fail=archive_of(row.must_fail) if row.must_fail else None,
        restored=tuple(row.restored),
        solution=None if row.solution is None else archive_of({"solve.sh": row.solution}),
    )


_Nothing = Annotated[list[Any], Field(max_length=0)]
_Path = Annotated[str, Field(pattern=r"^/")]
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_NETWORKS = {"no-network": "none", "allowlist": "allowlist", "public": "full"}
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024}


def _mebibytes(size: object) -> object:
    """The old form of a size, ``2G``."""
    text = str(size).strip().upper()
    return round(float(text[:-1]) * _UNITS[text[-1]]) if text[-1:] in _UNITS else size


def _resolved(text: str, info: ValidationInfo) -> str:
    """The value of a variable of a task: ``${NAME}`` and ``${NAME:-default}`` are what the context has."""
    match = _VARIABLE.fullmatch(text)
    if match is None or info.context is None:
        return text
    name, default = match.groups()
    if name in info.context:
        return str(info.context[name].get_secret_value())
    if default is None:
        raise ValueError(f"it reads {name}, which the setting `variables` of the environment must have")
    return str(default)


_Value = Annotated[str, AfterValidator(_resolved)]
_Size = Annotated[int | None, BeforeValidator(_mebibytes)]


class _Phase(BaseModel):
    timeout_sec: PositiveFloat | None = None
    user: str | int | None = None
    env: dict[str, _Value] = {}
    network_mode: str | None = None
    allowed_hosts: list[str] = []


class _Environment(BaseModel):
    build_timeout_sec: PositiveFloat = 600.0
    network_mode: str | None = None
    allowed_hosts: list[str] = []
    allow_internet: bool = True  # the old form of a mode
    cpus: float | None = None
    memory_mb: _Size = Field(default=None, validation_alias=AliasChoices("memory_mb", "memory"))
    storage_mb: _Size = Field(default=None, validation_alias=AliasChoices("storage_mb", "storage"))
    gpus: int | None = None
    tpu: None = None
    env: dict[str, _Value] = {}
    workdir: str | None = None
    os: str = "linux"
    docker_image: str | None = None
    healthcheck: HealthCheck | None = None
    mcp_servers: _Nothing = []
    gpu_types: Any = None  # not read, as without a GPU
    skills_dir: Any = None  # not read

    def spec(self, phase: _Phase) -> SandboxSpec:
        """The box that it asks for, with the network of a phase."""
        mode = phase.network_mode or self.network_mode or ("public" if self.allow_internet else "no-network")
        if self.gpus or self.os.lower() != "linux":
            raise ValueError("GPUs and Windows are not supported")
        if mode not in _NETWORKS:
            raise ValueError(f"network_mode must be one of {', '.join(_NETWORKS)}, got {mode!r}")
        settings: JSON = {
            "network": _NETWORKS[mode],
            "allowed_hosts": self.allowed_hosts if phase.network_mode is None else phase.allowed_hosts,
            "image": self.docker_image,
            "env": self.env,
            "workdir": self.workdir,
            "cpus": None if self.cpus is None else max(1, round(self.cpus)),
            "memory_mb": self.memory_mb,
            "disk_mb": self.storage_mb,
        }
        return SandboxSpec(**{key: value for key, value in settings.items() if value is not None})


class _Verifier(_Phase):
    timeout_sec: PositiveFloat = 600.0
    environment_mode: str | None = None
    environment: _Environment | None = None
    collect: _Nothing = []


class _Artifact(BaseModel):
    model_config = ConfigDict(extra="forbid")

    source: _Path
    destination: str | None = None  # a place on the machine that collects it, which is not of interest here


class _StepPhase(BaseModel):
    model_config = ConfigDict(extra="forbid")

    timeout_sec: PositiveFloat | None = None


class _Step(BaseModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    agent: _StepPhase = _StepPhase()
    verifier: _Verifier = _Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthCheck | None = None
    artifacts: list[_Path | _Artifact] = []


class _Config(BaseModel):
    """A file ``task.toml``. Harbor ignores keys that it does not know; here `_data_of` warns of them."""

    schema_version: Any = None  # not read, as what follows
    version: Any = None
    task: Any = None
    metadata: Any = None
    source: Any = None

    environment: _Environment = _Environment()
    agent: _Phase = _Phase()
    verifier: _Verifier = _Verifier()
    solution: _Phase = _Phase()
    artifacts: list[_Path | _Artifact] = []
    steps: list[_Step] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None


def _of_folder(folder: Path, variables: Mapping[str, SecretStr], *, oracle: bool) -> Task:
    data = _data_of(folder)
    if not oracle:
        data.pop("solution", None)  # nobody else needs its variables
    try:
        config = _Config.model_validate(data, context=variables)
        if not config.steps:
            return _one(folder, config)
        steps = tuple(_step(folder, config, step) for step in config.steps)
    except (OSError, ValueError) as error:
        raise _no_task(folder, error) from None
    final = config.multi_step_reward_strategy == "final"
    return replace(steps[0].task, steps=steps, final=final)


def _data_of(folder: Path) -> JSON:
    file = folder / "task.toml"
    try:
        data = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _no_task(folder, error) from None
    if unknown := tuple(_unknown_keys(_Config, data)):
        _warn(file, unknown)
    return data


def _unknown_keys(model: type[BaseModel], table: JSON, path: str = "") -> Iterator[str]:
    """The keys of a table, and of those in it, that ``model`` does not have, with the nearest it has."""
    annotations = {
        str(key): field.annotation
        for name, field in model.model_fields.items()
        for key in getattr(field.validation_alias, "choices", [name])
    }
    for key, value in table.items():
        if key not in annotations:
            near = difflib.get_close_matches(key, annotations, n=1)
            yield f"{path}{key}" + (f" (did you mean {near[0]}?)" if near else "")
            continue
        tables = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
        for inner in _models_in(annotations[key]):
            if inner.model_config.get("extra") != "forbid":  # those are refused
                yield from (text for each in tables for text in _unknown_keys(inner, each, f"{path}{key}."))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


@lru_cache(maxsize=10_000)
def _warn(file: Path, unknown: tuple[str, ...]) -> None:
    """Say once, not in every episode, what of a file is ignored."""
    logger.warning("%s: unknown keys are ignored: %s", file, ", ".join(unknown))


def first_folder(folder: Path) -> Path:
    """The folder of the first instruction of a task."""
    data = _data_of(folder)
    if not data.get("steps"):
        return folder
    try:
        return folder / "steps" / _Config.model_validate(data).steps[0].name
    except ValueError as error:
        raise _no_task(folder, error) from None


def _no_task(folder: Path, error: Exception) -> InvalidRequest:
    text = "; ".join(problems_of(error, "it")) if isinstance(error, ValidationError) else error
    where = folder if isinstance(error, OSError) else folder / "task.toml"
    return InvalidRequest(f"{where} is no task that can be run here: {text}")


def _step(folder: Path, config: _Config, step: _Step) -> Step:
    own = folder / "steps" / step.name
    chosen = step.verifier.model_fields_set
    own_place = step.verifier.environment_mode == "shared" or step.verifier.environment is not None
    inherited = () if own_place else ("environment_mode", "environment")
    network = () if "network_mode" in chosen else ("network_mode", "allowed_hosts")
    update = {
        name: getattr(config.verifier, name) for name in (*inherited, *network, "user") if name not in chosen
    }
    update["env"] = {**config.verifier.env, **step.verifier.env}
    verifier = step.verifier.model_copy(update=update)
    artifacts = [*config.artifacts, *step.artifacts]
    agent = config.agent.model_copy(update=step.agent.model_dump(exclude_none=True))
    whole = config.model_copy(update={"agent": agent, "verifier": verifier, "artifacts": artifacts})
    least = {"reward": step.min_reward} if isinstance(step.min_reward, float) else step.min_reward
    files = own / "workdir"
    return Step(
        instruction=(own / "instruction.md").read_text("utf-8"),
        files=archive_of(files) if files.is_dir() else None,
        setup=(files / "setup.sh").is_file(),
        health=step.healthcheck,
        task=_one(folder, whole, own),
        least=least or {},
    )


def _one(folder: Path, config: _Config, step: Path | None = None) -> Task:
    """The task of a folder, or of a step of it."""
    spec = config.environment.spec(config.agent)
    verifier = config.verifier
    separate = verifier.environment_mode == "separate" or verifier.environment is not None
    test_spec = (verifier.environment or config.environment).spec(verifier)
    environment = folder / "environment"
    if compose := [*environment.glob("docker-compose.y*ml")]:
        raise OSError(f"{compose[0]}: several containers are not supported")
    places = [folder, *([] if step is None else [step])]
    tests = [place / "tests" for place in places if (place / "tests").is_dir()]
    if not any((place / "test.sh").is_file() for place in tests):
        raise FileNotFoundError("it has no tests/test.sh")
    for script in (place / "test.sh" for place in tests if (place / "test.sh").is_file()):
        with script.open("rb") as file:
            if file.readline().endswith(b"\r\n"):
                raise OSError(f"{script}:1 ends with CR LF, as on Windows, so no shell would run it")
    own = separate and (tests[-1] / DOCKERFILE).is_file()
    solved = places[-1] / "solution" / "solve.sh"
    sources = [entry if isinstance(entry, str) else entry.source for entry in config.artifacts]
    image = environment if (environment / DOCKERFILE).is_file() else None
    return Task(
        spec=spec.model_copy(update={"user": config.agent.user}),
        image=image,
        test_image=tests[-1] if own else image,
        agent_timeout=config.agent.timeout_sec or math.inf,
        build_timeout=config.environment.build_timeout_sec,
        carried=tuple(dict.fromkeys([PUBLISHED, *sources])),
        carries_workdir=not separate,
        tests=() if own else tuple(map(archive_of, tests)),
        test_command=f"chmod +x {TESTS}/test.sh; {TESTS}/test.sh",
        reads_reward=True,
        health=config.environment.healthcheck,
        test_health=None if separate else config.environment.healthcheck,
        test_spec=test_spec,
        test_env=verifier.env,
        test_user=verifier.user,
        test_timeout=verifier.timeout_sec,
        solution=archive_of(solved.parent) if solved.is_file() else None,
        solution_env=config.solution.env,
    )
