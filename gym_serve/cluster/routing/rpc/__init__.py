"""Calls between replicas: MessagePack-RPC in the frames of one WebSocket per pair of processes.

Ray Serve stays the control plane. One handle call costs 1.2 to 2.7 ms of CPU and a rollout needs seven of
them; a frame costs 0.1 ms, and under load many calls share one (docs/performance.md). WebSockets (RFC 6455)
are aiohttp's, and MessagePack-RPC (https://github.com/msgpack-rpc/msgpack-rpc/blob/master/spec.md) msgspec's.
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
