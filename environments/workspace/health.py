"""`HealthCheck`: a command of a task of Harbor that says when a box is ready for use."""

from __future__ import annotations

import asyncio
import time

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat

from gym_serve.sandbox import Sandbox

_SHOWN = 500  # characters of what the command wrote


class HealthCheck(BaseModel):
    """A command that is tried until it succeeds, by the rules of Docker's HEALTHCHECK."""

    command: str  # for the shell
    interval_sec: NonNegativeFloat = 5.0  # between two tries
    timeout_sec: PositiveFloat = 30.0  # of one try
    start_period_sec: NonNegativeFloat = 0.0  # at the beginning, in which failures do not count
    start_interval_sec: NonNegativeFloat = 5.0  # between two tries in that time
    retries: int = Field(3, ge=1)  # how many failures in a row are too many

    async def problem(self, box: Sandbox, user: str | int | None = None) -> str | None:
        """Wait until the box is healthy; why it is not, if it does not become so.

        Args:
            user: who executes the command; that of the box by default.

        Raises:
            SandboxRefused: the command cannot be executed.
            SessionLost: the box is gone.
        """
        counting = time.monotonic() + self.start_period_sec
        failures = 0
        while True:
            counts = time.monotonic() >= counting
            done = await box.exec(self.command, timeout=self.timeout_sec, user=user)
            if done.ok:
                return None
            failures += counts
            if failures >= self.retries:
                end = f"exit status {done.status}" if done.ended == "exit" else f"killed: {done.ended}"
                return f"the health check {self.command!r} failed: {end}: {done.text[-_SHOWN:]}"
            await asyncio.sleep(self.interval_sec if counts else self.start_interval_sec)
