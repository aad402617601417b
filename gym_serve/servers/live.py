"""`LiveEpisodes`: the episodes that an agent runs now, and its last ones, for people who look.

What an entry tells is made from the episode itself when somebody asks. An episode that is stopped is
cancelled at once, down to the request of its model. Its rollout is a failure (`Stopped`), which nothing tries
again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from itertools import count, islice
from types import TracebackType
from typing import Any

from gym_serve.servers.context import interruptible
from gym_serve.servers.episode import Episode, readable
from gym_serve.servers.transport import Reply
from gym_serve.servers.usage import USAGE_FIELD, UsageMeter
from gym_serve.types.errors import GymError, Stopped
from gym_serve.types.model_endpoint import public_row
from gym_serve.types.requests import JSON, input_items, message_text
from gym_serve.types.timeline import TIMELINE_FIELD

# The entry of the episode that runs in this context.
LIVE: ContextVar[LiveEpisode | None] = ContextVar("gym_serve_live", default=None)

_KEPT = 32  # rollouts that have ended
_KEPT_BYTES = 8 * 2**20  # of all of them together
_KEPT_SECONDS = 1800.0
_LOOK_SECONDS = 2.0
_LONGEST_PROMPT = 300  # characters

_numbers = count(1)


def was_stopped() -> bool:
    """Whether a person has stopped the episode that runs in this context: why it is being cancelled."""
    live = LIVE.get()
    return live is not None and live.stopped is not None


class LiveEpisode(interruptible):
    """An episode that runs: the ``with`` block of `AgentServer` around it."""

    __slots__ = ("_entered", "began", "episode", "number", "request", "stopped")

    def __init__(self, number: int, request: Any) -> None:
        self.number = number
        self.request = request
        self.began = time.monotonic()
        self.episode: Episode | None = None
        self.stopped: str | None = None  # the stage in which it was stopped; None if nobody has

    def __enter__(self) -> LiveEpisode:
        interruptible.__enter__(self)  # `super()` takes twice as long
        self._entered = LIVE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        LIVE.reset(self._entered)
        return self._over and interruptible.__exit__(self, kind, error, trace)

    def stop(self) -> None:
        self.stopped = self.stopped or self._stages()[0][0]
        self.interrupt()

    @property
    def version(self) -> str:
        """Changes with whatever `so_far` says."""
        episode = self.episode
        if episode is None:
            return "0"
        if episode.look is not None:  # it is elsewhere
            return f"{time.monotonic():.1f}"
        recorder = episode.meter.recorder
        steps = 0 if recorder is None else len(recorder.steps)
        return f"{len(episode.items)}.{steps}.{episode.meter.calls('model')}"

    def failure(self) -> Stopped:
        stage = None if self.stopped in (None, "agent") else self.stopped
        return Stopped("the episode was stopped by a person, at the graph's /episodes", stage=stage)

    def summary(self) -> JSON:
        """What it is, what it is doing, and how far it is."""
        stages, now = self._stages(), time.monotonic()
        return {
            **identity(self._row()),
            "state": "stopping" if self.stopped else stages[0][0],
            "tools": [details[0] for kind, _, details in stages if kind == "tool" and details],
            "state_seconds": now - stages[0][1],
            "seconds": now - self.began,
            **_counts(UsageMeter() if self.episode is None else self.episode.meter),
        }

    async def so_far(self, agent: str) -> JSON:
        """The rollout so far, in the form of one that has ended, without training tokens."""
        episode = self.episode
        if episode is None:
            return self._row()
        rollout = {**self._row(), **episode.fields, **episode.used}
        if (response := episode.shown()) is not None:
            rollout["response"] = response
        elif episode.look is not None:
            rollout |= await _looked(episode.look)
        if (recorder := episode.meter.recorder) is not None:
            now = time.monotonic()
            rollout[TIMELINE_FIELD] = recorder.to_json(agent, {}, time.time() - (now - self.began), now)
        return rollout

    def _row(self) -> JSON:
        if self.episode is not None:
            return public_row(self.episode.row)
        return public_row(self.request) if isinstance(self.request, dict) else {}

    def _stages(self) -> list[tuple[str, float, tuple[Any, ...]]]:
        """The stages that run now, the oldest first; ``agent`` where it is in none."""
        running = [] if self.episode is None else self.episode.running
        return list(running) or [("agent", self.began, ())]


class EndedEpisode:
    """A rollout that has ended; ``size`` is about the bytes of its JSON."""

    __slots__ = ("_ended", "_reply", "_summary", "number", "size")

    def __init__(self, number: int, reply: Reply, size: int) -> None:
        self.number = number
        self.size = size
        self._reply = reply
        self._ended = time.monotonic()
        self._summary: JSON | None = None

    @property
    def body(self) -> bytes:
        return self._reply.content

    @property
    def age(self) -> float:
        return time.monotonic() - self._ended

    def summary(self) -> JSON:
        if self._summary is None:
            self._summary = _of_rollout(self._reply.json())
        return {**self._summary, "ended_seconds": self.age}


class LiveEpisodes:
    """The episodes of one agent in this process."""

    def __init__(self) -> None:
        self._running: dict[int, LiveEpisode] = {}
        self._ended: OrderedDict[int, EndedEpisode] = OrderedDict()
        self._ended_bytes = 0

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, request: Any) -> LiveEpisode:
        number = next(_numbers)
        live = self._running[number] = LiveEpisode(number, request)
        return live

    def end(self, live: LiveEpisode, reply: Reply | None = None) -> None:
        """Take out an episode; its rollout, if there is one, is kept for a while."""
        del self._running[live.number]
        if reply is None or len(reply.body) > _KEPT_BYTES:
            return
        size, ended = len(reply.body), self._ended
        if live.episode is not None and (recorder := live.episode.meter.recorder) is not None:
            size += recorder.text_size
        ended[live.number] = EndedEpisode(live.number, reply, size)
        self._ended_bytes += size
        while len(ended) > _KEPT or self._ended_bytes > _KEPT_BYTES:
            self._ended_bytes -= ended.popitem(last=False)[1].size

    def running(self, most: int) -> Iterator[LiveEpisode]:
        return islice(self._running.values(), most)

    def ended(self) -> Iterator[EndedEpisode]:
        while self._ended and next(iter(self._ended.values())).age > _KEPT_SECONDS:
            self._ended_bytes -= self._ended.popitem(last=False)[1].size
        return reversed(self._ended.values())

    def get(self, number: int) -> LiveEpisode | EndedEpisode | None:
        return self._running.get(number) or self._ended.get(number)


async def _looked(look: Callable[[], Awaitable[list[JSON]]]) -> JSON:
    """What an external harness has done so far; nothing if nobody says so in time."""
    try:
        trajectories = await asyncio.wait_for(look(), _LOOK_SECONDS)
    except (GymError, asyncio.TimeoutError):
        return {}
    if not trajectories:
        return {}
    main = trajectories[0]
    response = {**main["response"], "output": readable(main["response"]["output"])}
    return {"captured_input": readable(main["input"]), "response": response}


def identity(row: JSON) -> JSON:
    """Which rollout a row is for, and the beginning of its last user message, in one line."""
    params = row.get("responses_create_params")
    prompt = params.get("input") if isinstance(params, dict) else row.get("prompt")
    items = input_items(prompt) if isinstance(prompt, str | list) else []
    messages = [item for item in items if isinstance(item, dict) and item.get("role") == "user"]
    text = " ".join(message_text(messages[-1])[: 4 * _LONGEST_PROMPT].split()) if messages else ""
    keys = {"rollout_id": "_ng_rollout_id", "task": "_ng_task_index", "attempt": "_ng_rollout_index"}
    return {**{name: _short(row.get(key)) for name, key in keys.items()}, "prompt": text[:_LONGEST_PROMPT]}


def _of_rollout(rollout: JSON) -> JSON:
    meter = UsageMeter()
    meter.merge(rollout.get(USAGE_FIELD))
    timeline = rollout.get(TIMELINE_FIELD)
    took = timeline.get("dur") if isinstance(timeline, dict) else None
    failure = rollout.get("_ng_failure_class")
    return {
        **identity(rollout),
        "state": "ended",
        "reward": None if failure else rollout.get("reward"),
        "failure": None if failure is None else str(failure)[:_LONGEST_PROMPT],
        "seconds": took / 1e6 if isinstance(took, int) else None,
        **_counts(meter),
    }


def _counts(meter: UsageMeter) -> JSON:
    tokens = [(counts["input_tokens"], counts["output_tokens"]) for _, _, counts in meter]
    prompt, sampled = (sum(column) for column in zip(*tokens, strict=True)) if tokens else (0, 0)
    return {"turns": meter.calls("model"), "input_tokens": prompt, "output_tokens": sampled}


def _short(value: Any) -> Any:
    """A value of a row that may be anything, as a number or a short text."""
    return value if isinstance(value, int | float | None) else str(value)[:_LONGEST_PROMPT]
