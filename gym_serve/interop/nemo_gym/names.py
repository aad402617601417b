"""The names of NeMo Gym that NeMo RL imports, on a graph of gym_serve (see `install`).

The config is NeMo Gym's, and becomes a graph as by ``gym-serve import-nemo-gym``. Its key ``gym_serve`` is
for this module; see `Settings`.

NeMo RL ends the stream at a rollout without tokens, or whose tokens do not continue from turn to turn. So a
failed rollout has the flag ``mask_sample`` and a token to hold its place; NeMo RL keeps it out of the loss,
but in the baseline of its group, so its reward is the mean of the others. If a history was tokenized again,
the turns from there on keep their text and lose their tokens.

Pictures of prompts are in the row, where NeMo RL reads them. A tool's picture is a message after its answer.

Source: NVIDIA-NeMo/RL at 7ea279abf (August 2026), ``nemo_rl/environments/nemo_gym.py``; of pictures,
``nemo_gym_multimodal.py`` at 0bbe77f7f (September 2026).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Literal

import orjson
import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gym_serve.client import loop
from gym_serve.client.gym import Gym
from gym_serve.interop.nemo_gym import import_config
from gym_serve.rollouts import Group
from gym_serve.training.episodes import endpoints_of
from gym_serve.training.rollout import NotExportable, Rollout, token_parts
from gym_serve.training.samples import media_in
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.media import pictures_in
from gym_serve.types.protocols import TOKEN_KEYS
from gym_serve.types.requests import JSON, input_items

logger = logging.getLogger("gym_serve")

HEAD_SERVER_KEY_NAME = "head_server"

_POLICY = ("policy_base_url", "policy_model_name", "policy_api_key")
_OF_NEMO_RL = frozenset(
    {
        *(*_POLICY, "gym_serve", HEAD_SERVER_KEY_NAME),
        *("default_host", "ray_head_node_address", "num_gpu_nodes"),
        *("port_range_low", "port_range_high", "uv_cache_dir", "uv_venv_dir", "skip_venv_if_present"),
        *("global_aiohttp_connector_limit", "global_aiohttp_connector_limit_per_host"),
    }
)  # keys of the config that say nothing of the graph

_ILL = ("unhealthy", "unreachable")

_POLICY_URL = "${POLICY_BASE_URL}"  # what stands in an imported graph for NeMo Gym's ``policy_base_url``

_PLACE = {"prompt_token_ids": [0], "generation_token_ids": [0], "generation_log_probs": [0.0]}


class Settings(BaseModel):
    """The key ``gym_serve`` of ``env.nemo_gym``."""

    model_config = ConfigDict(extra="forbid")

    graph: str | JSON | None = None
    """A graph file, or what stands in one, instead of ``config_paths``. NeMo RL's policy takes the place of
    the models of its agents."""
    ray: bool = True
    """Whether the graph runs on NeMo RL's cluster, or in the process of the environment."""
    overrides: JSON = Field(default_factory=dict)
    """Values of the graph by path."""
    attempts: int = Field(3, ge=1)
    """How often a rollout is tried if its failure is worth it."""
    failures: Literal["mask", "raise"] = "mask"
    """A rollout that failed all attempts is masked; or it ends the stream as NeMo RL's typed failure, which
    its single controller tries again."""


class GlobalConfigDictParserConfig(BaseModel):
    """The config that NeMo RL makes."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    initial_global_config_dict: Any = None


class BaseServerConfig(BaseModel):
    """The address of a graph: its port names it in this process."""

    host: str
    port: int


class RolloutError(Exception):
    """A failed rollout, as NeMo RL reads failures: by their HTTP status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


class RunHelper:
    """Runs a graph."""

    def __init__(self) -> None:
        self._port: int | None = None

    def start(self, global_config_dict_parser_config: GlobalConfigDictParserConfig) -> None:
        """Run the graph of a config, and wait until it is ready. Raises GraphError, InvalidRequest: its
        problems; Unavailable: the graph did not start.
        """
        config = _plain(global_config_dict_parser_config.initial_global_config_dict)
        settings = Settings.model_validate(config.get("gym_serve") or {})
        port = int((config.get(HEAD_SERVER_KEY_NAME) or {}).get("port") or 0)
        graph, overrides = graph_of(config, settings)
        name = None if not settings.ray else f"nemo_gym_{port}"
        gym = Gym.from_graph(graph, overrides=overrides, name=name, ray=settings.ray)
        _running[port] = (gym, settings)
        self._port = port

    def poll(self) -> None:
        states = _gym_at(self._port)[0].health()
        ill = {name: state for name, state in states.items() if state["state"] in _ILL}
        if ill:
            raise RuntimeError(f"servers of the graph are not healthy: {ill}")

    def shutdown(self) -> None:
        """Take the graph down; safe to call twice."""
        if self._port in _running:
            _running.pop(self._port)[0].shutdown()


class RolloutCollectionHelper:
    """Makes rollouts."""

    def run_examples(
        self, examples: Sequence[JSON], head_server_config: BaseServerConfig | None = None, **options: Any
    ) -> Iterator[Awaitable[tuple[JSON, JSON]]]:
        """Awaitables of ``(row, result)`` as they complete; see the module. Equal rows are a group. Raises
        RolloutError: from each awaitable, if a rollout failed and ``failures`` is ``raise``.
        """
        gym, settings = _gym_at(None if head_server_config is None else head_server_config.port)
        return loop.awaitables(_results(gym, settings, examples), len(examples))


_running: dict[int, tuple[Gym, Settings]] = {}


def install() -> None:
    """Put the names of this module in the place of NeMo Gym's, in this process."""
    package = ModuleType("nemo_gym")
    package.__path__ = []
    sys.modules["nemo_gym"] = package
    for part in ("cli", "rollout_collection", "server_utils"):
        setattr(package, part, sys.modules[__name__])
        sys.modules[f"nemo_gym.{part}"] = sys.modules[__name__]


def graph_of(config: JSON, settings: Settings) -> tuple[Any, JSON]:
    """The graph of a config with NeMo RL's policy in it: for `Gym.from_graph`, with overrides. Raises
    GraphError, InvalidRequest: see `RunHelper.start`.
    """
    urls, name = config.get("policy_base_url"), config.get("policy_model_name")
    policy: JSON = {"base_url": urls, "model": name, "return_token_ids": True}
    policy["api_key"] = SecretStr(config.get("policy_api_key") or "")
    if settings.graph is not None:
        return settings.graph, endpoints_of(settings.graph, settings.overrides, **policy)
    own = {key: value for key, value in config.items() if key not in _OF_NEMO_RL}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "env_nemo_gym.yaml"
        file.write_text(yaml.safe_dump(own), "utf-8")
        graph = import_config([file], name="nemo_gym").config["applications"][0]["args"]
    policy_settings = {
        f"models.{name}.{key}": value
        for name, model in (graph.get("models") or {}).items()
        if model.get("base_url") == _POLICY_URL
        for key, value in policy.items()
    }
    return graph, {**settings.overrides, **policy_settings}


async def _results(gym: Gym, settings: Settings, rows: Sequence[JSON]) -> AsyncIterator[tuple[JSON, JSON]]:
    groups: dict[bytes, list[JSON]] = {}
    for row in rows:
        same = {key: value for key, value in row.items() if key != "_rowidx"}
        groups.setdefault(orjson.dumps(same, option=orjson.OPT_SORT_KEYS), []).append(row)
    by_size: dict[int, list[list[JSON]]] = {}
    for members in groups.values():
        by_size.setdefault(len(members), []).append(members)
    done: asyncio.Queue[tuple[Group, list[JSON]] | Exception | None] = asyncio.Queue()

    async def run(size: int, all_members: list[list[JSON]]) -> None:
        first_members = [{**members[0], "_ng_task_index": at} for at, members in enumerate(all_members)]
        options: Any = {"size": size, "quorum": 1, "attempts": settings.attempts, "concurrency": len(rows)}
        try:
            async for group in gym.groups(first_members, **options):
                done.put_nowait((group, all_members[group.task_index]))
            done.put_nowait(None)
        except Exception as error:
            done.put_nowait(error)

    running = [asyncio.ensure_future(run(size, members)) for size, members in by_size.items()]
    left = len(running)
    try:
        while left:
            item = await done.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
                continue
            group, members = item
            if settings.failures == "raise" and group.failures:
                failure: Any = group.failures[0].failure or {}
                status = 503 if failure.get("retryable") else 422
                raise RolloutError(status, f"{failure.get('kind')}: {failure.get('detail')}")
            for pair in zip(members, results_of(group), strict=True):
                yield pair
    finally:
        for task in running:
            task.cancel()


def results_of(group: Group) -> list[JSON]:
    """The rollouts of a group as results for NeMo RL: the scored ones first."""
    scored = [rollout for rollout in group.rollouts if group.usable and not rollout.masked]
    masked = [rollout for rollout in (*group.rollouts, *group.failures) if rollout not in scored]
    neutral = fmean(rollout.reward for rollout in scored) if scored else 0.0
    return [*map(result_of, scored), *(result_of(rollout, neutral) for rollout in masked)]


def result_of(rollout: JSON, neutral: float | None = None) -> JSON:
    """A rollout as a result for NeMo RL; ``neutral`` is its reward if it must not be trained on."""
    own = {key: value for key, value in rollout.items() if key not in _CAPTURED}
    params = own.get("responses_create_params") or {}
    response = own.get("response")
    response = dict(response) if isinstance(response, dict) else {}
    output, is_empty = _trainable(own, list(response.get("output") or ()))
    response["output"] = [each for item in output for each in _shown(item)]
    items = input_items(params.get("input") or [])
    if is_empty and any(media_in(items)):
        response["agent_input"] = [{"role": "user", "content": ""}]  # the place has no token of a picture
    result = {
        **own,
        "responses_create_params": {**params, "input": items},
        "response": response,
        "reward": float(own.get("reward") or 0.0),
    }
    if neutral is None and not is_empty and not own.get("mask_sample"):
        return result
    config = own.get("instance_config")
    flagged = {**(config if isinstance(config, dict) else {}), "mask_sample": True}
    reward = result["reward"] if neutral is None else neutral
    return {**result, "mask_sample": True, "instance_config": flagged, "reward": reward}


_CAPTURED = frozenset({"branches", "captured_input", "captured_context"})


def _shown(item: JSON) -> Iterator[JSON]:
    """An item, and after it the pictures of a tool as a message: NeMo RL finds them in messages, and in an
    answer that is one URL."""
    yield item
    answer = item.get("output") if item.get("type") == "function_call_output" else None
    parts = [part for part in answer if list(pictures_in([part]))] if isinstance(answer, list) else []
    if parts:
        yield {"type": "message", "role": "user", "content": parts}


def _trainable(rollout: JSON, output: list[JSON]) -> tuple[list[JSON], bool]:
    """The items of a rollout whose tokens continue from turn to turn, and whether there are none at all."""
    try:
        parts = token_parts(Rollout.read({**rollout, "mask_sample": True}))
    except NotExportable as error:
        logger.warning("a rollout is masked, as its tokens cannot be read: %s", error)
        parts = []
    kept = {turn.item for turn in parts[0]} if parts else set()
    items = [
        item if at in kept else {key: value for key, value in item.items() if key not in TOKEN_KEYS}
        for at, item in enumerate(output)
    ]
    if len(parts) > 1:
        turns = sum(map(len, parts))
        logger.warning(
            "rollout %s: its history was tokenized again; %d of %d turns are not trained on",
            rollout.get("_ng_rollout_id"), turns - len(kept), turns,
        )  # fmt: skip
    if not kept:
        content = [{"type": "output_text", "text": "", "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": content, **_PLACE})
    return items, not kept


def _gym_at(port: int | None) -> tuple[Gym, Settings]:
    if port not in _running:
        raise RuntimeError("no graph runs here: call RunHelper.start first")
    return _running[port]


def _plain(config: Any) -> JSON:
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=False)
    if not isinstance(config, Mapping):
        raise InvalidRequest(f"`initial_global_config_dict` must be a mapping, got {type(config).__name__}")
    return dict(config)
