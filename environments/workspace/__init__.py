"""`Workspace`: a task in a box: a shell, files, and hidden tests on a fresh copy of what the agent left.

When the agent has ended, the files of its work folder are taken out as bytes and its box is closed, with
every process in it. A fresh box gets these files and the tests: nothing else that the agent did is there. The
reward is the exit status of the tests, which the kernel reports, or what a task of Harbor wrote in a folder
that was empty before, read when no other process is left. Files that are too many, or tests that do not end,
are a 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, SecretStr, TypeAdapter

from gym_serve.environments.workspace.health import HealthCheck
from gym_serve.environments.workspace.images import Images, cache_folder, sweep
from gym_serve.environments.workspace.tasks import LOGS, SOLUTION, TESTS, Step, Task, WorkspaceRow, task_of
from gym_serve.sandbox import (
    BoxPool,
    ExecResult,
    Listens,
    Sandbox,
    SandboxRefused,
    SandboxSpec,
    find_provider,
    provider_problems,
)
from gym_serve.sandbox.live import LiveBoxes
from gym_serve.sandbox.relay import ModelRelay, model_variables
from gym_serve.servers import Operation, ResourcesServer, Verdict, tool
from gym_serve.servers.context import current
from gym_serve.servers.tools import TASK_STEPS
from gym_serve.servers.transport import Reply
from gym_serve.types.errors import Forbidden, InvalidRequest, PolicyDeadline, ToolFailed, Unavailable
from gym_serve.types.requests import parse

logger = logging.getLogger("gym_serve")

_SHOWN = 4000
_REASON = 200
_REWARDS = 1 << 16
_LARGEST_REWARD = 1e150  # the sum of so many as a file can hold is finite, too
_FOLDERS = (f"{LOGS}/agent", f"{LOGS}/verifier", f"{LOGS}/artifacts")
_STATE = "/run/shell"
_SHELL = f"""
[ -f {_STATE} ] && . {_STATE} 2>/dev/null
_keep() {{
  declare -p | grep -v "^declare -[a-zA-Z]*r"
  declare -f
  alias
  printf "cd %q\\n" "$PWD"
}}
trap '_keep > {_STATE} 2>/dev/null' EXIT
eval "$1"
"""
_TAKE_SECONDS = 40.0  # for what an agent left: its processes may delay each look at it
_SETUP_SECONDS = 600.0
_SHARE = 0.8  # of the time that is left for a step, after its tests, that the next one may take to be set up
_ANSWERS = ("reward.json", "reward.txt")
_SIGNALLED = range(129, 193)  # exit statuses of a shell whose program a signal has ended
_HARNESS_OUTPUT = 1 << 16
_VERDICT_SECONDS = 30.0  # for the verdict on tests that were killed at their time limit
_AGENTS_TIME = "timeout_sec of the task's agent"
_ANSWER_SECONDS = 2.0  # for the answer on a program that was killed at its time limit


class CommandOutput(BaseModel):
    """What `Workspace.bash` answers."""

    output: str  # what the command wrote; of a long text, the start and the end
    exit_status: int
    note: str | None = None  # what became of it, if it did not end by itself


class WorkspaceVerdict(Verdict):
    """The reward and what it was given for."""

    rewards: dict[str, float] | None = None  # all rewards that a task of Harbor wrote
    exit_status: int | None = None  # exit status of the tests; None if they did not end
    test_output: str = ""  # the end of what they wrote


class _Carried(NamedTuple):
    """What an agent left: a folder as an archive, or a file, which has a mode."""

    data: bytes
    mode: int | None = None


class HarnessRun(BaseModel):
    """A program to run in the box of a session, and the model that it may ask."""

    command: list[str] = Field(min_length=1)
    input: str = ""
    """What it reads on its standard input."""
    env: dict[str, str] = {}
    """Variables beside those of `model_variables`."""
    model_url: str
    """Address of the model from here; the program is told another one, which leads to it."""
    model_token: SecretStr
    """What the model asks for; the program does not learn it."""


_HARNESS_RUN: TypeAdapter[HarnessRun] = TypeAdapter(HarnessRun)


class Workspace(ResourcesServer):
    """A task in a box: reward 1.0 if its hidden tests succeed on what the agent left, else 0.0."""

    reverify_mode: ClassVar[Literal["unsupported"]] = "unsupported"
    Row = WorkspaceRow

    class Config(ResourcesServer.Config):
        sandbox: str = "bubblewrap"
        """Provider of the boxes: ``bubblewrap``, ``docker``, or an entry point's."""
        image: str | None = None
        """OCI image of tasks without a Dockerfile or an image of their own, for a provider that needs one."""
        network: Literal["none", "model", "full"] | None = None
        """Network of the agent's boxes, whatever a task asks for: ``model`` for an agent's program in a box
        that shall reach nothing else. The boxes of the tests keep that of the task."""
        variables: dict[str, SecretStr] = Field(default_factory=dict)
        """What ``${NAME}`` in the ``env`` of a task of Harbor may read, by name. A task reads nothing else of
        this machine: whoever wrote it chooses which box gets a value, and shows the agent what it puts into
        ``environment.env``."""
        command_timeout: PositiveFloat = 100.0
        """Seconds that a command of the agent may take; less than the agent's ``tool_timeout``."""
        max_output_bytes: PositiveInt = 30_000
        """Bytes of a command's output, and of a file, that a tool returns."""
        max_carried_mb: PositiveInt = 64
        """Size of the files that the tests see, in MiB; more are a reward of 0."""
        test_timeout: PositiveFloat = 240.0
        """Seconds that the tests may take, those of Harbor's tasks included, which have a limit of their own;
        with ``must_fail`` twice. Before the agent's ``verify_timeout`` is over they are killed, too: a 0."""
        max_boxes: int = Field(64, ge=2)
        """Boxes that are live at the same time in a replica; others wait. Read at the start only, as all of
        these settings of boxes."""
        warm_boxes: int = Field(8, ge=0)
        """Of these, the most that are kept ready for episodes to come, by how often their kind was taken in
        the last half minute; 0 starts each box when it is asked for."""
        max_layers_gb: PositiveFloat = 50.0
        """Size of the built layers of images that are kept on this machine (bubblewrap). At its start, a
        replica removes those that were used the longest ago, but for those of the last day."""
        box_resource: str | None = None
        """Ray's custom resource of which a replica takes ``max_boxes``, so that Serve places replicas where
        boxes fit: nodes that have it say so (``ray start --resources='{"boxes": 256}'``). None for none."""

    class Session:
        def __init__(self) -> None:
            self.task: Task | None = None
            self.box: Sandbox | None = None
            self.spec = SandboxSpec()
            self.oracle = False
            self.carried: dict[str, _Carried] | SandboxRefused | None = None  # by path, after its end
            self.done: list[WorkspaceVerdict] = []  # of its steps, those that were tested
            self.count = 0  # of the steps that its reward is of
            self.lock = asyncio.Lock()
            self.deadline = math.inf  # of the agent, by `time.monotonic`

        def time_left(self, limit: float) -> float:
            """Seconds that what the agent starts may take, of a limit."""
            return min(limit, max(self.deadline - time.monotonic(), 0.1))

    config: Config

    @classmethod
    def deployment_options(cls, settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        config = cls.Config(**settings)
        if config.box_resource is None:
            return {}
        return {"resources": {**(options.get("resources") or {}), config.box_resource: config.max_boxes}}

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        yield from provider_problems(config.sandbox)

    async def start(self) -> None:
        self._provider = await asyncio.to_thread(find_provider, self.config.sandbox)
        self._images = Images(self._provider, cache_folder())
        await asyncio.to_thread(sweep, cache_folder(), self.config.max_layers_gb * 1e9)
        self._pool = self.manage(
            BoxPool(self._provider, most=self.config.max_boxes, warm=self.config.warm_boxes)
        )
        self._live = self.manage(LiveBoxes(environment=self.name, provider=self.config.sandbox))
        await super().start()

    def operations(self) -> dict[str, Operation]:
        solve = Operation(self._solve, "Run the row's own solution", None, {"type": "object"})
        about = "Run the program of an agent of this graph in the session's box"
        harness = Operation(self._run_harness, about, HarnessRun.model_json_schema(), {"type": "object"})
        step = Operation(
            self._next_step, "Test a step of the task, and begin the next one", None, {"type": "object"}
        )
        return {**super().operations(), "solve": solve, "harness": harness, "next_step": step}

    async def seed(self, row: WorkspaceRow, session: Session) -> dict[str, Any] | None:
        session.task = task = await asyncio.to_thread(task_of, row, self.config.variables)
        session.oracle, session.count = row.oracle, len(task.steps)
        session.spec = await self._images.spec(task.image, self._of_image(task.spec), task.build_timeout)
        spec = session.spec
        if row.harness_box is not None:
            spec = await self._images.spec(row.harness_box.folder(), spec, task.build_timeout)
            if spec.network == "none":
                spec = spec.model_copy(update={"network": "model"})
        if self.config.network is not None:
            spec = spec.model_copy(update={"network": self.config.network, "allowed_hosts": ()})
        if task.carries_workdir and spec.workdir == "/":
            raise InvalidRequest(
                f"{row.task or row.image}: the work folder is /, too much for the tests to take "
                "over: it needs a WORKDIR in its Dockerfile, or a workdir in task.toml"
            )
        session.box = await self._box(spec, task, name=row.task)
        session.deadline = time.monotonic() + task.agent_timeout
        if not task.steps:
            return None
        if (problem := await _begin(session.box, session.spec, task.steps[0])) is not None:
            raise Unavailable(f"the first step of the task cannot be set up: {problem}")
        return {TASK_STEPS: len(task.steps)}

    def _of_image(self, spec: SandboxSpec) -> SandboxSpec:
        return spec if spec.image else spec.model_copy(update={"image": self.config.image})

    async def _box(
        self, spec: SandboxSpec, task: Task, use: str = "agent", name: str | None = None
    ) -> Sandbox:
        box = await self._pool.take(spec.model_copy(update={"folders": _FOLDERS}))
        self._live.add(box, use=use, task=name, rollout=current().affinity)
        try:
            if (check := task.health if use == "agent" else task.test_health) is not None:
                await _heal(box, check, 0 if task.spec.user is not None else None)
            if task.files is not None:
                await box.put(spec.workdir, task.files)
        except BaseException:
            await self._end(box)
            raise
        return box

    async def _end(self, box: Sandbox) -> None:
        self._live.remove(box)
        await self._pool.end(box)

    async def close(self, session: Session) -> None:
        box, session.box = session.box, None
        if box is not None:
            await self._end(box)

    # Tools

    @tool
    async def bash(self, command: str, session: Session) -> CommandOutput:
        """Run a command in a shell, first in the work folder. Directory, variables and functions are kept for
        later commands, and processes in the background go on.

        Args:
            command: The command, for bash.
        """
        box, words = _tool_box(session), ["-c", _SHELL, "bash", command]
        async with session.lock:
            limit = session.time_left(self.config.command_timeout)
            with _refusals():
                done = await box.exec(
                    ["/bin/bash", *words], timeout=limit, output_limit=self.config.max_output_bytes
                )
        note = {
            "timeout": f"killed after {limit:g} s; directory and variables are those of before",
            "memory": "killed: it took more memory than there is",
        }.get(done.ended)
        return CommandOutput(output=done.text, exit_status=done.status, note=note)

    @tool
    async def read_file(self, path: str, session: Session) -> str:
        """Read a text file.

        Args:
            path: Its path, from the work folder.
        """
        with _refusals():
            data = await _tool_box(session).read(path, limit=self.config.max_output_bytes)
        return data.decode("utf-8", "replace")

    @tool
    async def write_file(self, path: str, content: str, session: Session) -> str:
        """Write a text file; folders are made, and a file of this name is replaced.

        Args:
            path: Its path, from the work folder.
            content: The whole text.
        """
        with _refusals():
            await _tool_box(session).write(path, content.encode("utf-8", "surrogatepass"))
        return f"wrote {path}"

    @tool
    async def edit(self, path: str, old: str, new: str, session: Session) -> str:
        """Replace a text that occurs once in a file.

        Args:
            path: Its path, from the work folder.
            old: The text, with enough around it to be there once.
            new: What takes its place.
        """
        box = _tool_box(session)
        async with session.lock:
            with _refusals():
                text = (await box.read(path)).decode("utf-8", "surrogateescape")
                if (count := text.count(old)) != 1 or not old:
                    raise ToolFailed(f"`old` must occur once in {path}, and occurs {count} times")
                mode = (await box.exec(["stat", "-c", "%a", path], timeout=60)).stdout
                changed = text.replace(old, new).encode("utf-8", "surrogateescape")
                await box.write(path, changed, mode=int(mode or b"644", 8))
        return f"edited {path}"

    # The solution

    async def _solve(self, body: Any) -> Reply:
        async def solve(call: Any) -> Reply:
            session: Workspace.Session = call.session.state
            box, task = _box_of(session), session.task
            if not session.oracle:
                raise Forbidden("only the session of an oracle may run the solution")
            if task is not None and task.steps:
                task = task.steps[len(session.done)].task
            if task is None or task.solution is None:
                raise InvalidRequest("the task has no solution (of Harbor's, solution/solve.sh)")
            await box.put(SOLUTION, task.solution)
            script = f"{SOLUTION}/solve.sh"
            done = await box.exec(
                f"chmod +x {script}; read -r first <{script}; "
                f"case $first in '#!'*) exec {script};; esac; exec bash {script}",
                timeout=session.time_left(current().timeout() or 600.0),
                env={"DEBIAN_FRONTEND": "noninteractive", **task.solution_env},
            )
            return Reply.of({"exit_status": done.status, "output": done.text[-_SHOWN:], "ended": done.ended})

        session = current().session
        if session is None:
            raise InvalidRequest("a solution is run in a session")
        return await self.in_session(session, solve)

    # The program of an agent

    async def _run_harness(self, body: Any) -> Reply:
        wanted: HarnessRun = parse(_HARNESS_RUN, body, "request")
        session = current().session
        if session is None or current().affinity is None:  # the request says where to connect to
            raise Forbidden("only an agent of this graph may run a program in the box of its session")

        async def run(call: Any) -> Reply:
            state: Workspace.Session = call.session.state
            box, left = _box_of(state), current().timeout() or 600.0
            if not isinstance(box, Listens):
                raise InvalidRequest(f"boxes of {self.config.sandbox} have no way to a model")
            try:
                listener = await box.listen()
                async with ModelRelay(listener, wanted.model_url, wanted.model_token) as relay:
                    done = await box.exec(
                        ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *wanted.command],
                        timeout=state.time_left(max(left - _ANSWER_SECONDS, 0.9 * left)),
                        env={**model_variables(relay.base_url, relay.key), **wanted.env},
                        stdin=wanted.input.encode("utf-8", "surrogatepass"),
                        output_limit=_HARNESS_OUTPUT,
                    )
            except SandboxRefused as error:
                raise InvalidRequest(f"the harness cannot be started: {error}") from None
            if relay.failure is not None:
                raise Unavailable(relay.failure)
            late = state.deadline < time.monotonic()
            answer = {"exit_status": done.status, "output": done.text, "ended": done.ended}
            return Reply.of({**answer, "limit": _AGENTS_TIME} if late else answer)

        return await self.in_session(session, run)

    # The tests

    async def verify(self, session: Session) -> WorkspaceVerdict:
        """Run the tests in a fresh box, on what the agent left."""
        task = session.task
        if task is None:
            raise InvalidRequest("the session was not seeded, so there is nothing to test")
        if not task.steps:
            return await self._last_verdict(task, session)
        if session.box is not None or session.carried is not None:  # the agent has ended within a step
            step = task.steps[len(session.done)]
            session.done.append(await self._last_verdict(step.task, session))
            session.carried = None
        return _verdict_of_steps(task, session)

    async def _last_verdict(self, task: Task, session: Session) -> WorkspaceVerdict:
        if session.carried is None:
            try:
                session.carried = await self._taken(task, session)
            except SandboxRefused as error:
                session.carried = error
            finally:
                await self.close(session)
        if isinstance(session.carried, SandboxRefused):
            return _not_taken_over(session.carried)
        return await self._judged(task, session.spec, session.carried)

    async def _judged(self, task: Task, spec: SandboxSpec, files: dict[str, _Carried]) -> WorkspaceVerdict:
        if task.must_fail is None:
            return await self._tested(task, spec, files, *task.tests)
        verdict = await self._tested(task, spec, files, *task.tests, runs=2)
        if verdict.reward > 0:
            forged = await self._tested(task, spec, files, *task.tests, task.must_fail)
            if not forged.exit_status:
                outcome = f"do not end: {forged.reason}" if forged.exit_status is None else "succeed as well"
                reason = f"tests that must fail {outcome}; the agent's code may forge their outcome"
                return verdict.model_copy(update={"reward": 0.0, "reason": reason})
        return verdict

    async def _next_step(self, body: Any) -> Reply:
        async def advance(call: Any) -> Reply:
            session: Workspace.Session = call.session.state
            task, box = session.task, session.box
            if task is None or not task.steps or box is None:
                raise InvalidRequest("there is no step to go on from: the task has none, or is over")
            step, rest = task.steps[len(session.done)], task.steps[len(session.done) + 1 :]
            try:
                verdict = await self._judged(step.task, session.spec, await self._taken(step.task, session))
            except SandboxRefused as error:
                verdict = _not_taken_over(error)
            session.done.append(verdict)
            rewards = verdict.rewards or {"reward": verdict.reward}
            if any(rewards.get(name, -math.inf) < least for name, least in step.least.items()):
                session.count = len(session.done)
            elif rest and await _begin_in_time(box, session.spec, rest[0]) is None:
                session.deadline = time.monotonic() + rest[0].task.agent_timeout
                return Reply.of({"instruction": rest[0].instruction})
            await self.close(session)
            return Reply.of({"instruction": None})

        session = current().session
        if session is None:
            raise InvalidRequest("a step is one of a session")
        return await self.in_session(session, advance)

    async def _taken(self, task: Task, session: Session) -> dict[str, _Carried]:
        paths = [*([session.spec.workdir] if task.carries_workdir else []), *task.carried]
        try:
            return await asyncio.wait_for(self._carried(_box_of(session), paths), _TAKE_SECONDS)
        except asyncio.TimeoutError:
            raise SandboxRefused(f"it took more than {_TAKE_SECONDS:g} s") from None

    async def _carried(self, box: Sandbox, paths: list[str]) -> dict[str, _Carried]:
        limit = self.config.max_carried_mb << 20
        carried: dict[str, _Carried] = {}
        for path in paths:
            try:
                carried[path] = each = await _carried_at(box, path, limit)
                limit -= len(each.data)
            except SandboxRefused:
                there = await box.exec(["test", "-e", path], timeout=60, cwd="/", user=0)
                if there.ok or there.ended != "exit" or path == paths[0]:
                    raise
        return carried

    async def _tested(
        self, task: Task, spec: SandboxSpec, files: dict[str, _Carried], *tests: bytes, runs: int = 1
    ) -> WorkspaceVerdict:
        """The verdict of tests that run in a fresh box, the first of so many ``runs``."""
        if task.test_spec is not None:
            own = self._of_image(task.test_spec)
            spec = await self._images.spec(task.test_image, own, task.build_timeout)
        box = await self._box(spec, task, "tests")
        try:
            try:
                original = await self._of_image_only(box, spec, task)
                for path, each in files.items():
                    if each.mode is None:
                        await box.put(path, each.data, clear=True)
                    else:
                        await box.write(path, each.data, mode=each.mode)
                if task.restored:
                    await box.exec(["rm", "-rf", "--", *task.restored], timeout=60, user=0)
                    await box.put(spec.workdir, original)
            except SandboxRefused as error:
                return _not_taken_over(error)
            for archive in tests:
                await box.put(TESTS, archive)
            try:
                done = await box.exec(
                    task.test_command,
                    timeout=min(task.test_timeout, self.config.test_timeout, _time_left() / runs),
                    env=task.test_env,
                    user=task.test_user,
                )
            except SandboxRefused as error:
                return WorkspaceVerdict(reward=0.0, reason=f"the tests do not start: {error}")
            return await self._verdict(task, box, done)
        finally:
            await self._end(box)

    async def _of_image_only(self, box: Sandbox, spec: SandboxSpec, task: Task) -> bytes:
        """An archive of the `Task.restored` files of a fresh box: those that there are."""
        if not task.restored:
            return b""
        command = ["tar", "--create", "--ignore-failed-read", "--warning=none", "--", *task.restored]
        limit = self.config.max_carried_mb << 20
        return (await box.exec(command, timeout=60, output_limit=limit, user=0)).stdout

    async def _verdict(self, task: Task, box: Sandbox, done: ExecResult) -> WorkspaceVerdict:
        shown = done.text[-_SHOWN:]
        if done.ended != "exit":
            killed = f"the tests were killed: {done.ended}"
            return WorkspaceVerdict(reward=0.0, reason=killed, test_output=shown)
        details: Any = {"exit_status": done.status, "test_output": shown}
        if not task.reads_reward:
            reason = None if done.ok else f"the tests ended with status {done.status}: {done.text[-_REASON:]}"
            return WorkspaceVerdict(reward=float(done.ok), reason=reason, **details)
        if (problem := await _not_ended(box)) is not None:
            return WorkspaceVerdict(
                reward=0.0, reason=f"the tests' reward cannot be read: {problem}", **details
            )
        answers: list[tuple[float, str, dict[str, float]]] = []
        for name in _ANSWERS:
            try:
                rewards = _rewards(name, await box.read(f"{LOGS}/verifier/{name}", limit=_REWARDS))
            except SandboxRefused:
                continue
            except (ValueError, RecursionError) as error:
                return WorkspaceVerdict(reward=0.0, reason=f"{name} holds no reward: {error}", **details)
            answers.append((rewards.get("reward", sum(rewards.values()) / len(rewards)), name, rewards))
        if not answers or done.status < 0 or done.status in _SIGNALLED:
            lack = "" if answers else f", and wrote no {' or '.join(_ANSWERS)}"
            ended = f"the tests ended with status {done.status}{lack}: {done.text[-_REASON:]}"
            return WorkspaceVerdict(reward=0.0, reason=ended, **details)
        reward, name, rewards = min(answers)  # a program that the tests ran may have written one of the two
        reason = None if reward >= 1 else f"the tests' {name} says {json.dumps(rewards)}"
        return WorkspaceVerdict(reward=reward, rewards=rewards, reason=reason, **details)


def _time_left() -> float:
    """Seconds that tests may take at most: slower code would else choose a failure in place of a 0."""
    left = current().timeout(math.inf)
    assert left is not None
    return max(left - _VERDICT_SECONDS, 0.9 * left)


async def _not_ended(box: Sandbox) -> str | None:
    """End all processes of a box, so that nobody writes any more; why they are not, if what the tests ran
    prevents it."""
    try:
        killed = await box.exec("kill -9 -1", timeout=60, user=0)
    except SandboxRefused as error:  # there is no shell any more
        return str(error)
    # 1 says that there was none.
    return None if killed.ended == "exit" and killed.status in (0, 1) else "its processes cannot be ended"


async def _carried_at(box: Sandbox, path: str, limit: int) -> _Carried:
    """What is at a path of an agent's box. Raises SandboxRefused: nothing, or too much."""
    is_file = await box.exec(["test", "-f", path], timeout=60, cwd="/", user=0)
    if is_file.ended != "exit":
        raise SandboxRefused(f"cannot look at {path}: what looks was killed: {is_file.ended}")
    if not is_file.ok:
        return _Carried(await box.get(path, limit=limit))
    mode = await box.exec(["test", "-x", path], timeout=60, cwd="/", user=0)
    return _Carried(await box.read(path, limit=limit), 0o755 if mode.ok else 0o644)


@contextmanager
def _refusals() -> Iterator[None]:
    """What the box refuses is the tool's answer."""
    try:
        yield
    except SandboxRefused as error:
        raise ToolFailed(str(error)) from None


def _box_of(session: Workspace.Session) -> Sandbox:
    if session.box is None:
        raise InvalidRequest("the session has no box: it was not seeded, or its episode is over")
    return session.box


def _tool_box(session: Workspace.Session) -> Sandbox:
    if session.deadline < time.monotonic():
        raise PolicyDeadline(f"the agent ran out of time ({_AGENTS_TIME})", stage="tool")
    return _box_of(session)


async def _heal(box: Sandbox, check: HealthCheck, user: int | None) -> None:
    """Wait until a new box is healthy. Raises Unavailable: it does not become so, before any agent was
    there."""
    try:
        problem = await check.problem(box, user)
    except SandboxRefused as error:
        problem = str(error)
    if problem is not None:
        raise Unavailable(f"the box of the task is not healthy: {problem}")


async def _begin(box: Sandbox, spec: SandboxSpec, step: Step) -> str | None:
    """Put the files of a step into the work folder, and set it up; what prevents it, if something does:
    the task, or what the agent did in an earlier step."""
    try:
        if step.files is not None:
            await box.put(spec.workdir, step.files)
        if step.setup:
            done = await box.exec(["bash", "setup.sh"], timeout=_SETUP_SECONDS)
            if not done.ok:
                return f"setup.sh failed: {done.text[-_REASON:]}"
        return None if step.health is None else await step.health.problem(box)
    except SandboxRefused as error:
        return str(error)


async def _begin_in_time(box: Sandbox, spec: SandboxSpec, step: Step) -> str | None:
    """`_begin` in the box of an agent, who could make it endless, and so choose a failure."""
    left = current().timeout()
    try:
        return await asyncio.wait_for(_begin(box, spec, step), None if left is None else _SHARE * left)
    except asyncio.TimeoutError:
        return "it was not set up in time"


def _verdict_of_steps(task: Task, session: Workspace.Session) -> WorkspaceVerdict:
    """The rewards of the last step, or their means: steps that were not reached are zeros, but those after a
    reward that was too low are none."""
    last = session.done[-1]
    if task.final:
        return last if len(session.done) == session.count else last.model_copy(update={"reward": 0.0})
    rewards = [verdict.rewards or {"reward": verdict.reward} for verdict in session.done]
    names = {name: None for each in rewards for name in each}
    means = {name: sum(each.get(name, 0.0) for each in rewards) / session.count for name in names}
    reward = means.get("reward", sum(means.values()) / len(means))
    reason = (
        None if reward >= 1 else f"the steps' rewards are {json.dumps(rewards)}, of {session.count} steps"
    )
    return last.model_copy(update={"reward": reward, "rewards": means, "reason": reason})


def _not_taken_over(error: SandboxRefused) -> WorkspaceVerdict:
    return WorkspaceVerdict(reward=0.0, reason=f"what the agent left cannot be taken over: {error}")


def _rewards(name: str, data: bytes) -> dict[str, float]:
    value = json.loads(data) if name.endswith(".json") else float(data)
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards or not all(
        type(each) in (int, float) and abs(each) <= _LARGEST_REWARD for each in rewards.values()
    ):
        raise ValueError(f"it must be numbers up to {_LARGEST_REWARD:g}")
    return {str(key): float(each) for key, each in rewards.items()}
