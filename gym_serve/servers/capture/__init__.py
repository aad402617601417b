"""Rollout capture: an external harness talks to a model, and its calls become a rollout.

conversation   which conversation an input goes on with
tree           the calls of a harness, each under the one that it goes on with
trajectories   exact-prefix chains that can be trained on, branches kept apart
captures       the model server's side: sessions that record
recorded       the model, as a harness sees it
recording      the agent's side
"""

from gym_serve.servers.capture.captures import Captures
from gym_serve.servers.capture.recording import CLOSE, OPEN, TRAJECTORIES, Recording
from gym_serve.servers.capture.trajectories import chains_of, trajectories_of
from gym_serve.servers.capture.tree import CallTree, Node

__all__ = [
    "CLOSE",
    "OPEN",
    "TRAJECTORIES",
    "CallTree",
    "Captures",
    "Node",
    "Recording",
    "chains_of",
    "trajectories_of",
]
