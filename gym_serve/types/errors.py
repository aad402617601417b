"""Every failure of gym_serve, as one tree. A class says what its receiver should do.

    GymError
    ├── GraphError            fix the graph file, then deploy again (lists every problem)
    ├── Rejected              fix the input; the same call fails again
    │   ├── InvalidRequest      422  a body, row or argument that does not fit its schema
    │   ├── BadRequest          400  a body that is not what the route takes; a backend's own 400
    │   ├── Forbidden           403  a web page of another origin; a graph that must have a token for this
    │   ├── NotFound            404  no such server, route or tool
    │   ├── MethodNotAllowed    405  the route takes another HTTP method
    │   ├── TooLarge            413  the body is over the graph's limit
    │   ├── ToolFailed          422  a tool broke; its error body is what the model sees
    │   ├── SessionNotFound     404  the session was closed, has expired, or never was
    │   ├── Conflict            409  the name is taken, or only one such call may run
    │   └── ClusterMismatch     409  driver and cluster run other versions of Ray or Python
    ├── Retryable             try again, elsewhere or later; nothing is wrong with the input
    │   ├── Overloaded          429  queues are full; wait `retry_after` seconds
    │   ├── Unavailable         503  a server is starting, restarting, gone, or answered 5xx
    │   ├── VerifierFailed      503  the verifier got no answer from a judge or worker: not a zero
    │   ├── DeadlineExceeded    504  a stage, call or episode ran out of its time
    │   └── SessionLost         409  the replica that held the session died: start again from seed
    ├── OperatorError         fix a setting, then resume: a run stops, and its rows stay open
    │   ├── Unauthorized           401  the bearer token is missing or wrong
    │   ├── EndpointAccessDenied   424  an endpoint refuses the key or the account that a server has for it
    │   ├── EndpointMisconfigured  424  an endpoint has no such model or path, or redirects
    │   ├── RepeatedFailure        424  many rollouts in a row failed alike, and the next ones would
    │   └── WaitTooLong            424  a server refuses calls for longer than the run waits: resume it later
    ├── AuthorError           fix the code of the environment, agent or model: the message has file and line
    │   ├── SeedFailed          500  `seed` raised
    │   ├── VerifyFailed        500  `verify` raised, or returned no verdict
    │   ├── CompareFailed       500  `compare` raised, or returned no rewards
    │   ├── AgentFailed         500  `act` raised
    │   └── ModelFailed         500  a model's method raised
    ├── PolicyDeadline        504  leave it: the policy used up the time of a tool, a harness or the episode;
    │                              it is graded, or gets a zero (`gym_serve.types.endings`)
    └── Stopped               410  leave it: somebody stopped this episode on purpose

All of them pickle (they cross Ray), and cross HTTP as ``{"error": {"code", "message", ...}}``;
`GymError.to_body` and `error_from_body` are the two directions. A ``code`` is stable: it is
the class's name in snake case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

__all__ = [
    "STAGES",
    "AgentFailed",
    "AuthorError",
    "BadRequest",
    "ClusterMismatch",
    "CompareFailed",
    "Conflict",
    "DeadlineExceeded",
    "EndpointAccessDenied",
    "EndpointMisconfigured",
    "Forbidden",
    "GraphError",
    "GymError",
    "InvalidRequest",
    "MethodNotAllowed",
    "ModelFailed",
    "NotFound",
    "OperatorError",
    "Overloaded",
    "PolicyDeadline",
    "Rejected",
    "RepeatedFailure",
    "Retryable",
    "SeedFailed",
    "SessionLost",
    "SessionNotFound",
    "Stopped",
    "TooLarge",
    "ToolFailed",
    "Unauthorized",
    "Unavailable",
    "VerifierFailed",
    "VerifyFailed",
    "WaitTooLong",
    "error_class",
    "error_from_body",
    "own_error",
]

STAGES = ("seed", "model", "tool", "harness", "verify", "close", "episode")
"""Where an episode can fail; ``episode`` is all of it."""

LONGEST_WAIT = 366 * 24 * 3600.0  # seconds; nobody means a longer one
_BY_CODE: dict[str, type[GymError]] = {}
_E = TypeVar("_E", bound="GymError")


class GymError(Exception):
    """Base of all failures.

    Args:
        message: what went wrong, where, and the next step; safe to show (no secrets).
        server: name of the server in the graph where it happened.
        stage: one of `STAGES`.
        retry_after: seconds to wait before a retry, where the failing side said so.
    """

    code: ClassVar[str] = "gym_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        _BY_CODE[cls.code] = cls

    def __init__(
        self,
        message: str,
        *,
        server: str | None = None,
        stage: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.server = server
        self.stage = stage
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))

    def to_body(self) -> dict[str, Any]:
        """The JSON body of this error on every transport."""
        error: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "type": type(self).__name__,
            "retryable": self.retryable,
        }
        for key in ("server", "stage", "retry_after"):
            if getattr(self, key) is not None:
                error[key] = getattr(self, key)
        return {"error": error}


_EQUAL = 3  # places that are shown of equal problems


class GraphError(GymError):
    """The graph file has problems; ``problems`` holds all of them, one line each."""

    status = 422

    def __init__(self, problems: list[str] | str, *, source: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        where = f" in {source}" if source else ""
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}{where}:"
        super().__init__("\n".join([count, *(f"  - {line}" for line in _equal_ones_once(self.problems))]))


def _equal_ones_once(problems: list[str]) -> Iterator[str]:
    """The problems; of many that differ in their place alone, one line with the first places."""
    places: dict[str, list[str]] = {}
    for problem in problems:
        place, _, text = problem.partition(": ")
        places.setdefault(text or problem, []).append(place)
    for problem in problems:
        place, _, text = problem.partition(": ")
        equal = places[text or problem]
        if len(equal) <= _EQUAL:
            yield problem
        elif place == equal[0]:
            yield f"{', '.join(equal[:_EQUAL])} and {len(equal) - _EQUAL:,} more: {text or problem}"


class Rejected(GymError):
    """The input is at fault: the same call would fail again."""

    status = 400


class InvalidRequest(Rejected):
    """A body, row or argument does not fit its schema."""

    status = 422


class BadRequest(Rejected):
    """A body that is not what the route takes, or a backend's own 400."""


class Forbidden(Rejected):
    """The request comes from a web page that the graph does not answer, or needs a graph with a token."""

    status = 403


class NotFound(Rejected):
    """No such server, route or tool."""

    status = 404


class MethodNotAllowed(Rejected):
    """The route takes another HTTP method."""

    status = 405


class TooLarge(Rejected):
    """The body of a request is over the graph's ``max_request_bytes``."""

    status = 413


class SessionNotFound(Rejected):
    """The session was closed, has expired, or never was."""

    status = 404


class ToolFailed(Rejected):
    """A tool raised an exception. The episode continues: the error is the tool's output."""

    status = 422


class Conflict(Rejected):
    """The name is taken, or only one such call may run."""

    status = 409


class ClusterMismatch(Rejected):
    """Driver and cluster run other versions of Ray or Python."""

    status = 409


class Retryable(GymError):
    """Nothing is wrong with the input: try again, elsewhere or later."""

    status = 503
    retryable = True


class Overloaded(Retryable):
    """Queues are full; wait ``retry_after`` seconds."""

    status = 429


class Unavailable(Retryable):
    """A server is starting, restarting or gone, or it answered 5xx."""


class VerifierFailed(Retryable):
    """A judge or the machine gave the verifier no answer. There is no reward; it is not a zero."""


class DeadlineExceeded(Retryable):
    """A stage, a call or the episode ran out of its time, and not by what the policy did."""

    status = 504


class SessionLost(Retryable):
    """The replica that held the session died: the episode starts again from seed."""

    status = 409


class OperatorError(GymError):
    """A setting is at fault, and neither the row nor the machine: no retry helps until it is fixed."""

    status = 424  # not 502, on which the official clients would try again


class Unauthorized(OperatorError):
    """The bearer token is missing or wrong."""

    status = 401


class EndpointAccessDenied(OperatorError):
    """An endpoint refuses the key or the account that a server has for it (its 401 or 402)."""


class EndpointMisconfigured(OperatorError):
    """An endpoint has no such model or path (its 404 or 405), speaks another protocol, redirects, or lacks
    what a setting asks for."""


class RepeatedFailure(OperatorError):
    """Many rollouts in a row failed alike, for a reason that no retry mends: what is wrong is not one row."""


class WaitTooLong(OperatorError):
    """A server refuses calls, or is away, for longer than the run waits; ``retry_after`` says how much longer
    where the server does. Resume the run when it is back."""


class AuthorError(GymError):
    """The code of an environment, agent or model is at fault; the same call would fail again.

    The message has the file and line of that code. Authors raise `Retryable` where a service or the machine
    is at fault, and `Rejected` where the row is.
    """


class SeedFailed(AuthorError):
    """`seed` raised."""


class VerifyFailed(AuthorError):
    """`verify` raised, or returned no verdict. There is no reward; it is not a zero."""


class CompareFailed(AuthorError):
    """`compare` raised, or returned no rewards."""


class AgentFailed(AuthorError):
    """`act` raised."""


class ModelFailed(AuthorError):
    """`responses`, `chat_completions` or a stream of a model raised."""


class PolicyDeadline(GymError):
    """The policy used up the time of a tool, of its harness or of the episode; ``stage`` says which.

    Waiting, slow model calls and servers that do not answer are `DeadlineExceeded` instead.
    """

    status = 504


class Stopped(GymError):
    """Somebody stopped the episode on purpose. There is no reward; it is not a zero."""

    status = 410  # not one on which clients try again


def error_class(code: str) -> type[GymError] | None:
    """The class whose code this is; None for a code that is not ours."""
    return GymError if code == GymError.code else _BY_CODE.get(code)


def error_from_body(status: int, body: Any, *, server: str | None = None) -> GymError:
    """The error that another side sent: an HTTP status of 400 or above, and its decoded JSON or text, of any
    shape (a foreign server's included)."""
    error = own_error(body)
    if error is not None:
        cls, message = _BY_CODE[str(error["code"])], str(error.get("message", ""))
        if cls is GraphError:
            cls = BadRequest
    else:
        cls, message = _class_of_status(status), f"HTTP {status}: {_foreign_message(body)}"
        error = {}
    retry_after = error.get("retry_after")
    return cls(
        message,
        server=_text(error.get("server")) or server,
        stage=_text(error.get("stage")),
        # A foreign server may say anything: NaN, or an integer that no float holds.
        retry_after=float(retry_after)
        if isinstance(retry_after, int | float) and 0 <= retry_after <= LONGEST_WAIT
        else None,
    )


def own_error(body: Any) -> Mapping[str, Any] | None:
    """The error of a body that gym_serve wrote; None for any other body."""
    error = body.get("error") if isinstance(body, Mapping) else None
    return error if isinstance(error, Mapping) and str(error.get("code")) in _BY_CODE else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _foreign_message(body: Any) -> str:
    if isinstance(body, list) and len(body) == 1:  # Gemini's
        body = body[0]
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        if isinstance(inner, Mapping):
            inner = inner.get("message") or inner.get("detail") or inner
        body = inner
    return str(body)[:2000]


def _class_of_status(status: int) -> type[GymError]:
    exact: dict[int, type[GymError]] = {
        401: Unauthorized,
        403: Unauthorized,
        404: NotFound,
        405: MethodNotAllowed,
        408: DeadlineExceeded,
        409: Conflict,
        413: TooLarge,
        422: InvalidRequest,
        429: Overloaded,
        504: DeadlineExceeded,
    }
    return exact.get(status, Unavailable if status >= 500 else BadRequest)


def _rebuild(cls: type[_E], message: str, state: dict[str, Any]) -> _E:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error
