"""`Graded`: rows scored by one function of a Python file, for those who need no class yet.

    # grader.py
    def grade(row, response):
        return row["answer"] in response.output_text

The file is read again when it has changed, so that `gym-serve reverify` and the viewer use what it says now.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest
from gym_serve.servers.base import author_error
from gym_serve.types.errors import GymError, VerifyFailed


class Graded(ResourcesServer):
    """One function scores the row's response: ``(row, response) -> float | bool | dict``, sync or async.

    ``row`` is a dict; ``response`` has ``output_text`` and the output items. A dict has the key ``reward``,
    and others that the rollout keeps.
    """

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    restorable: ClassVar[bool] = True  # there is no state

    class Config(ResourcesServer.Config):
        function: str
        """``FILE.py:NAME``, on the machine of the server."""

        @field_validator("function")
        @classmethod
        def _in_a_file(cls, value: str) -> str:
            path, _, name = value.rpartition(":")
            if not (path.endswith(".py") and name.isidentifier()):
                raise ValueError(f"write FILE.py:FUNCTION, got {value!r}")
            if not Path(path).is_file():
                raise ValueError(f"there is no file {path}")
            return value

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._loaded: tuple[int, Callable[..., Any]] | None = None

    async def start(self) -> None:
        self._grade()  # a file that cannot be used stops the start, not the first rollout
        await super().start()

    async def verify(self, request: VerifyRequest) -> Verdict:
        row = request.model_dump(exclude={"response"})
        grade = self._grade()
        try:
            if inspect.iscoroutinefunction(grade):
                graded = await grade(row, request.response)
            else:  # a long text does not block the event loop
                graded = await self.sessions.threads.run(partial(grade, row, request.response))
        except GymError:
            raise
        except Exception as error:  # the user's code: its own line is named
            raise author_error(VerifyFailed, self.name, grade, error) from error
        fields = dict(graded) if isinstance(graded, Mapping) else {"reward": float(graded)}
        return Verdict.model_validate(fields)

    def _grade(self) -> Callable[..., Any]:
        path, _, name = self.config.function.rpartition(":")
        changed = Path(path).stat().st_mtime_ns
        if self._loaded is None or self._loaded[0] != changed:
            # Not by import: its cache of bytecode knows a file by its whole second.
            functions = runpy.run_path(path)
            if name not in functions:
                raise AttributeError(f"{path} has no function {name}")
            self._loaded = changed, functions[name]
        return self._loaded[1]
