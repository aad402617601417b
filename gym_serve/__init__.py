"""gym_serve: rollouts for reinforcement learning of language-model agents, on Ray Serve.

    with Gym.from_graph("graphs/math.yaml") as gym:
        async for rollout in gym.rollouts(rows, repeats=8): ...

Everything public is listed in `__all__`. Ray is imported by the first use of a graph, not by this
package: environments can be written and tested without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gym_serve.servers import (
    AgentClient,
    AgentServer,
    CompareRequest,
    Comparison,
    EnvironmentClient,
    Episode,
    ModelClient,
    ModelServer,
    ResourcesServer,
    Response,
    ServerRunner,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.types.errors import (
    AgentFailed,
    AuthorError,
    BadRequest,
    ClusterMismatch,
    CompareFailed,
    Conflict,
    DeadlineExceeded,
    EndpointAccessDenied,
    EndpointMisconfigured,
    Forbidden,
    GraphError,
    GymError,
    InvalidRequest,
    MethodNotAllowed,
    ModelFailed,
    NotFound,
    OperatorError,
    Overloaded,
    PolicyDeadline,
    Rejected,
    RepeatedFailure,
    Retryable,
    SeedFailed,
    SessionLost,
    SessionNotFound,
    Stopped,
    TooLarge,
    ToolFailed,
    Unauthorized,
    Unavailable,
    VerifierFailed,
    VerifyFailed,
    WaitTooLong,
)
from gym_serve.types.model_endpoint import PolicyAnswer, PolicyRequest
from gym_serve.types.rows import Failure, Rollout, Row

if TYPE_CHECKING:
    __version__: str

    from gym_serve.client import AsyncGym, GroupStream, Gym
    from gym_serve.graph import Graph, GraphSpec, load_graph, resolve
    from gym_serve.rollouts import Budget, Group, Progress, PromptTemplate, Report, StreamCounts, merge

__all__ = [
    "AgentClient",
    "AgentFailed",
    "AgentServer",
    "AsyncGym",
    "AuthorError",
    "BadRequest",
    "Budget",
    "ClusterMismatch",
    "CompareFailed",
    "CompareRequest",
    "Comparison",
    "Conflict",
    "DeadlineExceeded",
    "EndpointAccessDenied",
    "EndpointMisconfigured",
    "EnvironmentClient",
    "Episode",
    "Failure",
    "Forbidden",
    "Graph",
    "GraphError",
    "GraphSpec",
    "Group",
    "GroupStream",
    "Gym",
    "GymError",
    "InvalidRequest",
    "MethodNotAllowed",
    "ModelClient",
    "ModelFailed",
    "ModelServer",
    "NotFound",
    "OperatorError",
    "Overloaded",
    "PolicyAnswer",
    "PolicyDeadline",
    "PolicyRequest",
    "Progress",
    "PromptTemplate",
    "Rejected",
    "RepeatedFailure",
    "Report",
    "ResourcesServer",
    "Response",
    "Retryable",
    "Rollout",
    "Row",
    "SeedFailed",
    "ServerRunner",
    "SessionLost",
    "SessionNotFound",
    "Stopped",
    "StreamCounts",
    "TooLarge",
    "ToolFailed",
    "Unauthorized",
    "Unavailable",
    "Verdict",
    "VerifierFailed",
    "VerifyFailed",
    "VerifyRequest",
    "WaitTooLong",
    "__version__",
    "load_graph",
    "merge",
    "resolve",
    "tool",
]

_LAZY = {
    "gym_serve.client": ("AsyncGym", "GroupStream", "Gym"),
    "gym_serve.graph": ("Graph", "GraphSpec", "load_graph", "resolve"),
    "gym_serve.rollouts": (
        *("Budget", "Group", "Progress", "PromptTemplate", "Report", "StreamCounts", "merge"),
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(module), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("gym-serve")
    raise AttributeError(f"module 'gym_serve' has no attribute {name!r}")
