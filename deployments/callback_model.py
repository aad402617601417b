"""`callback_model`: the trainer generates. Tokens go to its function, tokens come back (`Policy.serve`).

The trainer's process fetches requests from every replica and brings the answers (`PolicyQueue`), so a replica
needs no way to the trainer. A request whose caller has gone is cancelled there as well. What a trainer took
before it was started again is given out again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

from pydantic import Field

from gym_serve.deployments.tokenizing import Generation, TokenizingModel
from gym_serve.servers.base import Operation
from gym_serve.servers.context import current, wait_until
from gym_serve.servers.model import ANSWER, TAKE
from gym_serve.types.errors import InvalidRequest, Unavailable
from gym_serve.types.requests import JSON

_LONGEST_WAIT = 30.0  # seconds that a trainer may wait for a request


class PolicyQueue:
    """The generations that a trainer is asked for. A request fails after ``patience`` seconds without a sign
    of a trainer.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._ids = count(1)
        self._open: dict[str, tuple[JSON, asyncio.Future[JSON]]] = {}
        self._waiting: deque[str] = deque()
        self._taken: set[str] = set()
        self._cancelled: list[str] = []
        self._taker: str | None = None
        self._seen = time.monotonic()
        self._taking = 0
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, request: JSON) -> JSON:
        """The trainer's answer to a request; cancelling the call cancels the request."""
        name = str(next(self._ids))
        answer: asyncio.Future[JSON] = asyncio.get_running_loop().create_future()
        self._open[name] = ({**request, "id": name}, answer)
        self._waiting.append(name)
        self._filled.set()
        begun = time.monotonic()
        try:
            while not answer.done():
                left = max(begun, self._seen) + self._patience - time.monotonic()
                if left <= 0 and not self._taking:
                    raise Unavailable(
                        f"no trainer has served this model for {self._patience:g} s: see gym.policy.serve"
                    )
                await asyncio.wait([answer], timeout=max(left, 0.05))
            policy_answer = answer.result()
        finally:
            del self._open[name]
            if name in self._taken:
                self._taken.discard(name)
                if not answer.done():
                    self._cancelled.append(name)
                    self._filled.set()
        if policy_answer.get("error") is not None:
            raise Unavailable(f"the trainer's policy failed: {str(policy_answer['error'])[:2000]}")
        return policy_answer

    async def take(self, taker: str, held: Collection[str], most: int, wait: float) -> JSON:
        """Up to ``most`` requests for a trainer, after ``wait`` seconds at most, and those of its requests
        (``held``) that nobody waits for any more. What another ``taker`` has taken is given out again.
        """
        lost = self._taken - (set(held) if taker == self._taker else set())
        self._waiting.extendleft(sorted(lost, key=int, reverse=True))
        self._taken -= lost
        if taker != self._taker:
            self._taker, self._cancelled = taker, []
        self._cancelled = [name for name in self._cancelled if name in held]
        self._taking += 1
        try:
            self._forget_answered()
            if not self._cancelled and not (most and self._waiting) and wait > 0:
                self._filled.clear()
                await wait_until(self._filled, wait)
        finally:
            self._taking -= 1
            self._seen = time.monotonic()
        self._forget_answered()
        batch = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._taken.update(batch)
        return {"requests": [self._open[name][0] for name in batch], "cancelled": list(self._cancelled)}

    def answer(self, answers: list[JSON]) -> None:
        self._seen = time.monotonic()
        for answer in answers:
            waiter = self._open.get(str(answer.get("id")))
            if waiter is not None and not waiter[1].done():
                waiter[1].set_result(answer)

    def _forget_answered(self) -> None:
        """Give out no request whose caller has left, or has an answer that it has not read yet."""
        self._waiting = deque(
            name for name in self._waiting if name in self._open and not self._open[name][1].done()
        )


class CallbackModel(TokenizingModel):
    """A policy whose generations the trainer makes, in its own process."""

    requires: ClassVar[Mapping[str, str]] = {"transformers": "gym-serve[callback]"}

    class Config(TokenizingModel.Config):
        policy_timeout: float = Field(300.0, gt=0)
        """Seconds without a sign of the trainer after which calls fail as retryable."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._queue: PolicyQueue | None = None

    async def start(self) -> None:
        self._queue = PolicyQueue(self.config.policy_timeout)
        await super().start()

    def operations(self) -> dict[str, Operation]:
        any_: JSON = {"type": "object"}
        return {
            **super().operations(),
            TAKE: Operation(self._op_take, "Requests for the trainer", any_, any_),
            ANSWER: Operation(self._op_answer, "The trainer's answers", any_, any_),
        }

    async def generate(self, prompt: list[int], sampling: JSON, pictures: Sequence[str]) -> Generation:
        request: JSON = {"prompt_ids": prompt, "sampling": sampling, "episode": current().affinity}
        if pictures:
            request["pictures"] = pictures
        answer = await self._requests.ask(request)
        tokens, logprobs, reason = (answer[key] for key in ("token_ids", "logprobs", "finish_reason"))
        return Generation(tokens, logprobs, reason, answer.get("spans"))

    @property
    def _requests(self) -> PolicyQueue:
        if self._queue is None:
            raise Unavailable("the tokenizer is not loaded: call start() first")
        return self._queue

    async def _op_take(self, body: Any) -> JSON:
        try:
            taker, held = str(body["taker"]), {str(name) for name in body["held"]}
            most, wait = int(body["most"]), min(float(body["wait"]), _LONGEST_WAIT)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"`taker`, `held`, `most` and `wait` must be given: {error}") from None
        return await self._requests.take(taker, held, most, wait)

    async def _op_answer(self, body: Any) -> JSON:
        answers = body.get("answers") if isinstance(body, dict) else None
        if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
            raise InvalidRequest("`answers` must be a list of objects")
        self._requests.answer(answers)
        return {}
