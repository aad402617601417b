"""`harness_agent`: an external harness works on the row, and its model calls become the rollout.

The agent opens a capture at the model server, gives the harness the capture's URL as the address of its
model, and waits until the harness is done. Which protocol it speaks does not matter. What was captured is
then the episode: the trajectory with the last call is verified; every other one (sub-agents, dropped
retries, a context before it was compacted) is kept beside it, in the rollout's field ``branches``.

The model is a server of this graph and not ``inline``: the harness reaches it through the gateway.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import AfterValidator, Field, SecretStr, StringConstraints, model_validator
from typing_extensions import Self

from gym_serve.deployments.harness_agent.command import CommandHarness
from gym_serve.deployments.harness_agent.http import HttpHarness
from gym_serve.deployments.harness_agent.task import Harness, Task
from gym_serve.servers import AgentServer, Episode
from gym_serve.servers.captures import Recording
from gym_serve.servers.context import current, use
from gym_serve.types.errors import GymError, OperatorError, Rejected

__all__ = ["HarnessAgent"]

logger = logging.getLogger("gym_serve")

_Url = Annotated[str, StringConstraints(pattern=r"^https?://."), AfterValidator(lambda url: url.rstrip("/"))]


class HarnessAgent(AgentServer):
    """An external harness, behind a URL or as a program."""

    class Config(AgentServer.Config):
        """Settings of the harness."""

        gateway_url: _Url
        """Address of this graph, as the harness reaches it: ``http://127.0.0.1:8000/math``."""
        gateway_token: SecretStr = SecretStr("none")
        """The graph's ``auth_token``: what the harness authenticates with."""
        url: _Url | None = None
        """Where a harness is asked to work: a ``POST`` with ``row``, ``base_url``, ``api_key``,
        ``resources_url`` and ``session``, answered by a JSON object when it is done."""
        headers: dict[str, SecretStr] = Field(default_factory=dict)
        """Headers of that request."""
        command: list[str] | None = Field(None, min_length=1)
        """Or a program with its arguments, without a shell. It gets the row as JSON on its input, and
        ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_AUTH_TOKEN``,
        ``GYM_SERVE_RESOURCES_URL`` and ``GYM_SERVE_SESSION_ID`` as environment variables."""
        env: dict[str, SecretStr] = Field(default_factory=dict)
        """Further environment variables of the program."""
        model_timeout: float = 1800.0
        """Deadline of the harness, all of its model and tool calls included."""

        @model_validator(mode="after")
        def _one_harness(self) -> Self:
            if (self.url is None) == (self.command is None):
                raise ValueError("set url or command, one of the two")
            return self

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        config = self.config
        self._harness: Harness = (
            CommandHarness(config.command, config.env)
            if config.command is not None
            else HttpHarness(str(config.url), config.headers)
        )

    async def start(self) -> None:
        await self._harness.start()

    async def stop(self) -> None:
        await super().stop()
        await self._harness.stop()

    async def act(self, episode: Episode) -> None:
        """Let the harness work; what it was answered is the episode, also where it failed."""
        config = self.config
        recording = await episode.stage("model", lambda: Recording.open(config.model))
        task = Task(
            episode.row,
            config.gateway_url + recording.path,
            config.gateway_token,
            f"{config.gateway_url}/{config.resources.transport.server}",
            episode.session,
        )
        try:
            try:
                answer = await episode.stage("model", lambda: self._harness.run(task))
            except GymError:
                await self._collect(episode, recording)
                if isinstance(recording.failure, OperatorError):  # why the harness failed
                    raise recording.failure from None
                raise
            episode.fields["harness"] = answer
            await self._collect(episode, recording)
            if recording.failure is not None:  # it gave up, and said that all is well
                raise recording.failure
        finally:
            self._drop(recording)

    async def _collect(self, episode: Episode, recording: Recording) -> None:
        trajectories = await episode.stage("model", recording.trajectories)
        for trajectory in trajectories:
            usage = trajectory["response"]["usage"]
            episode.meter.record("model", self.config.model.transport.server, usage, trajectory["calls"])
        if trajectories:
            main, *branches = trajectories
            episode.replace_response(main["response"])
            episode.fields |= {
                "captured_input": main["input"],
                "captured_context": main["context"],
                "branches": branches,
            }

    def _drop(self, recording: Recording) -> None:
        """Drop the capture in a task of its own, so that a cancelled episode frees it as well."""
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
