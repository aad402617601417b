"""The `gym-serve` command. Importing its commands starts nothing and loads no Ray."""

import signal

try:
    from gym_serve.cli.app import main
except KeyboardInterrupt:  # there is no command yet that could say so
    raise SystemExit(128 + signal.SIGINT) from None

__all__ = ["main"]
