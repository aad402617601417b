"""The `gym-serve` command. Importing its commands starts nothing and loads no Ray."""

from gym_serve.cli.app import main

__all__ = ["main"]
