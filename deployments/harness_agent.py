"""`harness_agent`: an external harness works on the row, and its model calls become the rollout.

The agent opens a capture at the model server and gives the harness its URL as the address of its model. The
trajectory with the last call is verified; all others (sub-agents, dropped retries, earlier steps of a task)
are ``branches``.

A harness is a URL that is asked once per rollout, or a program, which finds the model in its environment
variables and the row on its input. It runs in the box of its session (``box``), where it reaches the model
alone, or with the rights of this process, in an empty folder, with no environment variable of it except
``PATH``; its whole process group ends with it. The program is trusted, what a model makes it do is not: run a
harness that executes code in a box.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, NamedTuple

from msgspec.structs import replace
from pydantic import AfterValidator, Field, SecretStr, StringConstraints, model_validator
from typing_extensions import Self

from gym_serve.deployments.http_client import HeaderSecret, HttpClient, masked
from gym_serve.sandbox.relay import model_variables
from gym_serve.servers import AgentServer, Episode
from gym_serve.servers.captures import Recording
from gym_serve.servers.clients import EnvironmentClient
from gym_serve.servers.context import current, use
from gym_serve.servers.live import was_stopped
from gym_serve.servers.transport import encode
from gym_serve.types.errors import (
    DeadlineExceeded,
    EndpointMisconfigured,
    GymError,
    NotFound,
    OperatorError,
    PolicyDeadline,
    Rejected,
    Unavailable,
)
from gym_serve.types.requests import JSON, input_items, message_text

_KEPT = 1 << 16  # bytes of a program's output, at its end
_MAX_ANSWER = 1 << 24  # bytes

logger = logging.getLogger("gym_serve")

_Url = Annotated[str, StringConstraints(pattern=r"^https?://."), AfterValidator(lambda url: url.rstrip("/"))]


class HarnessAgent(AgentServer):
    """An external harness, behind a URL or as a program."""

    stages = (*AgentServer.stages, "harness")

    class Config(AgentServer.Config):
        gateway_url: _Url | None = None
        """Address of this graph, as the harness reaches it: ``http://127.0.0.1:8000/math``. A graph on Ray
        needs it; without Ray, the graph has an address of its own."""
        gateway_token: SecretStr = SecretStr("none")
        """The graph's ``auth_token``: what the harness authenticates with."""
        url: _Url | None = None
        """URL of a harness, which gets a ``POST`` with ``row``, ``base_url``, ``api_key``,
        ``resources_url`` and ``session``, answered by a JSON object when it is done. For a task of several
        steps, it gets another one for each further step."""
        headers: dict[str, HeaderSecret] = Field(default_factory=dict)
        """Headers of that request."""
        command: list[str] | None = Field(None, min_length=1)
        """Or a program with its arguments, without a shell. It gets the row as JSON on its input, and
        ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_AUTH_TOKEN``,
        ``GYM_SERVE_RESOURCES_URL`` and ``GYM_SERVE_SESSION_ID`` as environment variables; of a traced rollout
        also ``TRACEPARENT``."""
        env: dict[str, SecretStr] = Field(default_factory=dict)
        """Further environment variables of the program."""
        box: bool = False
        """Whether the program runs in the box of the row's session, which an environment such as
        ``workspace`` has. It starts in the work folder, reaches the model and nothing else, and sees of the
        row its ``responses_create_params`` alone; ``GYM_SERVE_PROMPT`` is their text."""
        image: str | None = None
        """With ``box``: what puts the program into the box, over the files of the task: a folder with a
        Dockerfile, on the machine of the environment, or a name of ``environments/workspace/harnesses``."""
        harness_timeout: float = Field(1800.0, gt=0)
        """Deadline of the harness, or of one step of its task, all of its model and tool calls included."""

        @model_validator(mode="after")
        def _one_harness(self) -> Self:
            if (self.url is None) == (self.command is None):
                raise ValueError("set url or command, one of the two")
            if self.box and self.command is None:
                raise ValueError("box needs a command, which runs in the box")
            if self.image is not None and not self.box:
                raise ValueError("image needs box: true")
            return self

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        config = self.config
        self._gateway = config.gateway_url or ""
        self._harness: Harness = self.manage(_harness_of(config))

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        if config.gateway_url is None:
            yield "gateway_url is missing: set the graph's address, or run the graph without Ray"

    def _episode(self, row: JSON) -> Episode:
        if self.config.box:
            row = {**row, "harness_box": {"image": self.config.image}}
        return super()._episode(row)

    async def act(self, episode: Episode) -> None:
        config = self.config
        recording = await episode.stage("model", lambda: Recording.open(self.policy))
        task = Task(
            episode.row,
            self._gateway + recording.path,
            config.gateway_token,
            f"{self._gateway}/{config.resources.transport.server}",
            episode.session,
            current().traceparent,
        )
        episode.look = recording.look
        try:
            going_on = True
            while going_on:
                try:
                    answer = await episode.stage("harness", partial(self._harness.run, task))
                except asyncio.CancelledError:
                    if was_stopped():  # by a person, who wants to see how far it was
                        await self._collect(episode, recording)
                    raise
                except GymError as error:
                    with use(replace(current(), deadline=None)):  # the episode's may have passed
                        await self._collect(episode, recording)
                    if isinstance(recording.failure, OperatorError):  # why the harness failed
                        raise recording.failure from None
                    if isinstance(error, DeadlineExceeded | PolicyDeadline):
                        raise await self._late(episode, recording, error) from None
                    raise
                episode.fields["harness"] = answer
                going_on = await self._goes_on(episode, recording, answer)
                if going_on:
                    task = task.next_step(episode.items[-1])
            await self._collect(episode, recording)
            if recording.failure is not None:  # it gave up, and said that all is well
                raise recording.failure
            if answer.get("ended") == "timeout":
                limit = answer.get("limit", f"harness_timeout: {config.harness_timeout:g} s")
                reason = f"the harness ran out of time ({limit})"
                raise await self._late(episode, recording, PolicyDeadline(reason, stage="harness"))
            if status := answer.get("exit_status"):
                if episode.response is None:  # it did not come to the policy
                    output = str(answer.get("output"))[-2000:]
                    raise Unavailable(
                        f"the harness ended with exit status {status}: {output}", stage="harness"
                    )
                episode.stop("harness_exit")  # what the policy wrote may have done that
        finally:
            self._drop(recording)

    async def _goes_on(self, episode: Episode, recording: Recording, answer: JSON) -> bool:
        """Whether there is a next step, for which the harness is started again."""
        if not episode.has_steps or answer.get("ended") == "timeout":
            return False
        await episode.stage("model", recording.look)
        return recording.failure is None and await episode.next_step()

    async def _collect(self, episode: Episode, recording: Recording) -> None:
        trajectories = await episode.stage("model", recording.trajectories)
        for trajectory in trajectories:
            usage = trajectory["response"]["usage"]
            episode.meter.record("model", self.config.model.transport.server, usage, trajectory["calls"])
        if trajectories:
            main, *branches = trajectories
            episode.replace_response(main["response"])
            captured = {"captured_input": main["input"], "captured_context": main["context"]}
            episode.fields |= {**captured, "branches": branches}

    async def _late(self, episode: Episode, recording: Recording, error: GymError) -> GymError:
        """Whose the time of a harness was that did not come to its end."""
        limit = min(self.config.harness_timeout, episode.deadline[0])
        slow = episode.set_aside(recording.seconds, limit)
        if slow < limit / 2 and await self._harness.answers():
            stage = "episode" if limit < self.config.harness_timeout else "harness"
            return PolicyDeadline(error.message, stage=stage)
        message = f"{error.message}; its slow model calls took {slow:.3g} s" if slow else error.message
        return DeadlineExceeded(message, stage="harness")

    def _drop(self, recording: Recording) -> None:
        with use(replace(current(), deadline=None)):
            task = asyncio.create_task(self._drop_quietly(recording))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _drop_quietly(self, recording: Recording) -> None:
        try:
            await asyncio.wait_for(recording.close(), self.config.close_timeout)
        except (GymError, asyncio.TimeoutError) as error:
            if not isinstance(error, Rejected):  # it expires by its time to live
                logger.warning("a capture of %s was not dropped: %s", self.name, error)


class Task(NamedTuple):
    """One rollout, as its harness sees it: the model (``base_url``, ends with ``/v1``), the environment's
    tools (``POST {resources_url}/{tool}``, with ``session`` as ``X-Session-Id``), and the episode's span.
    """

    row: JSON
    base_url: str
    api_key: SecretStr
    resources_url: str
    session: str | None
    traceparent: str | None = None

    def next_step(self, instruction: JSON) -> Task:
        """The same for the next step of a task: its row has this message alone as its input."""
        params = {**self.row["responses_create_params"], "input": [instruction]}
        return self._replace(row={**self.row, "responses_create_params": params})


class Harness:
    """Starts harnesses."""

    async def start(self) -> None:
        """Make ready."""

    async def run(self, task: Task) -> JSON:
        """Let a harness work until it is done; cancelling it ends the harness. Returns what it said, for the
        rollout's field ``harness``.
        """
        raise NotImplementedError

    async def answers(self) -> bool:
        """Whether one that has not ended in time is there, and works."""
        return True

    async def stop(self) -> None:
        """Let go of what `start` has acquired."""


class CommandHarness(Harness):
    """Runs a program for every rollout, and for every step of its task; no shell sees the command."""

    def __init__(self, command: Sequence[str], env: Mapping[str, SecretStr]) -> None:
        self._command = command
        self._env = env

    async def run(self, task: Task) -> JSON:
        with tempfile.TemporaryDirectory(prefix="harness-", ignore_cleanup_errors=True) as folder:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    cwd=folder,
                    env=self._variables(task, folder),
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(f"the harness {self._command[0]} cannot be started: {error}") from None
            try:
                _, output = await asyncio.gather(_feed(process, encode(task.row)), _tail(process))
                status = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        text = output.decode("utf-8", "replace")
        text = masked(text, [task.api_key, *self._env.values()])  # should it print them: rollouts are kept
        return {"exit_status": status, "output": text}

    def _variables(self, task: Task, folder: str) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            **model_variables(task.base_url, task.api_key.get_secret_value()),
            "GYM_SERVE_RESOURCES_URL": task.resources_url,
            **({"GYM_SERVE_SESSION_ID": task.session} if task.session else {}),
            **({"TRACEPARENT": task.traceparent} if task.traceparent else {}),
            **{name: value.get_secret_value() for name, value in self._env.items()},
        }


class BoxHarness(Harness):
    """Runs a program in the box of the row's session, which the environment owns."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, SecretStr], resources: EnvironmentClient
    ) -> None:
        self._command = list(command)
        self._env = env
        self._resources = resources

    async def run(self, task: Task) -> JSON:
        # The rest of a row is the verifier's.
        params = task.row["responses_create_params"]
        messages = (item for item in input_items(params["input"]) if item.get("role") == "user")
        body = {
            "command": self._command,
            "input": encode({"responses_create_params": params}).decode(),
            "env": {
                "GYM_SERVE_PROMPT": "\n\n".join(map(message_text, messages)),
                **({"TRACEPARENT": task.traceparent} if task.traceparent else {}),
                **{name: value.get_secret_value() for name, value in self._env.items()},
            },
            "model_url": task.base_url,
            "model_token": task.api_key.get_secret_value(),
        }
        try:
            answer: JSON = await self._resources.fetch("harness", body, session=task.session)
        except NotFound:
            server = self._resources.transport.server
            raise EndpointMisconfigured(f"box: {server} owns no box for a program", server=server) from None
        return {**answer, "output": masked(str(answer["output"]), list(self._env.values()))}


def _harness_of(config: HarnessAgent.Config) -> Harness:
    if config.command is None:
        return HttpHarness(str(config.url), config.headers)
    if config.box:
        return BoxHarness(config.command, config.env, config.resources)
    return CommandHarness(config.command, config.env)


async def _feed(process: asyncio.subprocess.Process, row: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # it need not read it
        process.stdin.write(row)
        await process.stdin.drain()
        process.stdin.close()


async def _tail(process: asyncio.subprocess.Process) -> bytes:
    """The end of the output; all of it is read, so that the program never waits to write."""
    assert process.stdout is not None
    kept = b""
    while chunk := await process.stdout.read(_KEPT):
        kept = (kept + chunk)[-_KEPT:]
    return kept


class HttpHarness(Harness):
    """Asks a server to work, once for every rollout, or step of its task."""

    def __init__(self, url: str, headers: Mapping[str, SecretStr]) -> None:
        self._url = url
        self._headers = headers
        self._client = HttpClient(headers, _MAX_ANSWER)

    async def start(self) -> None:
        await self._client.start()

    async def answers(self) -> bool:
        return await self._client.answers(self._url)

    async def stop(self) -> None:
        await self._client.stop()

    async def run(self, task: Task) -> JSON:
        body = {**task._asdict(), "api_key": task.api_key.get_secret_value()}
        span = body.pop("traceparent")
        headers = {} if span is None else {"traceparent": span}
        secrets = [task.api_key, *self._headers.values()]  # should it repeat them: rollouts are kept
        answer = await self._client.post(self._url, body, headers=headers, secrets=secrets)
        if not isinstance(answer, dict | None):
            raise Unavailable(f"the harness must answer a JSON object, got {str(answer)[:200]!r}")
        return answer or {}
