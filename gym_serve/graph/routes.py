"""Which server and operation an HTTP request asks for.

Routes are ``/{server}/{operation}``, with the operations of docs/formats.md; a tool is a route of
its resources server like the others there, but has a namespace of its own inside (``tools/{name}``),
so that no tool and no path can be taken for ``verify`` or another route.

A model is also found below ``/{model}/rollouts/{id}``, where its calls are recorded for an external harness
(`gym_serve.servers.captures`): the id is a session, and stands in the path as harnesses take no header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gym_serve.graph.spec import Node, nearest
from gym_serve.servers.captures import CLOSE, OPEN, TRAJECTORIES
from gym_serve.servers.model import COUNT_TOKENS
from gym_serve.servers.protocols import PROTOCOLS
from gym_serve.servers.runner import GETS
from gym_serve.servers.tools import RESERVED, is_tool_name
from gym_serve.types.errors import NotFound

__all__ = ["Route", "find_route"]

_POSTS = frozenset({"run", "aggregate_metrics", OPEN, COUNT_TOKENS, *PROTOCOLS})
_IN_SESSION = frozenset({"verify", "step", "close", "close_session"})


class Route(NamedTuple):
    """A place to send a call to.

    Attributes:
        server: name of the server.
        op: its operation.
        method: HTTP method that the route takes.
        beside: another one, which is another operation.
        in_session: whether the call goes to the replica that holds the client's session.
        session: the session that the path names.
    """

    server: str
    op: str
    method: str = "POST"
    in_session: bool = False
    session: str | None = None
    beside: str | None = None


def find_route(method: str, path: str, nodes: Mapping[str, Node]) -> Route:
    """The route behind a path below the graph's, without a slash at either end.

    The method of an operation that is in no contract is POST: which ones there are, the server knows.

    Raises:
        NotFound: there is no such server, or it can have no such route.
    """
    server, _, op = path.partition("/")
    if server not in nodes:
        shown = server[:100]
        raise NotFound(f"no server {shown!r} in this graph{nearest(shown, nodes)}")
    if nodes[server].kind == "model" and op.startswith(f"{OPEN}/"):
        return _in_capture(method, server, op)
    resources = nodes[server].kind == "resources"
    if op in GETS:
        return Route(server, op, "GET")
    if resources and op in RESERVED:
        return Route(server, op, in_session=op in _IN_SESSION)
    if resources and is_tool_name(op):
        return Route(server, f"tools/{op}", in_session=True)
    if resources or (method != "POST" and op not in _POSTS):
        raise NotFound(f"{server} has no route /{op[:100]}")
    return Route(server, op)


def _in_capture(method: str, server: str, op: str) -> Route:
    _, session, called = (*op.split("/", 2), "")[:3]
    if called:
        in_v1 = f"{OPEN}/{called}"
        return Route(server, in_v1, "GET" if called in GETS else "POST", session=session)
    if method == "DELETE":
        return Route(server, CLOSE, "DELETE", session=session, beside="GET")
    return Route(server, TRAJECTORIES, "GET", session=session, beside="DELETE")
