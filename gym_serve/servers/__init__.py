"""The three kinds of server, as their authors write them: plain classes without Ray."""

from gym_serve.servers.agent import AgentServer
from gym_serve.servers.base import Operation, Server
from gym_serve.servers.clients import AgentClient, EnvironmentClient, ModelClient
from gym_serve.servers.episode import Episode
from gym_serve.servers.model import ModelServer
from gym_serve.servers.resources import ResourcesServer
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.tools import ToolSpec, tool
from gym_serve.servers.transport import Call, Reply, Transport
from gym_serve.types.requests import CompareRequest, Comparison, Response, Verdict, VerifyRequest

__all__ = [
    "AgentClient",
    "AgentServer",
    "Call",
    "CompareRequest",
    "Comparison",
    "EnvironmentClient",
    "Episode",
    "ModelClient",
    "ModelServer",
    "Operation",
    "Reply",
    "ResourcesServer",
    "Response",
    "Server",
    "ServerRunner",
    "ToolSpec",
    "Transport",
    "Verdict",
    "VerifyRequest",
    "tool",
]
