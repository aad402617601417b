"""From rollouts to what trainers learn from."""

from gym_serve.training.samples import TrainingSample, advantages, collate, samples

__all__ = ["TrainingSample", "advantages", "collate", "samples"]
