"""`RolloutWorker`: rollouts of a graph for TRL's `AsyncGRPOTrainer`, which trains while they run.

The trainer takes samples from a queue, which a thread of its process fills with the groups of `Gym.stream`:
rows are drawn without end, and no group is older than ``max_staleness``. After every ``weight_sync_steps``
the trainer stops the engine between two tokens, sends its weights and lets it go on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from gym_serve.client import Gym
from gym_serve.client.rollout_client import RolloutOptions
from gym_serve.rollouts import Group, Rows
from gym_serve.training.samples import TrainingSample, advantages, samples
from gym_serve.training.trl.rollouts import checked_rows, messages_of, oldest_version
from gym_serve.training.weights import encoded, trained_model
from gym_serve.types.errors import InvalidRequest, Unavailable
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.02


class RolloutWorker:
    """The ``rollout_worker`` of an `AsyncGRPOTrainer`, and its ``weight_transfer``: give it as both.

    Args:
        max_staleness: how many updates of the weights old a group may be when the trainer takes it.
        model: the engine that is trained, with ``weight_updates`` on; by default the agents' only one.
        **options: see `RolloutOptions`; without ``repeats``.
    """

    def __init__(
        self,
        gym: Gym,
        rows: Rows,
        *,
        size: int,
        max_staleness: int,
        model: str | None = None,
        **options: Unpack[RolloutOptions],
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._gym = gym
        self._model = trained_model(gym, model)
        self._rows = checked_rows(rows)
        if not self._rows:
            raise InvalidRequest("`rows` must have at least one row, got none")
        self._size = size
        self._version = 0
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._groups = gym.stream(
            self._endless(), size=size, max_staleness=max_staleness, quorum=1, **options
        )

    # What the trainer asks of a rollout worker

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="RolloutWorker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; rollouts that run are cancelled."""
        self._stopping.set()
        self._groups.close()
        if self._thread is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """The version that the trainer counts; the engine has it since `send_weights`."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        if self._error is not None:
            raise Unavailable(f"no rollouts any more: {self._error}") from self._error
        if self._thread is None or not self._thread.is_alive():
            raise Unavailable("no rollouts: the worker is not running")

    # What it asks of a weight transfer

    def init_weight_transfer(self) -> None:
        """Nothing: the graph is connected."""

    def pause(self) -> None:
        self._gym.policy.pause("keep", model=self._model)

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Give the engine weights; the trainer counts their version in the same way."""
        self._version += 1
        self._gym.policy.update_weights(self._model, str(self._version), tensors=encoded(iterator))

    def resume(self) -> None:
        self._gym.policy.resume(model=self._model)

    def destroy(self) -> None:
        """Nothing: the graph is the caller's."""

    # The rollouts

    def _run(self) -> None:
        try:
            for group in self._groups:
                for sample in self._samples_of(group):
                    self.rollout_buffer.put(sample)
                while not (self.rollout_buffer.empty() or self._stopping.wait(_POLL_SECONDS)):
                    pass  # the next group is taken when the trainer wants it
        except Exception as error:  # the trainer learns of it by `check_health`
            self._error = error

    def _endless(self) -> Iterator[JSON]:
        for task in count():
            yield {**self._rows[task % len(self._rows)], "_ng_task_index": task}

    def _samples_of(self, group: Group) -> Iterator[Any]:
        """What the trainer learns from a group: nothing of its failures."""
        import numpy as np
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        cut = [(rollout, sample) for rollout in group.rollouts for sample in samples(rollout)]
        scored = [(rollout, sample) for rollout, sample in cut if sample.failure is None]
        if not scored:
            return
        own_samples: list[TrainingSample] = [sample for _, sample in scored]
        for (rollout, sample), advantage in zip(scored, advantages(own_samples), strict=True):
            version = oldest_version(sample)
            yield RolloutSample(
                prompt=messages_of(rollout["responses_create_params"]),
                completion=messages_of({"input": rollout["response"]["output"]}),
                input_ids=np.asarray(sample.input_ids),
                completion_mask=np.asarray([0] * len(sample.prompt_ids) + sample.loss_mask),
                old_log_probs=np.asarray([0.0] * len(sample.prompt_ids) + sample.logprobs),
                advantage=advantage,
                model_version=self._version if version is None else version,
                group_id=group.task_index,
                metrics={
                    "reward": sample.reward,
                    "rollouts/failed": len(group.failures) / self._size,
                    "rollouts/staleness": float(group.staleness or 0),
                },
                enqueued_at=time.time(),
            )
