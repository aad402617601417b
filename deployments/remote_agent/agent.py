"""`remote_agent`: an external agent behind a URL, in a language and a process of its own.

With ``protocol: run`` the agent owns the episode: ``POST {url}/run`` takes a row and answers a rollout
(docs/formats.md, Agents and Rollouts), and environment and reward are its own. With ``protocol: responses``
it owns the thinking alone, as in NeMo Gym's ``remote_agent``: ``POST {url}/v1/responses`` takes the
conversation so far and answers a Response. Calls that it leaves open are run in this graph's environment,
and it is asked again; calls that it has answered itself are passed through. Then this graph verifies: the
agent sees neither the environment nor the row's answer. Its cookies come back to it for the length of an
episode.

Whatever it does, a rollout comes back: its failures, delays and nonsense are failures of the rollout.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, StringConstraints, model_validator
from typing_extensions import Self

from gym_serve.deployments.remote_agent.checking import asked, rollout_of
from gym_serve.deployments.remote_agent.http import RemoteHttp
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.servers import EnvironmentClient, Episode, ModelClient
from gym_serve.types.errors import GymError, Unavailable
from gym_serve.types.protocols import check_response
from gym_serve.types.requests import JSON
from gym_serve.types.rows import check_params, check_row, failed_rollout

__all__ = ["RemoteAgent"]

# Neither a query, which would swallow the path, nor credentials, which belong into headers.
_Url = Annotated[
    str,
    StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"),
    AfterValidator(lambda u: u.rstrip("/")),
]


class _Remote:
    """The agent in the place of a model, for one episode."""

    def __init__(self, http: RemoteHttp) -> None:
        self._http = http
        self._cookies: dict[str, str] = {}

    async def responses(self, params: JSON) -> JSON:
        return check_response(await self._http.post("v1/responses", params, self._cookies), "the agent")


class RemoteAgent(SimpleAgent):
    """An external agent behind a URL."""

    class Config(SimpleAgent.Config):
        """Where it is. ``max_steps`` and the like are for ``protocol: responses``."""

        url: _Url
        """Its base URL: ``http://agent.example:8000``."""
        protocol: Literal["run", "responses"] = "run"
        """Whether it answers ``/run`` with a rollout, or ``/v1/responses`` with its next turn."""
        headers: dict[str, SecretStr] = Field(default_factory=dict)
        """Headers of every request: ``Authorization`` and the like."""
        max_answer_mb: int = Field(64, ge=1)
        """Megabytes of an answer at most."""
        model: ModelClient | None = None  # type: ignore[assignment]  # an external agent has a model of its own
        """Not used: the agent has its own."""
        resources: EnvironmentClient | None = None  # type: ignore[assignment]
        """The environment, for ``protocol: responses``."""

        @model_validator(mode="after")
        def _has_an_environment(self) -> Self:
            if self.protocol == "responses" and self.resources is None:
                raise ValueError("protocol responses needs resources: it is this graph that verifies")
            return self

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        config = self.config
        self._http = RemoteHttp(config.url, config.headers, config.max_answer_mb << 20)

    async def start(self) -> None:
        await super().start()
        await self._http.start()

    async def stop(self) -> None:
        await super().stop()
        await self._http.stop()

    async def run(self, row: JSON) -> JSON:
        """See `AgentServer.run`."""
        if self.config.protocol == "responses":
            return await super().run(row)
        check_row(row)
        try:
            answer = await self._within_deadline(row, self._http.post("run", asked(row)))
            return rollout_of(asked(row), answer)
        except GymError as error:
            error.server = error.server or self.name
            return failed_rollout(row, error)

    async def responses(self, params: JSON) -> JSON:
        """See `AgentServer.responses`."""
        if self.config.protocol == "responses":
            return await super().responses(params)
        check_params(params)
        answer = await self._within_deadline({}, self._http.post("v1/responses", params))
        return check_response(answer, "the agent")

    def pending(self, turn: list[JSON]) -> list[JSON]:
        """The calls that the agent has not answered itself; of those with one id, the last one."""
        answered = {str(i.get("call_id")) for i in turn if i.get("type") == "function_call_output"}
        calls = {str(i.get("call_id")): i for i in super().pending(turn)}
        return [call for call_id, call in calls.items() if call_id not in answered]

    def _episode(self, row: JSON) -> Episode:
        return Episode(row, _Remote(self._http), self.config.resources, self._timeouts, self._limits)  # type: ignore[arg-type]

    async def aggregate(self, body: Any) -> Any:
        """See `AgentServer.aggregate`."""
        if self.config.resources is not None:
            return await super().aggregate(body)
        answer = await self._http.post("aggregate_metrics", body)
        if not isinstance(answer, dict):
            raise Unavailable(f"the agent answered no metrics: {str(answer)[:200]!r}", server=self.name)
        return answer
