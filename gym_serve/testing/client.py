"""`TestClient`: an environment in a unit test, called as a graph calls it, without Ray.

    with TestClient(Account(overdraft=10)) as client, client.episode(opening=100, closing=70) as episode:
        assert episode.call("pay", amount=30, to="Ada") == "Paid 30 to Ada."
        assert episode.verify("Done.").reward == 1.0

Rows, arguments and verdicts pass through JSON and are validated, and every episode has a session of its
own, as in a graph. What fails there raises the same `GymError` here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from gym_serve.servers import Call, Reply, ResourcesServer, ServerRunner
from gym_serve.servers.transport import encode
from gym_serve.types.errors import GymError
from gym_serve.types.requests import JSON, Verdict
from gym_serve.types.rows import with_prompt

T = TypeVar("T")


class TestClient:
    """Runs an environment for a test; use it as a context manager.

    It is blocking, and works in synchronous and in asynchronous tests: the environment runs on an event
    loop in a thread of its own.

    Args:
        environment: the environment, constructed with its settings.
        timeout: seconds for one call.
    """

    __test__ = False  # pytest: this is no test class

    def __init__(self, environment: ResourcesServer, *, timeout: float = 60.0) -> None:
        self.environment = environment
        self.timeout = timeout
        self._runner = ServerRunner(environment)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="TestClient", daemon=True)

    @property
    def tools(self) -> dict[str, JSON]:
        """The tools by name, as functions of OpenAI's Responses API: what a model sees of them."""
        return {name: spec.openai() for name, spec in self.environment.tools.items()}

    def episode(self, row: Mapping[str, Any] | None = None, /, **keys: Any) -> EpisodeClient:
        """Open a session for a row.

        Args:
            row: the row; one without a prompt gets an empty one.
            **keys: the row's own keys, beside or instead of ``row``.

        Raises:
            GymError: `seed` failed.
        """
        return EpisodeClient(self, with_prompt({"prompt": "", **(row or {}), **keys}))

    def call(self, op: str, body: Any = None, *, session: str | None = None) -> Reply:
        """One call of an operation (``tools/pay``, ``compare``, ...); the reply, failed or not."""
        content = b"" if body is None else encode(body)
        return self._run(self._runner.dispatch(Call(op, content, session, timeout=self.timeout)))

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._runner.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._runner.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class EpisodeClient:
    """One episode of a `TestClient`; leaving its context closes the session.

    Attributes:
        row: its row.
        session: id of its session.
        fields: what `seed` answered.
    """

    def __init__(self, client: TestClient, row: JSON) -> None:
        self.row = row
        self._client = client
        reply = client.call("seed_session", row)
        self.fields: JSON = reply.json()
        self.session = reply.session

    def call(self, tool: str, /, **arguments: Any) -> Any:
        """Call a tool; what it returned, as JSON.

        Raises:
            InvalidRequest: the arguments do not fit the tool.
            NotFound: the environment has no such tool.
            ToolFailed: the tool raised.
        """
        reply = self._client.call(f"tools/{tool}", arguments, session=self.session)
        self.session = reply.session or self.session
        return reply.json()

    def verify(self, response: str | list[JSON] | Mapping[str, Any] = "") -> Verdict:
        """Score the model's last message, output items, or a whole Response object. The verifier's own fields
        are attributes of the verdict.

        Raises:
            GymError: `verify` failed.
        """
        body = {**self.row, "response": _response(response)}
        return Verdict.model_validate(self._client.call("verify", body, session=self.session).json())

    def close(self) -> None:
        """Close the session; safe to call twice."""
        self._client.call("close_session", {}, session=self.session).json()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            self.close()
        except GymError:
            if kind is None:  # else the test has failed already, and says why
                raise


def _response(given: str | list[JSON] | Mapping[str, Any]) -> JSON:
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, list):
        return {"output": given}
    text = {"type": "output_text", "text": given, "annotations": []}
    return {"output": [{"type": "message", "role": "assistant", "content": [text]}]}
