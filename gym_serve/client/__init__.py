"""`Gym`, the object that trainers and evaluations use."""

from gym_serve.client.gym import Gym
from gym_serve.client.stream import GroupStream

__all__ = ["GroupStream", "Gym"]
