"""`remote_agent`: an external agent behind a URL, in a language and a process of its own.

With ``protocol: run`` the agent owns the episode: ``POST {url}/run`` takes a row and returns a rollout. With
``protocol: responses`` it owns the thinking alone, as in NeMo Gym's ``remote_agent``: ``POST
{url}/v1/responses`` takes the conversation so far. Calls that it leaves open are run in this graph's
environment, and it is asked again; then this graph verifies. Its cookies are sent back to it.

Its failures, delays and malformed answers are failures of the rollout. An answer is checked before a trainer
sees it: an agent cannot change the row's keys or the metadata that rollouts are counted by. A request is sent
once: the caller of the rollout decides about a retry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, TypeGuard
from urllib.parse import quote

import orjson
from pydantic import Field, SecretStr, model_validator
from typing_extensions import Self

from gym_serve.deployments.http_client import BaseUrl, HeaderSecret, HttpClient
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.metrics import scored_rollouts
from gym_serve.servers import EnvironmentClient, Episode, ModelClient
from gym_serve.servers.context import current, use
from gym_serve.types.errors import (
    LONGEST_WAIT,
    STAGES,
    BadRequest,
    DeadlineExceeded,
    EndpointAccessDenied,
    EndpointMisconfigured,
    GymError,
    OperatorError,
    Overloaded,
    PolicyDeadline,
    SessionLost,
    Unavailable,
    VerifierFailed,
)
from gym_serve.types.model_endpoint import MODEL_FIELD, ModelEndpoint
from gym_serve.types.protocols import check_response
from gym_serve.types.protocols.content import shown
from gym_serve.types.requests import JSON
from gym_serve.types.rows import check_params, check_row, failed_rollout


class _PeerModel:
    """The agent in the place of a model, for one episode."""

    def __init__(self, agent: RemoteAgent) -> None:
        self._agent = agent
        self._cookies: dict[str, str] = {}

    async def responses(self, params: JSON) -> JSON:
        return check_response(await self._agent.post("v1/responses", params, self._cookies), _WHO)


class RemoteAgent(SimpleAgent):
    """An external agent behind a URL."""

    class Config(SimpleAgent.Config):
        """Where it is. ``max_steps`` and the like are for ``protocol: responses``."""

        url: BaseUrl
        """Its base URL: ``http://agent.example:8000``."""
        protocol: Literal["run", "responses"] = "run"
        """Whether it answers ``/run`` with a rollout, or ``/v1/responses`` with its next turn."""
        headers: dict[str, HeaderSecret] = Field(default_factory=dict)
        """Headers of every request: ``Authorization`` and the like."""
        max_answer_mb: int = Field(64, ge=1)
        """Megabytes of an answer at most."""
        row_endpoints: bool = False
        """For ``protocol: run``: send the agent the endpoint of the row's model (``_ng_model``), its key
        included. Rows that come through the graph's HTTP address can name none."""
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
        self._client = self.manage(HttpClient(self.config.headers, self.config.max_answer_mb << 20))

    async def post(
        self, op: str, body: Any, cookies: dict[str, str] | None = None, secrets: Iterable[SecretStr] = ()
    ) -> Any:
        """The answer to ``POST {url}/{op}`` with the deadline, request id and affinity of the context; see
        `HttpClient.post`.
        """
        context = current()
        headers = {"x-request-id": context.request_id}
        if context.affinity:
            headers["x-session-affinity"] = quote(context.affinity, ":", errors="replace")  # of any script
        if context.traceparent is not None:
            headers["traceparent"] = context.traceparent
        url, limit = f"{self.config.url}/{op}", context.timeout()
        return await self._client.post(
            url, body, timeout=limit, headers=headers, cookies=cookies, secrets=secrets
        )

    async def run(self, row: JSON) -> JSON:
        if self.config.protocol == "responses":
            return await super().run(row)
        check_row(row)
        row, endpoint = self.endpoint_of(row)
        body, secrets = _asked(row), list[SecretStr]()
        try:
            if endpoint is not None:
                self.check_endpoint(endpoint)
                body |= {MODEL_FIELD: endpoint.complete}
                secrets = list(map(SecretStr, endpoint.secrets))
            with use(current().within(self.config.episode_timeout)):
                answer = await self._in_context(row, self.post("run", body, secrets=secrets))
            return rollout_of(_asked(row), answer)
        except GymError as error:
            error.server = error.server or self.name
            return failed_rollout(row, error)

    def check_endpoint(self, endpoint: ModelEndpoint) -> None:
        if self.config.protocol != "run" or not self.config.row_endpoints:
            raise EndpointMisconfigured(
                f"{self.name} sends its agent no `{MODEL_FIELD}`: set `row_endpoints`, with `protocol: run`"
            )
        if endpoint.over_http:
            raise BadRequest(f"{self.name} takes no endpoint (`{MODEL_FIELD}`) over HTTP")

    async def responses(self, params: JSON) -> JSON:
        if self.config.protocol == "responses":
            return await super().responses(params)
        check_params(params)
        if current().endpoint is not None:
            raise EndpointMisconfigured(f"{self.name} can send `{MODEL_FIELD}` with rows only")
        with use(current().within(self.config.episode_timeout)):
            answer = await self._in_context({}, self.post("v1/responses", params))
        return check_response(answer, _WHO)

    def pending(self, turn: list[JSON]) -> list[JSON]:
        """The calls that the agent has not answered itself; of those with one id, the last one."""
        answered = {str(i.get("call_id")) for i in turn if i.get("type") == "function_call_output"}
        calls = {str(i.get("call_id")): i for i in super().pending(turn)}
        return [call for call_id, call in calls.items() if call_id not in answered]

    def _episode(self, row: JSON) -> Episode:
        return Episode(row, _PeerModel(self), self.config.resources, self._timeouts, self._limits)  # type: ignore[arg-type]

    async def aggregate(self, body: Any) -> Any:
        if self.config.resources is not None:
            return await super().aggregate(body)
        answer = await self.post("aggregate_metrics", {"verify_responses": scored_rollouts(body)})
        if not isinstance(answer, dict):
            message = f"the agent must answer its metrics as an object, got {shown(answer)}"
            raise Unavailable(message, server=self.name)
        return answer


_WHO = "the agent"
_RESULTS = frozenset({"response", "reward", "mask_sample", "failure", "error"})
_REPORTED = (BadRequest, DeadlineExceeded, EndpointAccessDenied, EndpointMisconfigured)
_KINDS: dict[str, type[GymError]] = {
    cls.code: cls for cls in (*_REPORTED, Overloaded, SessionLost, VerifierFailed)
}


def _asked(row: JSON) -> JSON:
    """The row without what an earlier run may have left in it (a rollout is a valid row)."""
    return {key: row[key] for key in row if key not in _RESULTS and not key.startswith("_ng_failure")}


def rollout_of(row: JSON, answer: Any) -> JSON:
    """The rollout that an agent answered to `_asked` rows. Raises Unavailable: it is none; GymError: the
    failure that it reports.
    """
    if not isinstance(answer, dict):
        raise Unavailable(f"the agent must answer a JSON object, got {shown(answer)}")
    if answer.get("_ng_failure_class") is not None:
        raise _reported(answer)
    check_response(answer.get("response"), _WHO)
    components = answer.get("reward_components")
    if not isinstance(components, dict | None):
        raise Unavailable(f"the agent's `reward_components` must be an object, got {shown(components)}")
    numbers = {f"reward_components.{name[:100]}": value for name, value in (components or {}).items()}
    for name, value in {"reward": answer.get("reward"), **numbers}.items():
        if not _is_number(value):
            raise Unavailable(f"the agent's `{name}` must be a finite number, got {shown(value)}")
    try:
        orjson.dumps(answer)
    except TypeError:
        raise Unavailable("the agent's answer is nested too deeply") from None
    own = {key: answer[key] for key in answer if key not in row and not key.startswith("_ng_")}
    return {**row, **own}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _reported(answer: JSON) -> GymError:
    kind = str(answer["_ng_failure_class"])[:100]
    failure = answer.get("failure")
    failure = failure if isinstance(failure, dict) else {}
    stage, wait = failure.get("stage"), failure.get("retry_after")
    detail = str(failure.get("detail") or answer.get("error") or "it gives no reason")[:2000]
    cls = _KINDS.get(kind)
    if kind.endswith("_deadline"):
        cls = PolicyDeadline
    elif answer.get("_ng_failure_terminal") is True:
        cls = cls if cls and issubclass(cls, OperatorError) else BadRequest
    elif cls is None:
        cls = DeadlineExceeded if kind.endswith("_timeout") else Unavailable
    return cls(
        f"the agent failed ({kind}): {detail}",
        stage=stage if stage in STAGES else None,
        retry_after=min(max(wait, 0.0), LONGEST_WAIT) if _is_number(wait) else None,
    )
