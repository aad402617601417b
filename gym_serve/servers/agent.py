"""`AgentServer` owns the episode: seed, act, verify, close. A subclass writes `act` alone.

An episode always ends with a rollout: with a reward, or with a failure that no trainer mistakes for a zero;
the table in `gym_serve.types.endings` decides. Its session is closed in any case.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from msgspec.structs import replace
from pydantic import Field

from gym_serve.observe.catalogue import RolloutMeter
from gym_serve.observe.logs import fault
from gym_serve.observe.timeline import TIMELINE, Recorder
from gym_serve.observe.tracing import Span, span
from gym_serve.servers.agent_streams import SpokenAnswer
from gym_serve.servers.base import Operation, Server, author_error, place_of_class
from gym_serve.servers.clients import PROVIDER, EnvironmentClient, ModelClient, name_of
from gym_serve.servers.containment import contained
from gym_serve.servers.context import CallContext, current, patience, time_limit, use, without_verdict
from gym_serve.servers.episode import Episode, EpisodeOver, Limits
from gym_serve.servers.live import LIVE, LiveEpisodes
from gym_serve.servers.protocols import PROTOCOLS, WireProtocol, models_list
from gym_serve.servers.transport import Reply, encode
from gym_serve.servers.usage import CostLimit
from gym_serve.types.endings import OnDeadline, ending
from gym_serve.types.errors import AgentFailed, AuthorError, GymError, PolicyDeadline, Rejected, Unavailable
from gym_serve.types.model_endpoint import MODEL_FIELD, ModelEndpoint, endpoint_of
from gym_serve.types.protocols import schemas
from gym_serve.types.requests import JSON
from gym_serve.types.rows import (
    ROLLOUT,
    ROW,
    ROW_PARAMS,
    VERIFIED,
    check_params,
    check_row,
    failed_rollout,
    of_verdict,
    replaced,
    restored,
    unmarked,
    with_prompt,
)
from gym_serve.types.timeline import TIMELINE_FIELD

logger = logging.getLogger("gym_serve")


class AgentServer(Server):
    """Base class of agents."""

    kind = "agent"

    stages: ClassVar[tuple[str, ...]] = ("seed", "model", "tool", "verify", "close")
    """The stages of an episode, each of which has a setting ``{stage}_timeout``."""

    class Config(Server.Config):
        """Settings of every agent. Times are in seconds."""

        model: ModelClient
        """The policy."""
        resources: EnvironmentClient
        """The environment: tools and verifier."""
        episode_timeout: float = Field(3600.0, gt=0)
        """Deadline of a whole episode, its verification not included."""
        on_deadline: OnDeadline = "grade"
        """What a policy gets that has used up the time of a tool, of its harness or of the episode: the
        verdict on what there is (``grade``), a reward of 0 (``zero``), or no reward at all (``mask``). It is
        not tried again. Slow model calls, waiting, and servers that do not answer are failures instead, which
        are masked and tried again."""
        seed_timeout: float = Field(60.0, gt=0)
        """Deadline of opening a session."""
        model_timeout: float = Field(600.0, gt=0)
        """Deadline of one model call."""
        tool_timeout: float = Field(120.0, gt=0)
        """Deadline of one tool call."""
        verify_timeout: float = Field(300.0, gt=0)
        """Deadline of the verifier."""
        close_timeout: float = Field(30.0, gt=0)
        """Deadline of closing the session."""
        max_tool_calls_per_turn: int = Field(Limits().max_tool_calls_per_turn, ge=0)
        """Maximum tool calls that run per turn; the model reads that the others did not run."""
        max_tool_calls: int = Field(Limits().max_tool_calls, ge=0)
        """The same per episode."""
        max_argument_bytes: int = Field(Limits().max_argument_bytes, ge=2)
        """Maximum length of a tool call's arguments; a call with longer ones does not run, and the model
        reads why."""
        max_answer_bytes: int = Field(Limits().max_answer_bytes, ge=1024)
        """Maximum length of one model answer, without its tokens and log-probabilities. A longer one is cut,
        as by ``max_output_tokens``, and ends the episode, which is verified as it stands."""
        timeline: bool = True
        """Whether each rollout has the timeline of its calls (``_ng_timeline``): about 60 bytes a call."""
        max_episode_bytes: int = Field(Limits().max_episode_bytes, ge=1024)
        """Maximum length of an episode, tool outputs included. A longer episode ends and is verified."""
        max_episode_tokens: int | None = Field(None, ge=1)
        """Tokens of an episode, the prompts and the generations of its model calls together; null sets no
        limit. No call begins beyond it: the episode ends and is verified."""
        max_episode_cost: CostLimit | None = None
        """The same for what its own model's calls cost: ``{most: 0.05, input: 2.0, output: 8.0}``, with
        prices per million tokens."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.act is AgentServer.act and cls.run is AgentServer.run:
            where = place_of_class(cls)
            raise TypeError(f"{where}: {cls.__name__} must define `act`, which drives the episode")

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._timeouts = {stage: getattr(self.config, f"{stage}_timeout") for stage in self.stages}
        self._meter = RolloutMeter(self.name, name_of(self.config.resources, "resources"))
        self._limits = Limits(*(getattr(self.config, name) for name in Limits._fields))
        self._closing: set[asyncio.Task[None]] = set()
        self.live = LiveEpisodes()  # the episodes that run here, and the last ones that have run

    async def act(self, episode: Episode) -> None:
        """Drive an episode to its end: model calls and tool calls, nothing else. A `GymError` fails it."""
        raise NotImplementedError

    async def verdict(self, episode: Episode) -> JSON:
        """The verdict on a finished episode: ``reward`` and the verifier's own fields."""
        return await episode.verify()

    async def run(self, row: JSON) -> JSON:
        """One episode of a row: the row, its response, the reward and the verifier's fields.

        Raises `InvalidRequest` if the row is malformed. Any other failure is part of the rollout.
        """
        row = with_prompt(row) if isinstance(row, dict) else row
        check_row(row)
        row, endpoint = self.endpoint_of(restored(unmarked(row)))
        with use(replace(current(), endpoint=endpoint)):
            return await self._run(row)

    async def _run(self, row: JSON) -> JSON:
        episode = self._begun(self._episode(row))
        wall, begun = time.time(), time.monotonic()
        if self.config.timeline:
            episode.meter.recorder = Recorder(begun)
        rollout: JSON | None = None
        with span("invoke_agent", current().traceparent) as agent_span:
            try:
                verdict = of_verdict(
                    await self._in_context(row, self._scored(episode), agent_span.traceparent)
                )
                rollout = {**row, "response": episode.response, **episode.fields, **verdict, **episode.used}
                rollout |= replaced(row, verdict)
            except GymError as error:
                rollout = failed_rollout({**row, **episode.fields, **episode.used}, error, episode.response)
                agent_span.fail(error.code, error.message)
                self._log(row, error)
            finally:
                ended = time.monotonic()
                self._meter.record(rollout, episode.meter.calls("model"), ended - begun)
                if agent_span.recording:
                    self._describe(agent_span, episode, rollout)
        rollout.pop(TIMELINE_FIELD, None)  # of the row, which may be a rollout
        if (recorder := episode.meter.recorder) is not None:
            notes = current().notes
            notes[TIMELINE] = recorder.to_json(self.name, notes, wall, ended)
        return rollout

    async def responses(self, params: JSON) -> JSON:
        """A whole episode as one Response, so that an agent can take the place of a model. Nothing is
        verified.

        ``params``: a Responses body; without ``tools``, the model is offered those of the environment.
        """
        check_params(params)
        episode = self._begun(self._episode({"responses_create_params": params}))
        episode.verified = False
        await self._in_context(episode.row, self._acted(episode))
        if episode.response is None:
            raise Unavailable("the agent made no model call", server=self.name)
        return episode.response

    def operations(self) -> dict[str, Operation]:
        models = "This agent, as the model of its endpoint"
        metrics = "Metrics over many rollouts"
        return {
            "run": Operation(self._answer_run, "Run one episode of a row", ROW, ROLLOUT),
            **{op: self._protocol(op, protocol) for op, protocol in PROTOCOLS.items()},
            "v1/models": Operation(self._models, models, None, schemas.MODELS, "GET"),
            "aggregate_metrics": Operation(self.aggregate, metrics, VERIFIED, {"type": "object"}),
        }

    def _protocol(self, op: str, protocol: WireProtocol) -> Operation:
        whole = op == "v1/responses"
        answer = SpokenAnswer(self._answer, whole=whole)
        return Operation(
            self._answer if whole else partial(protocol.answer, answer),
            f"A whole episode as one {protocol.result}",
            ROW_PARAMS if whole else protocol.request,
            protocol.response,
            stream=partial(protocol.stream, answer),
        )

    async def _answer_run(self, row: Any) -> Reply:
        """`run`, for people who look (`gym_serve.servers.live`)."""
        live, reply = self.live.begin(row), None
        try:
            with live:
                rollout = await self.run(row)
                reply = Reply(200, encode(rollout), current().session, notes=current().notes)
            if reply is None:
                # It was stopped, and an agent with a `run` of its own cannot tell how far it was.
                reply = Reply.of(failed_rollout(row, live.failure()), current().session)
        finally:
            self.live.end(live, reply)
        return reply

    async def _answer(self, params: JSON) -> JSON:
        """`responses`, for people who look."""
        live = self.live.begin({"responses_create_params": params})
        try:
            with live:
                return await self.responses(params)
        finally:
            self.live.end(live)
        raise live.failure()

    def _begun(self, episode: Episode) -> Episode:
        if (live := LIVE.get()) is not None:
            live.episode = episode
        return episode

    async def _models(self, body: Any) -> JSON:
        return models_list([self.name])

    async def stop(self) -> None:
        await asyncio.gather(*self._closing)
        await super().stop()

    def check_endpoint(self, endpoint: ModelEndpoint) -> None:
        """See `Server.check_endpoint`: the agent's model checks it."""

    def endpoint_of(self, row: JSON) -> tuple[JSON, ModelEndpoint | None]:
        """The row without keys, and the endpoint of its model: the caller's, or, over HTTP, the row's own."""
        endpoint = current().endpoint or endpoint_of(row, over_http=True)
        if endpoint is None:
            return row, None
        return {**row, MODEL_FIELD: endpoint.public}, endpoint

    @property
    def policy(self) -> ModelClient:
        """The model of the current episode: that of the graph, at the endpoint that the row names, if any."""
        model: ModelClient = self.config.model
        endpoint = current().endpoint
        return model if endpoint is None else model.at(endpoint)

    def _episode(self, row: JSON) -> Episode:
        return Episode(row, self.policy, self.config.resources, self._timeouts, self._limits)

    async def _scored(self, episode: Episode) -> JSON:
        late: PolicyDeadline | None = None
        try:
            with use(self._limited(episode)):
                await episode.seed()
                try:
                    await self._act(episode)
                except PolicyDeadline as error:
                    late = error
            return await self._verdict_on(episode, late)
        finally:
            await self._close(episode)

    async def _verdict_on(self, episode: Episode, late: PolicyDeadline | None) -> JSON:
        """The verdict on an episode; see ``on_deadline``. ``late``: how its policy used up its time, if it
        did."""
        if late is not None:
            episode.stop(f"{late.stage}_deadline")
        if late is None or ending(late, self.config.on_deadline).graded:
            try:
                verdict = await self.verdict(episode)
            except PolicyDeadline as error:
                late = error
                episode.stop(f"{late.stage}_deadline")
            else:
                if late is None:
                    return verdict
                reasons = filter(None, (verdict.get("reason"), late.message))
                return {**verdict, "reason": "; ".join(map(str, reasons))}
        if ending(late, self.config.on_deadline).masked:
            raise late
        return {"reward": 0.0, "reason": late.message}

    async def _acted(self, episode: Episode) -> None:
        try:
            with use(self._limited(episode)):
                tools = episode.row["responses_create_params"].get("tools")
                if tools is None and self.config.resources is not None:
                    # As in a rollout: a client of an endpoint knows no tools.
                    with suppress(Rejected, AuthorError):  # it needs more of a row than a prompt
                        await episode.seed()
                await self._act(episode)
        finally:
            await self._close(episode)

    async def _act(self, episode: Episode) -> None:
        """Run `act`, which the deadline also ends while it waits for something other than a stage."""
        left = current().timeout()
        try:
            # A stage that runs is the first to tell that its time is over.
            with time_limit(None if left is None else left + 3 * patience(left)):
                await contained(self.act(episode))
        except EpisodeOver:
            pass  # it is verified as it stands
        except (asyncio.TimeoutError, TimeoutError):
            if current().timeout():  # a time-out of the agent's own
                raise
            raise episode.late() from None

    def _log(self, row: JSON, error: GymError) -> None:
        stage, rollout = error.stage or "episode", row.get("_ng_rollout_id")
        message = f"the rollout failed in its {stage} stage: {error.code}: {error.message}"
        fault(self.name, f"{stage} {error.code}", message, rollout=None if rollout is None else str(rollout))

    def _describe(self, episode_span: Span, episode: Episode, rollout: JSON | None) -> None:
        episode_span.name(f"invoke_agent {self.name}")
        scored = rollout is not None and "failure" not in rollout
        episode_span.set(
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.agent.name": self.name,
                "gym_serve.rollout": episode.row.get("_ng_rollout_id"),
                "gym_serve.reward": rollout["reward"] if rollout and scored else None,
            }
        )

    def _limited(self, episode: Episode) -> CallContext:
        """The context in which an episode acts: until its own limit, or its caller's less time to verify."""
        context, seconds, setting = current(), self.config.episode_timeout, "episode_timeout"
        left = context.timeout()
        if left is not None and without_verdict(left) < seconds:
            seconds, setting = without_verdict(left), "timeout"
        episode.deadline = (seconds, setting)
        return context.within(seconds)

    async def _in_context(self, row: JSON, work: Any, traceparent: str | None = None) -> Any:
        """Run an episode with its affinity and span. Any exception becomes a `GymError`."""
        key, context = row.get("_ng_rollout_id"), current()
        affinity = context.affinity or (str(key) if key is not None else uuid.uuid4().hex)
        with use(replace(context, affinity=affinity, traceparent=traceparent or context.traceparent)):
            try:
                return await work
            except GymError:
                raise
            except asyncio.CancelledError:
                live = LIVE.get()
                if live is None or live.stopped is None:
                    raise
                raise live.failure() from None  # `LiveEpisode` takes its cancellation back
            except Exception as error:
                raise author_error(AgentFailed, self.name, self.act, error) from error

    async def _close(self, episode: Episode) -> None:
        """Close the session, also if the caller stops waiting."""
        session = episode.session
        try:
            await self._close_quietly(episode)
        except asyncio.CancelledError:
            episode.session = session  # closing it a second time does no harm
            task = asyncio.create_task(self._close_quietly(episode))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            raise

    async def _close_quietly(self, episode: Episode) -> None:
        # The reward is known. A session that cannot be closed now expires after its time to live.
        try:
            with use(replace(current(), deadline=None)):
                await episode.close()
        except GymError as error:
            if not isinstance(error, Rejected):
                logger.warning("cannot close a session of %s: %s", self.name, error.message)

    async def aggregate(self, body: Any) -> Any:
        """``POST /aggregate_metrics``: metrics over many rollouts, computed by the environment."""
        return await self.config.resources.fetch("aggregate_metrics", body)
