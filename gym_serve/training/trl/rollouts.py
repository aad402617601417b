"""`rollout_func`: rollouts of a graph for TRL's `GRPOTrainer`.

The engine in the graph gets the trainer's weights before it generates, whenever they have changed. A prompt
is all that TRL passes on, so the row of each is found again in the trainer's dataset. Tokens, mask and
log-probabilities are those of `samples`. A failed rollout is masked and has no reward: it neither trains nor
moves its group's mean.

`RolloutWorker`: rollouts of a graph for TRL's `AsyncGRPOTrainer`, which trains while they run.

The trainer takes samples from a queue, which a thread of its process fills with the groups of `Gym.stream`:
rows are drawn without end, and no group is older than ``max_staleness``. After every ``weight_sync_steps``
the trainer stops the engine between two tokens, sends its weights and lets it go on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import orjson
from typing_extensions import Unpack

from gym_serve.client import Gym, loop
from gym_serve.client.rollout_client import RolloutOptions
from gym_serve.rollouts import Group, Rows
from gym_serve.rollouts.rows import read_rows
from gym_serve.training.samples import TrainingSample, advantages, samples, verified
from gym_serve.training.weights import encoded, trained_model
from gym_serve.types.errors import BadRequest, GymError, InvalidRequest, Unavailable
from gym_serve.types.exact import exact_bytes, exact_json
from gym_serve.types.protocols import responses_to_chat
from gym_serve.types.protocols.content import content_text
from gym_serve.types.requests import JSON
from gym_serve.types.rows import check_row, with_prompt

if TYPE_CHECKING:
    import torch
    from datasets import Dataset


logger = logging.getLogger("gym_serve")

ROW = "row"  # the column of `dataset` that holds a row as JSON


def dataset(rows: Rows) -> Dataset:
    """Rows as a dataset for TRL: their prompts, and beside each its row as JSON. Raises `InvalidRequest` with
    the place of a row that cannot be used."""
    try:
        from datasets import Dataset
    except ModuleNotFoundError as error:
        problem = "dataset needs datasets: pip install 'gym-serve[trl]'"
        raise ModuleNotFoundError(problem, name=error.name) from error
    checked = checked_rows(rows)
    prompts = [messages_of(row["responses_create_params"]) for row in checked]
    return Dataset.from_dict({"prompt": prompts, ROW: [exact_bytes(row).decode() for row in checked]})


def rollout_func(gym: Gym, *, model: str | None = None, **options: Unpack[RolloutOptions]) -> RolloutFunc:
    """The ``rollout_func`` of a `GRPOTrainer` whose policy is an engine of a graph.

    Sampling is that of the trainer. Give it `rollout_reward` as its ``reward_funcs``, alone or beside others,
    and `dataset` as its data, or one of your own whose columns are the keys of rows. ``model`` is the engine
    that is trained, with ``weight_updates`` on; by default the agents' only one.
    """
    if "repeats" in options:
        problem = "must be left out: `num_generations` of GRPOConfig says how many rollouts"
        raise InvalidRequest(f"`repeats` {problem}")
    return RolloutFunc(gym, trained_model(gym, model), options)


def rollout_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    rollout_reward: list[float | None],
    rollout_metrics: list[dict[str, float]],
    log_metric: Any,
    **columns: Any,
) -> list[float | None]:
    """The reward function of a `GRPOTrainer` with `rollout_func`: each completion has the reward of its
    rollout; None for a failed rollout, which TRL then leaves out."""
    for name, value in rollout_metrics[0].items():
        log_metric(name, value)
    return rollout_reward


class RolloutFunc:
    """What `rollout_func` returns."""

    def __init__(self, gym: Gym, model: str, options: RolloutOptions) -> None:
        self._gym = gym
        self._model = model
        self._options = options
        self._rows: _RowsByPrompt | None = None
        self._step: int | None = None  # the one whose weights the engine has
        self._tasks = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Rollouts of a batch: lists for each of n prompts, and what `rollout_reward` is given."""
        begun = time.monotonic()
        step = self._push(trainer)
        pushed = time.monotonic()
        trained = self._trained(loop.wait(self._collected(prompts, trainer)), trainer)
        return {
            "prompt_ids": [sample.prompt_ids for sample in trained],
            "completion_ids": [sample.response_ids for sample in trained],
            "logprobs": [sample.logprobs for sample in trained],
            "env_mask": [sample.loss_mask for sample in trained],
            "rollout_reward": [None if sample.failure else sample.reward for sample in trained],
            "rollout_metrics": {
                "rollouts/failed": float(sum(sample.failure is not None for sample in trained)),
                "rollouts/staleness": _mean_staleness(trained, step),
                "rollouts/seconds": time.monotonic() - pushed,
                "rollouts/weights_seconds": pushed - begun,
            },
        }

    def _push(self, trainer: Any) -> int:
        step: int = trainer.state.global_step
        if step != self._step:
            if hasattr(trainer.accelerator.unwrap_model(trainer.model), "merge_adapter"):
                raise BadRequest("rollout_func cannot train adapters of PEFT: train the model itself")
            state = trainer.accelerator.get_state_dict(trainer.model)  # in every process: they gather it
            if trainer.accelerator.is_main_process:
                self._gym.policy.update_weights(self._model, str(step), tensors=encoded(state.items()))
            trainer.accelerator.wait_for_everyone()
            self._step = step
        return step

    async def _collected(self, prompts: list[Any], trainer: Any) -> list[JSON]:
        """A rollout of each prompt, failed ones among them."""
        groups = self._asked(prompts, trainer)
        options: RolloutOptions = {**self._options, "params": self._params(trainer)}
        first = self._tasks  # so that no two rollouts of the run have the same id
        self._tasks += len(groups)
        found: list[list[JSON]] = [[] for _ in groups]
        for size in {size for _, size in groups}:
            rows = [{**row, "_ng_task_index": first + i} for i, (row, n) in enumerate(groups) if n == size]
            async for group in self._gym.groups(rows, size=size, quorum=1, **options):
                found[group.task_index - first] = [*group.rollouts, *group.failures]
        return [rollout for rollouts in found for rollout in rollouts]

    def _asked(self, prompts: list[Any], trainer: Any) -> list[tuple[JSON, int]]:
        if self._rows is None:
            self._rows = _RowsByPrompt([trainer.train_dataset, trainer.eval_dataset])
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        groups: list[tuple[JSON, int]] = []
        for key, same in groupby(map(_key, prompts)):
            row, count = self._rows.find(key), len(list(same))
            groups += [(row, min(size, count - at)) for at in range(0, count, size)]
        return groups

    def _params(self, trainer: Any) -> dict[str, Any]:
        """How the policy is sampled: as the trainer computes its probabilities."""
        args = trainer.args
        if args.top_k or args.min_p or args.repetition_penalty != 1.0:
            raise InvalidRequest(
                "`top_k`, `min_p` and `repetition_penalty` of GRPOConfig must be left out, got "
                f"{args.top_k}, {args.min_p} and {args.repetition_penalty}: the probabilities in the "
                "trainer's loss know none of them"
            )
        own = {"max_output_tokens": args.max_completion_length, **self._options.get("params", {})}
        return {**own, "temperature": args.temperature, "top_p": args.top_p}

    def _trained(self, rollouts: list[JSON], trainer: Any) -> list[TrainingSample]:
        pad = trainer.processing_class.pad_token_id
        cut = [_of_text(samples(rollout, pad_token_id=pad)) for rollout in rollouts]
        if left := sum(map(len, cut)) - len(cut):
            logger.warning(
                "%d samples are not trained on: GRPOTrainer takes one of a rollout, and these have several "
                "(branches, or a history that was tokenized again); AsyncGRPOTrainer takes all",
                left,
            )
        return [verified(of_one) for of_one in cut]


def _of_text(found: list[TrainingSample]) -> list[TrainingSample]:
    """Samples; TRL would compute the log-probabilities of its policy without the pictures."""
    if any(sample.media for sample in found):
        raise InvalidRequest(
            f"rollout {found[0].rollout_id}: TRL takes text only from rollouts; pictures of tools reach its "
            "models by environment_factory"
        )
    return found


def checked_rows(rows: Rows) -> list[JSON]:
    """Rows with their ``responses_create_params``; `InvalidRequest` with the place of one that cannot be
    used."""
    checked: list[JSON] = []
    for where, row, problem in read_rows(rows):
        if row is None:
            raise InvalidRequest(f"{where}: {problem}")
        try:
            check_row(row := with_prompt(row))
        except GymError as error:
            raise InvalidRequest(f"{where}: {error.message}") from None
        checked.append(row)
    return checked


def messages_of(params: JSON) -> list[JSON]:
    """The messages of a Responses body as TRL shows them; what is not text in them is JSON."""
    messages = responses_to_chat(params)["messages"]
    return [{"role": message["role"], "content": _text(message.get("content"))} for message in messages]


def oldest_version(sample: TrainingSample) -> int | None:
    """The oldest version that tokens of a sample come from; None where none is known that is a number."""
    versions = [int(version) for version in sample.versions if version is not None and version.isdigit()]
    return min(versions, default=None)


def row_of(example: JSON) -> JSON:
    """The row of an example of `dataset`, or of a user's own dataset whose columns are a row's keys."""
    if isinstance(example.get(ROW), str):
        row: JSON = exact_json(example[ROW])
        return row
    return with_prompt({key: value for key, value in example.items() if value is not None})


class _RowsByPrompt:
    """The rows of a trainer's datasets, by their prompts."""

    def __init__(self, datasets: list[Any]) -> None:
        self._places: dict[bytes, tuple[Any, int]] = {}
        for given in datasets:
            for examples in given.values() if isinstance(given, dict) else [given]:
                if examples is not None:
                    self._add(examples)

    def find(self, key: bytes) -> JSON:
        if key not in self._places:
            raise InvalidRequest(f"no row of the trainer's dataset has the prompt {key[:200].decode()}")
        examples, index = self._places[key]
        return row_of(examples[index])

    def _add(self, examples: Any) -> None:
        if not hasattr(examples, "__getitem__"):
            problem = "must not be streamed: rollout_func finds rows by their prompts in it"
            raise InvalidRequest(f"the dataset {problem}")
        for index, example in enumerate(examples):
            key = _key(example["prompt"])
            if key in self._places and self.find(key) != row_of(example):
                raise InvalidRequest(
                    f"rows {self._places[key][1]} and {index} of the dataset have the same prompt and differ "
                    "otherwise: make the prompts differ, as TRL passes nothing else to rollout_func"
                )
            self._places[key] = (examples, index)


def _key(prompt: Any) -> bytes:
    return exact_bytes(prompt, orjson.OPT_SORT_KEYS)


def _text(content: Any) -> str:
    parts = [] if isinstance(content, str) or content is None else content
    if any(part.get("type") != "text" for part in parts):
        return exact_bytes(content).decode()
    return content_text(content)


def _mean_staleness(of: list[TrainingSample], version: int) -> float:
    """How many updates older than ``version`` the oldest token of a sample is, on average."""
    ages = [version - oldest for sample in of if (oldest := oldest_version(sample)) is not None]
    return sum(ages) / len(ages) if ages else 0.0


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

        cut = [(rollout, sample) for rollout in group.rollouts for sample in _of_text(samples(rollout))]
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
