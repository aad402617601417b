"""A model that does what the request tells it, and an environment with a shop: for tests over HTTP."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr

from gym_serve import (
    BadRequest,
    ModelServer,
    Overloaded,
    ResourcesServer,
    SessionLost,
    Unavailable,
    Verdict,
    VerifyRequest,
    tool,
)
from support.replies import call, message, response, thought, usage

SECRET = "sk-nobody-may-read-this"
JSON = dict[str, Any]


class ToldModel(ModelServer):
    """Its last message says what it does; without an order it repeats it, beginning with a thought."""

    class Config(ModelServer.Config):
        api_key: SecretStr = SecretStr("")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.hanging = self.cancelled = 0

    async def responses(self, body: JSON) -> JSON:
        given = body["input"]
        last = given if isinstance(given, str) else given[-1].get("content")
        order = last if isinstance(last, str) else last[0]["text"]
        if order == "hang":
            self.hanging += 1
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.hanging -= 1
        if order == "busy":
            raise Overloaded("the model is busy", retry_after=6.5)
        if order == "down":
            raise Unavailable("the model is down")
        if order == "refuse":
            raise BadRequest("temperature: 3 is too hot")
        if order == "lost":
            raise SessionLost("the replica is gone")
        if order == "crash":
            raise RuntimeError(f"a broken model of {self.config!r}")
        if order == "die":
            os._exit(1)
        if order == "nonsense":
            return {"object": "response", "output": "no list"}
        if order == "cancelled?":
            order = str(self.cancelled)
        if order == "hanging?":
            order = str(self.hanging)
        return self._response(body, order)

    def _response(self, body: JSON, text: str) -> JSON:
        tools = body.get("tools") or []
        calls = [call(each["name"], '{"city": "Nîmes"}', "call_1") for each in tools]
        model = body.get("model") or self.name
        output = [thought("Hm."), message(text), *calls]
        return response(*output, model=model, tools=tools, usage=usage(reasoning=1))


class Card(BaseModel):
    by: Literal["card"]
    number: int


class Cash(BaseModel):
    by: Literal["cash"]


class Line(BaseModel):
    item: str
    count: int = Field(1, ge=1)


class Order(BaseModel):
    """What to buy, and how to pay."""

    lines: list[Line]
    payment: Card | Cash = Field(discriminator="by")


class Receipt(BaseModel):
    items: int
    orders: int


class Shop(ResourcesServer):
    """A shop that remembers what was ordered in a session."""

    reverify_mode = "unsupported"

    class Config(ResourcesServer.Config):
        api_key: SecretStr = SecretStr("")

    class Session(BaseModel):
        orders: int = 0

    async def seed(self, row: JSON, session: Session) -> JSON | None:
        session.orders = row.get("orders", 0)
        return {"welcome": row["name"]} if "name" in row else None

    @tool
    async def order(self, order: Order, session: Session) -> Receipt:
        """Order things.

        Args:
            order: the things.
        """
        session.orders += 1
        return Receipt(items=sum(line.count for line in order.lines), orders=session.orders)

    @tool
    def stock(self, item: str) -> dict[str, float]:
        """How many characters the name of an item has; a price of nan for an item named nan."""
        return {"characters": len(item), "price": float("nan") if item == "nan" else 1.0}

    @tool
    async def burn_down(self) -> None:
        """End the process of the shop."""
        os._exit(1)

    @tool
    async def break_down(self) -> None:
        """Fail."""
        raise RuntimeError(f"a broken shop of {self.config!r}")

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=float(session.orders), said=request.response.last_text)


os.environ["HTTP_TESTS_KEY"] = SECRET
KEY = "${HTTP_TESTS_KEY}"
GRAPH: dict[str, Any] = {
    "models": {
        "policy": {"type": "scripted_model"},
        "told": {"type": ToldModel, "api_key": KEY},
        "away": {"type": "http", "url": "http://127.0.0.1:9", "headers": {"authorization": f"Bearer {KEY}"}},
    },
    "resources": {"shop": {"type": Shop, "api_key": KEY}},
    "agents": {
        "clerk": {"type": "simple_agent", "model": "policy", "resources": "shop"},
        "parrot": {"type": "simple_agent", "model": "told", "resources": "shop"},
    },
    "default_agent": "parrot",
}
"""A graph with a model of each kind, an environment and two agents."""
