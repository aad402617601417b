"""Rollout capture, its pure part: the recorded model calls of an external harness become trajectories.

conversation   which earlier conversation an input continues
tree           the calls of a harness as a tree, and the trajectories that can be trained on

The model server's operations that record are in `gym_serve.servers.captures`.
"""

from gym_serve.capture.tree import CallTree, Node, chains_of, trajectories_of, with_bundle, without_tokens

__all__ = ["CallTree", "Node", "chains_of", "trajectories_of", "with_bundle", "without_tokens"]
