"""`Gym` and `AsyncGym`, the objects that trainers and evaluations use."""

from gym_serve.client.gym import AsyncGym, Gym
from gym_serve.client.stream import GroupStream

__all__ = ["AsyncGym", "GroupStream", "Gym"]
