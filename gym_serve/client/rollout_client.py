"""`RolloutClient`: what the rollout engine asks of a graph, on behalf of `Gym`.

It knows which agent runs a row and how an episode is called, checks rows before anything runs, asks
environments for group rewards and metrics, and says what about the graph decides what a rollout is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import orjson
from typing_extensions import TypedDict

from gym_serve.client import loop
from gym_serve.graph.spec import SECTIONS, Graph, ServerOptions
from gym_serve.metrics import STATISTICS_ONLY, MetricSpec
from gym_serve.rollouts import (
    Backoff,
    Expansion,
    PromptTemplate,
    RolloutBackend,
    Rows,
    RunnerOptions,
    checked_groups,
    prices_of,
)
from gym_serve.rollouts.groups import Compare
from gym_serve.rollouts.progress import Aggregate
from gym_serve.rollouts.scheduling import MAX_FAILURES, MAX_PROBES
from gym_serve.servers.clients import AgentClient, EnvironmentClient
from gym_serve.servers.context import current
from gym_serve.servers.resources import ResourcesServer
from gym_serve.servers.runner import DESCRIBE
from gym_serve.servers.transport import Call, Transport, encode
from gym_serve.servers.usage import USAGE_FIELD, Prices, UsageMeter
from gym_serve.types.errors import EndpointMisconfigured, InvalidRequest, NotFound, Rejected, Retryable
from gym_serve.types.model_endpoint import MODEL_FIELD, ModelEndpoint, endpoint_of
from gym_serve.types.requests import JSON
from gym_serve.types.rows import agent_name

# How large a server is and where it runs changes no rollout; nor does an endpoint's address, key or price.
_NOT_COMPARED = (ServerOptions.model_fields.keys() - {"resources"}) | {
    *("ray_resources", "base_url", "url", "query", "api_key", "api_key_header", "headers", "prices"),
    *("capture_ttl", "max_captures", "max_client_sessions", "row_endpoints", "row_endpoints_over_http"),
}
_BACKOFF = Backoff()


class RolloutOptions(TypedDict, total=False):
    """Options of everything that makes rollouts. All may be left out."""

    agent: str | None
    """The agent for all rows; else each row's ``agent_ref.name``, else the graph's default agent."""
    repeats: int | Mapping[str, int]
    """Rollouts per row (1), or that by agent: ``{"math_agent": 8, "_default": 1}``."""
    seed: int | None
    """Sampling seed of a row's first rollout; that of each further one is one more."""
    limit: int | None
    """Take only this many rows."""
    shard: tuple[int, int] | None
    """``(i, n)``: only the i-th of n parts of the rows, counted from 1."""
    params: Mapping[str, Any]
    """Replace keys of every row's ``responses_create_params``."""
    prompt: PromptTemplate | Mapping[str, Any] | str | Path | None
    """Template that makes the rows' ``input``, or the path of a YAML file with one: ``{system?, user}``."""
    skip_invalid: bool
    """Leave out rows that cannot be used; else nothing starts if a file, or the first 1,000 rows that are
    collected, have one."""
    concurrency: int
    """How many rollouts run at the same time at most (128)."""
    attempts: int
    """How often a rollout is tried if its failure is worth it (`collect`, `groups`: 3, else 1)."""
    timeout: float | None
    """Seconds for one attempt, beside the agent's own deadlines."""
    endpoint: Mapping[str, Any]
    """The endpoint of the policy of these rollouts: ``{base_url, model?, api_key?, headers?}``, for rows that
    name no ``_ng_model`` of their own. The model server must allow it (``row_endpoints``)."""
    max_failures: int
    """Stop after this many consecutive `OperatorError`s (default 5), such as an endpoint without the model. A
    refused key ends the run at once."""


class _Activity:
    """What a `Gym` does; its clients for endpoints (`RolloutClient.at`) share it."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.followers: list[Callable[[JSON], None]] = []

    def follow(self, rollout: JSON) -> None:
        for follower in tuple(self.followers):
            follower(rollout)


class RolloutClient(RolloutBackend):
    """Runs rows on a graph. ``graph``: the graph without secrets, as ``/graph`` shows it."""

    def __init__(
        self,
        graph: Mapping[str, Any],
        default_agent: str | None,
        transport: Callable[[str], Transport],
        resolved: Graph | None,
        name: str,
    ) -> None:
        self._agents: Mapping[str, Any] = graph.get("agents") or {}
        self._graph = graph
        self._default_agent = default_agent
        self._transport = transport
        self._resolved = resolved
        self._name = name
        self._compares: dict[str, bool] = {}
        self.activity = _Activity()
        self._endpoint: ModelEndpoint | None = None

    def at(self, endpoint: Any) -> RolloutClient:
        """A client of the same graph whose rows have the model at ``endpoint``, if they name no other. Raises
        InvalidRequest: it is no endpoint; see `ModelEndpoint.read`."""
        if endpoint is None:
            return self
        client = copy(self)
        client._endpoint = ModelEndpoint.read(endpoint)
        return client

    def expansion(self, options: RolloutOptions) -> Expansion:
        """How rows become rollouts, by the options."""
        prompt = options.get("prompt")
        return Expansion(
            agent=options.get("agent"),
            default_agent=self._default_agent,
            repeats=options.get("repeats", 1),
            seed=options.get("seed"),
            limit=options.get("limit"),
            shard=options.get("shard"),
            params=dict(options.get("params", {})),
            prompt=None if prompt is None else PromptTemplate.of(prompt),
        )

    def runner_options(self, options: RolloutOptions, attempts: int) -> RunnerOptions:
        """How attempts are run, by the options. Raises TypeError: an option that there is not."""
        if unknown := options.keys() - RolloutOptions.__annotations__.keys():
            raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
        return RunnerOptions(
            concurrency=options.get("concurrency", 128),
            attempts=options.get("attempts", attempts),
            timeout=options.get("timeout"),
            max_failures=options.get("max_failures", MAX_FAILURES),
            tracing=self._graph.get("tracing"),
            follow=self.activity.follow,
        )

    async def groups(self, rows: Rows, options: RolloutOptions) -> Iterator[list[JSON]]:
        """The materialized rows of each row; see `checked_groups`."""
        skip_invalid = options.get("skip_invalid", False)
        return await checked_groups(rows, self.expansion(options), self.check, skip_invalid=skip_invalid)

    def check(self, row: JSON) -> None:
        """Check that the graph has the agent of a row, and that its environment takes the row's keys. Raises
        InvalidRequest: the row names no agent, or its own keys do not fit the environment; NotFound: there is
        no such agent."""
        agent = self._agents[self._agent_of(row)]
        cls = self._class_of(agent.get("resources"))
        if cls is not None:
            cls.check_row(row, verified=not agent.get("skip_verification"))

    async def run(self, row: JSON) -> JSON:
        """One episode of a materialized row; cancelling it cancels the episode. Raises GymError: what was
        answered instead of a rollout."""
        agent = AgentClient(self._transport(self._agent_of(row)))
        # Not `agent.run`: every coroutine that waits counts where thousands of episodes are in flight.
        key = str(row["_ng_rollout_id"])
        endpoint = endpoint_of(row) or self._endpoint
        if endpoint is not None:
            row = {**row, MODEL_FIELD: endpoint.public}
        id, traceparent = secrets.token_hex(16), current().traceparent
        call = Call("run", encode(row), None, id, key, current().timeout(), endpoint, traceparent)
        self.activity.in_flight += 1
        try:
            reply = await loop.run(agent.transport.call(call))
        finally:
            self.activity.in_flight -= 1
        try:
            rollout: JSON = agent.decode(reply)
        except NotFound as error:  # `check` knew the agent: another graph runs there by now
            raise EndpointMisconfigured(error.message, server=error.server) from None
        return rollout

    async def compare(self, row: JSON, body: JSON, meter: UsageMeter) -> JSON | None:
        """The answer of ``POST /compare`` for a row of the group; None if the environment has no ``compare``.

        ``meter`` counts what models used for it, also if it fails.
        """
        resources = self._agents[self._agent_of(row)].get("resources")
        if not isinstance(resources, str):
            return None
        return await loop.run(self._compare(resources, body, meter))

    async def compares(self, row: JSON) -> bool:
        """Whether the environment of a row or a rollout has ``compare``."""
        resources = self._agents[self._agent_of(row)].get("resources")
        return isinstance(resources, str) and await loop.run(self._has_compare(resources))

    async def comparer(self) -> Compare | None:
        """`compare`, if any environment of the graph has that operation."""
        environments = {str(agent.get("resources")) for agent in self._agents.values()}
        own = environments & (self._graph.get("resources") or {}).keys()
        has = [await loop.run(self._has_compare(name)) for name in sorted(own)]
        return self.compare if any(has) else None

    def prices(self) -> Mapping[str, Prices]:
        return prices_of(self._graph)

    def aggregator(self) -> Aggregate:
        return self.aggregate

    async def aggregate(self, agent: str, rollouts: list[JSON]) -> JSON:
        if agent not in self._agents:
            raise NotFound(f"no agent {agent!r} in {self._name}")
        return await loop.run(
            AgentClient(self._transport(agent)).fetch("aggregate_metrics", {"verify_responses": rollouts})
        )

    def metric_spec(self, agent: str) -> MetricSpec:
        """The metrics of the agent's environment, where this process knows its class."""
        cls = self._class_of((self._agents.get(agent) or {}).get("resources"))
        return STATISTICS_ONLY if cls is None else cls.metrics

    def description(self) -> JSON:
        """The graph as far as it decides what a rollout is."""
        return {
            section: {
                name: {key: value for key, value in server.items() if key not in _NOT_COMPARED}
                for name, server in servers.items()
            }
            for section, servers in ((section, self._graph.get(section) or {}) for section in SECTIONS)
        }

    def _agent_of(self, row: JSON) -> str:
        name = agent_name(row)
        if name is None:
            has = ", ".join(self._agents)
            raise InvalidRequest(f"agent_ref: the row names no agent; {self._name} has {has}")
        if name not in self._agents:
            raise NotFound(f"no agent {name[:100]!r} in {self._name}; it has {', '.join(self._agents)}")
        return name

    async def _compare(self, name: str, body: JSON, meter: UsageMeter) -> JSON | None:
        if not await self._has_compare(name):
            return None
        resources = EnvironmentClient(self._transport(name))
        reply = await resources.call("compare", body)
        with suppress(orjson.JSONDecodeError):  # `decode` says what is wrong with it
            rewards = orjson.loads(reply.body)
            meter.merge(rewards.get(USAGE_FIELD) if isinstance(rewards, dict) else None)
        answer: JSON = resources.decode(reply)
        return answer

    def _class_of(self, resources: Any) -> type[ResourcesServer] | None:
        if self._resolved is None or not isinstance(resources, str):
            return None
        node = self._resolved.nodes.get(resources)
        cls = None if node is None else node.cls
        return cls if cls is not None and issubclass(cls, ResourcesServer) else None

    async def _has_compare(self, name: str) -> bool:
        cls = self._class_of(name)
        if cls is not None and cls.operations is ResourcesServer.operations:
            return cls.compare is not ResourcesServer.compare  # it may have no replica that could be asked
        environment, failed = EnvironmentClient(self._transport(name)), 0
        while name not in self._compares:
            try:
                self._compares[name] = "compare" in await environment.fetch(DESCRIBE)
            except Rejected:  # a foreign server that does not describe itself
                self._compares[name] = False
            except Retryable:  # for as long as rollouts wait for a graph that is away
                failed += 1
                if failed > MAX_PROBES:
                    raise
                await asyncio.sleep(_BACKOFF.seconds(failed))
        return self._compares[name]
