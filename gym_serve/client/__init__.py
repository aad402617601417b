"""`Gym` and `AsyncGym`, the objects that trainers and evaluations use."""

from gym_serve.client.core import GroupStream
from gym_serve.client.gym import AsyncGym, Gym

__all__ = ["AsyncGym", "GroupStream", "Gym"]
