"""`EngineModel`: a model whose engine runs inside the server: exact tokens, and weights that change.

``weight_version`` beside tokens is the version with which the call *began*, the oldest that any of them can
have. One update at a time: the engine pauses, takes the weights, forgets what it cached, and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_serve.deployments.token_model import TokenModel
from gym_serve.servers.base import Operation, missing_path
from gym_serve.servers.model import HoldMode, PauseMode
from gym_serve.types.errors import BadRequest, InvalidRequest, Unavailable
from gym_serve.types.requests import JSON, problems_of

_FORM = ConfigDict(extra="forbid", hide_input_in_errors=True)


class _Update(BaseModel):
    model_config = _FORM

    path: str
    version: str = Field(min_length=1)
    mode: PauseMode = "keep"


class _Pause(BaseModel):
    model_config = _FORM

    mode: PauseMode = "keep"


def missing_model(setting: str, model: str) -> Iterator[str]:
    """A sentence for `Server.preflight` if a setting names a folder that is not here."""
    if model.startswith(("/", "./", "../", "~")):
        yield from missing_path(setting, Path(model).expanduser())


class EngineModel(TokenModel):
    """A model with an engine inside; a subclass writes `running`, `load`, `pause`, `resume` and a
    `TokenModel`'s methods.
    """

    class Config(TokenModel.Config):
        weight_version: str = "0"
        """Version of the weights that it starts with."""
        weight_updates: bool = False
        """Take new weights while running (`Policy.update_weights`). Every client of the graph can then
        replace         the weights, so give the graph an ``auth_token``."""

    config: Config

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self.weight_version: str = self.config.weight_version
        self._updating = asyncio.Lock()
        self._broken: str | None = None
        self._held = False

    @property
    def running(self) -> int:
        """Generations that the engine has to do, those included that wait in it."""
        raise NotImplementedError

    async def load(self, weights: Path | bytes) -> None:
        """Replace the weights, while paused, by safetensors: a folder, a file, or its bytes. Raises
        BadRequest: they are not those of this model; nothing was changed.
        """
        raise NotImplementedError

    async def pause(self, mode: PauseMode) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def hold(self, mode: HoldMode) -> None:
        self._held = True
        await super().hold(mode)
        if mode == "keep":
            async with self._updating:
                await self.pause("keep")

    async def release(self) -> None:
        self._held = False
        async with self._updating:
            await self.resume()
        await super().release()

    async def update_weights(
        self, weights: Path | bytes | None, version: str, mode: PauseMode = "keep"
    ) -> None:
        """Pause, replace the weights, and go on with ``version``."""
        if weights is None:
            raise BadRequest(f"{self.name} has its engine here: give `path` or `tensors` with a version")
        if not self.config.weight_updates:
            raise BadRequest(f"{self.name} takes no weights: set weight_updates in the graph")
        async with self._updating:
            try:
                await self.pause(mode)
                try:
                    await self.load(weights)
                    self.weight_version = version
                finally:
                    if not self._held:
                        await self.resume()
            except BadRequest:
                raise
            except Exception as error:  # an engine with half of the weights; what it raises is its own
                self._broken = f"loading the weights {version!r} failed: {error}"
                raise Unavailable(f"{self._broken}; the replica is replaced") from error

    async def check_health(self) -> None:
        if self._broken is not None:
            raise Unavailable(self._broken)

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        answer = {"type": "object"}
        operations["load"] = Operation(self._op_load, "Generations in the engine", None, answer)
        if self.config.weight_updates:
            own = {
                "update": (self._op_update, "Load weights from a path", _Update.model_json_schema()),
                "pause": (self._op_pause, "Stop generating", _Pause.model_json_schema()),
                "resume": (self._op_resume, "Go on generating", None),
            }
            operations |= {f"weights/{op}": Operation(*parts, answer) for op, parts in own.items()}
        return operations

    async def _prepared(self, chat: JSON) -> tuple[JSON, list[int] | None]:
        if self._broken is not None:
            raise Unavailable(self._broken)
        return await super()._prepared(chat)

    async def _op_load(self, body: Any) -> JSON:
        return {"running": self.running, "weight_version": self.weight_version}

    async def _op_update(self, body: Any) -> JSON:
        update = _checked(_Update, body)
        await self.update_weights(Path(update.path), update.version, update.mode)
        return {"weight_version": self.weight_version}

    async def _op_pause(self, body: Any) -> JSON:
        await self.pause(_checked(_Pause, body).mode)
        return {"weight_version": self.weight_version}

    async def _op_resume(self, body: Any) -> JSON:
        await self.resume()
        return {"weight_version": self.weight_version}


def _checked(model: type[Any], body: Any) -> Any:
    try:
        return model.model_validate(body or {})
    except ValidationError as error:
        raise InvalidRequest(problems_of(error, "body")[0]) from None
