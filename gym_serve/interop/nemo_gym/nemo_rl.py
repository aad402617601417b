"""NeMo RL on gym_serve: its own actor ``NemoGym``, with gym_serve's graph in the place of NeMo Gym's servers.

    python -m gym_serve.interop.nemo_gym.nemo_rl examples/nemo_gym/run_grpo_nemo_gym.py --config grpo.yaml

runs NeMo RL's script with `use`, which changes the class of the actor and the Python that it runs with. The
actor survives its process: Ray starts it again, and it makes its graph and tokenizer anew.

Pictures are attached to the messages by the actor itself, if it has a processor (Nemotron's vision models).

Source: NVIDIA-NeMo/RL at 7ea279abf (August 2026), ``nemo_rl/environments/nemo_gym.py``.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import AsyncGenerator
from typing import Any

from gym_serve.interop.nemo_gym import names
from gym_serve.training.episodes import refuse_unseen
from gym_serve.types.requests import JSON

_ACTOR = "nemo_rl.environments.nemo_gym.NemoGym"


def environment() -> type[Any]:
    """The class of NeMo RL's actor, changed."""
    from nemo_rl.environments import nemo_gym as theirs

    original: Any = theirs.NemoGym.__ray_metadata__.modified_class

    class NemoGym(original):  # type: ignore[misc]  # found at run time
        _tokenizer: Any
        _ended = False

        def _spinup(self) -> None:
            names.install()
            super()._spinup()

        def _require_spinup(self) -> None:
            if self.rh is None and not self._ended:
                self._spinup()
            super()._require_spinup()

        async def run_rollouts(
            self, nemo_gym_examples: list[JSON], *args: Any, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            self._require_spinup()
            for row in nemo_gym_examples:
                refuse_unseen(row, sees=getattr(self, "_processor", None) is not None)
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(self.cfg["model_name"])
            async for result in super().run_rollouts(nemo_gym_examples, *args, **kwargs):
                yield result

        def shutdown(self) -> None:
            self._ended = True
            super().shutdown()

    return NemoGym


def use() -> None:
    """Put the actor in the place of NeMo RL's, in this process. Call it before the trainer is set up."""
    import ray
    from nemo_rl.distributed import ray_actor_environment_registry as registry
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
    from nemo_rl.environments import nemo_gym as theirs

    theirs.NemoGym = ray.remote(max_restarts=-1, max_task_retries=-1)(environment())
    registry.ACTOR_ENVIRONMENT_REGISTRY[_ACTOR] = PY_EXECUTABLES.SYSTEM


def main() -> None:
    """Run a script of NeMo RL with `use`."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m gym_serve.interop.nemo_gym.nemo_rl SCRIPT [ARGUMENTS...]")
    use()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
