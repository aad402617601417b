"""Calls between replicas: MessagePack-RPC in the frames of one WebSocket per pair of processes.

Ray Serve stays the control plane: it starts replicas, tells which ones run, scales and replaces
them. The calls themselves do not pass through it, as one handle call costs 1.2 to 2.7 ms of CPU
and a rollout needs seven of them; a frame costs 0.1 ms, and under load many calls share one
(docs/performance.md has the measurements).

Both halves are standards with kept libraries: RFC 6455 by aiohttp, and the MessagePack-RPC
specification (https://github.com/msgpack-rpc/msgpack-rpc/blob/master/spec.md) by msgspec. Where Ray runs
with TLS, so do they, with its certificates.
"""

from gym_serve.cluster.routing.rpc.channel import (
    Channel,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
    NotDeliveredError,
    QueueFullError,
    RpcError,
)
from gym_serve.cluster.routing.rpc.listener import Listener
from gym_serve.cluster.routing.rpc.network import Address, Directory

__all__ = [
    "Address",
    "Channel",
    "ConnectError",
    "ConnectTimeoutError",
    "ConnectionLostError",
    "Directory",
    "Listener",
    "NotDeliveredError",
    "QueueFullError",
    "RpcError",
]
