"""What every trainer's adapter must get right: seven environments, and what can become of a rollout in each.

`CASES` are groups of rollouts of one prompt. A prompt says which case it is, and `said` what the engine
answers. `Sample` is what a trainer got for a rollout, in one form for all of them; `test_acceptance.py` holds
it against what the engine sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import importlib.abc
import importlib.machinery
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[1]))  # `support`, in a script

from support.eyes import PROMPT, SHOWN

from gym_serve import ModelServer, ResourcesServer, Unavailable, Verdict, VerifyRequest, tool
from gym_serve.servers.clients import ModelClient
from gym_serve.types.media import opened
from gym_serve.types.requests import CompareRequest, Comparison

ENVIRONMENTS = ("single", "tool", "stateful", "judge", "group", "harness")
OUTCOMES = ("accepted", "rejected", "failed", "cancelled", "truncated", "straddled", "mixed")
LONGEST_PROMPT, LONGEST_RESPONSE = 1500, 400
"""Limits of the trainers, in tokens."""
YES, CHATTER = "yes", "and so on " * 60
"""The right answer, and one that is longer than `LONGEST_RESPONSE`."""


@dataclass(frozen=True)
class Case:
    """A group of rollouts of one prompt.

    Attributes:
        environment: of `ENVIRONMENTS`, or ``failing``.
        outcome: of `OUTCOMES`; of ``failing``, what raises: ``seed``, ``tool``, or ``verify``. ``mixed`` is a
            failure, a reward of 1 and one of 0. ``branches`` is ``harness`` with a sub-agent. ``abandoned``
            ends when the trainer cancels it.
    """

    environment: str
    outcome: str

    @property
    def name(self) -> str:
        return f"{self.environment}/{self.outcome}"

    @property
    def size(self) -> int:
        """Rollouts of the group."""
        return 3 if self.outcome == "mixed" else 2

    @property
    def fails(self) -> bool:
        """Whether none of its rollouts has a reward."""
        return self.outcome in ("failed", "cancelled", "seed", "verify")

    @property
    def row(self) -> dict[str, Any]:
        agent = {"type": "responses_api_agents", "name": f"{self.environment}_agent"}
        return {"responses_create_params": {"input": [{"role": "user", "content": f"case: {self.name}"}]}} | {
            "agent_ref": agent
        }

    @property
    def prompt(self) -> list[dict[str, str]]:
        messages: list[dict[str, str]] = self.row["responses_create_params"]["input"]
        return messages


CASES = [
    *(Case(environment, outcome) for environment in ENVIRONMENTS for outcome in OUTCOMES),
    Case("harness", "branches"),
    *(Case("failing", stage) for stage in ("seed", "tool", "verify")),
]

ABANDONED = Case("stateful", "abandoned")
"""Goes on until the trainer cancels it: its second generation does not end."""


@dataclass(frozen=True)
class Seen(Case):
    """A case with a picture in its prompt, and one in the answer of its tool."""

    @property
    def row(self) -> dict[str, Any]:
        row = super().row
        [message] = row["responses_create_params"]["input"]
        text = {"type": "input_text", "text": message["content"]}
        message["content"] = [PROMPT, text]
        return row


SEEN = Seen("seen", "accepted")
"""Not among `CASES`: a trainer that reads pictures is given a processor for it."""


def seen(processor: Any, sequence: Sequence[int], pictures: Any, grid: Any) -> dict[str, Any]:
    """What a trainer was given for the pictures of `SEEN`: how many tokens of its sequence show them, how
    many patches the model is given, and whether these are those of the two pictures."""
    both = [opened(each["image_url"]) for each in (PROMPT, SHOWN)]
    expected = processor.image_processor(both, return_tensors="pt")
    same = pictures.equal(expected["pixel_values"]) and grid.equal(expected["image_grid_thw"])
    return {
        "tokens": list(sequence).count(processor.image_token_id),
        "patches": len(pictures),
        "same": same,
    }


def case_of(text: str) -> Case:
    """The case of a prompt."""
    found = re.search(r"case: (\w+)/(\w+)", text)
    assert found is not None, text
    return Case(*found.groups())


def said(text: str) -> str:
    """What the engine says to the text of a prompt."""
    case, turn = case_of(text), max(text.count("<|im_start|>assistant") - 1, 0)
    calls = {
        "tool": [("look_up", {"word": "x"})],
        "seen": [("look_up", {"word": "x"})],
        "stateful": [("add", {"number": 1}), ("add", {"number": 2})],
        "failing": [("crash", {})] if case.outcome == "tool" else [],
    }.get(case.environment, [])
    if turn < len(calls):
        name, arguments = calls[turn]
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    return {"rejected": "no", "truncated": CHATTER}.get(case.outcome, YES)


class Answered(ResourcesServer):
    """Is content with `YES`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._mixed: dict[str, int] = defaultdict(int)

    async def verify(self, request: VerifyRequest) -> Verdict:
        return await self.scored(request, float(request.response.last_text == YES))

    async def scored(self, request: VerifyRequest, reward: float) -> Verdict:
        """The verdict, or what the case has instead."""
        case = case_of(str(request.responses_create_params["input"]))
        if case.outcome == "failed":
            raise Unavailable("the verifier is away")
        if case.outcome == "mixed":
            self._mixed[case.name] += 1
            if self._mixed[case.name] == 1:
                raise Unavailable("the verifier is away for once")
            reward = float(self._mixed[case.name] % 2)
        return Verdict(reward=reward)


class Tools(Answered):
    """Has a tool."""

    @tool
    async def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: what is looked up.
        """
        return f"{word} is a letter"


class Shows(Answered):
    """Has a tool whose answer is seen."""

    @tool
    async def look_up(self, word: str) -> list[dict[str, Any]]:
        """Look a word up.

        Args:
            word: what is looked up.
        """
        return [{"type": "input_text", "text": f"{word} is a letter"}, SHOWN]


class Stateful(Answered):
    """Adds numbers up, over several turns, and notes which sessions are open."""

    class Config(ResourcesServer.Config):
        log: str

    config: Config

    class Session:
        """The state of an episode."""

        total: int = 0

    @tool
    async def add(self, number: int, session: Session) -> str:
        """Add a number.

        Args:
            number: what is added.
        """
        session.total += number
        return f"the total is {session.total}"

    async def seed(self, row: dict[str, Any], session: Session) -> None:
        self._note("open")

    async def close(self, session: Session) -> None:
        self._note("close")

    def _note(self, text: str) -> None:
        with Path(self.config.log).open("a") as log:
            log.write(text + "\n")

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        right = session.total == 3 and request.response.last_text == YES
        return await self.scored(request, float(right))


class Judge(ModelServer):
    """Repeats what it is given."""

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "output_text", "text": str(body["input"]), "annotations": []}]
        message = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }
        return {"id": "r", "object": "response", "created_at": 0, "model": "judge", "output": [message]}


class Judged(Answered):
    """Lets a judge decide."""

    class Config(ResourcesServer.Config):
        judge: ModelClient

    config: Config

    async def verify(self, request: VerifyRequest) -> Verdict:
        answer = await self.config.judge.responses({"input": request.response.last_text})
        return await self.scored(request, float(answer["output"][0]["content"][0]["text"] == YES))


class Compared(Answered):
    """Rewards a rollout by its group: twice what its answer is worth. ``verify`` alone gives too much."""

    async def verify(self, request: VerifyRequest) -> Verdict:
        verdict = await super().verify(request)
        return Verdict(reward=verdict.reward + 7)

    async def compare(self, request: CompareRequest) -> Comparison:
        if "mixed" in str(request.conversation_history):
            return Comparison(rewards=[2.0 * (i % 2) for i in range(len(request.response_objs))])
        return Comparison(rewards=[2.0 * (each.last_text == YES) for each in request.response_objs])


class Failing(Answered):
    """An author's mistakes."""

    async def seed(self, row: dict[str, Any], session: Any) -> None:
        if case_of(str(row)).outcome == "seed":
            raise KeyError("a mistake in seed")

    @tool
    async def crash(self) -> str:
        """Crash."""
        raise KeyError("a mistake in a tool")

    async def verify(self, request: VerifyRequest) -> Verdict:
        if case_of(str(request.responses_create_params["input"])).outcome == "verify":
            raise KeyError("a mistake in verify")
        return await super().verify(request)


HARNESS = """
import json, os, sys, urllib.request

def ask(messages):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

[message] = json.load(sys.stdin)["responses_create_params"]["input"]
if "branches" in message["content"]:
    ask([{"role": "system", "content": "You are a sub-agent."}, message])
first = ask([message])
ask([message, first, {"role": "user", "content": "Are you sure?"}])
"""


def graph(folder: Path) -> dict[str, Any]:
    """All environments, with a model that no test can reach: the trainer takes its place."""
    classes = {"single": Answered, "tool": Tools, "seen": Shows, "group": Compared, "failing": Failing}
    environments: dict[str, Any] = {
        **{name: {"type": f"acceptance:{cls.__name__}"} for name, cls in classes.items()},
        "stateful": {"type": "acceptance:Stateful", "log": str(folder / "sessions.log")},
        "judge": {"type": "acceptance:Judged", "judge": "judging"},
    }
    agents = {
        f"{name}_agent": {"type": "simple_agent", "model": "policy", "resources": name}
        for name in environments
    }
    harness = {
        "type": "harness_agent",
        "command": [sys.executable, "-c", HARNESS],
        "gateway_url": "http://127.0.0.1:9",
    }
    return {
        "models": {
            "policy": {"type": "chat_model", "base_url": "http://127.0.0.1:9/v1", "model": "m"},
            "judging": {"type": "acceptance:Judge"},
        },
        "resources": environments,
        "agents": {**agents, "harness_agent": {**harness, "model": "policy", "resources": "single"}},
    }


@dataclass
class Asked:
    """A generation of the engine."""

    prompt: list[int]
    generation: list[int]
    logprobs: list[float]
    begun: int
    ended: int
    """Version of the policy at its first and at its last token."""


@dataclass
class Sample:
    """What a trainer got for a rollout, or for a branch of one.

    Attributes:
        mask: per token of the response, 1 where it is trained on.
        reward: as the trainer counts it; None if it counts none.
        advantage: without division by a deviation; None where the trainer has none at this point.
        normalized: the advantage in the trainer's default settings; None where that is not computed.
        versions: of the policy, of its tokens; None where the trainer is told none.
        text: its prompt and response; filled in by `script`.
        is_branch: whether it is the sub-agent's; filled in by `script`.
    """

    case: str
    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float | None
    failed: bool = False
    truncated: bool | None = None
    versions: list[int] | None = None
    advantage: float | None = None
    normalized: float | None = None
    text: str = ""
    is_branch: bool = False


@dataclass
class Ran:
    """What a trainer's run gives `test_acceptance.py`, as JSON."""

    trainer: str
    version: str
    samples: list[Sample] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, given: dict[str, Any]) -> Ran:
        samples = [Sample(**sample) for sample in given["samples"]]
        return cls(**{**given, "samples": samples, "asked": [Asked(**asked) for asked in given["asked"]]})


class Policy:
    """The trainer's engine, with new weights now and then.

    The same prompt gets the same answer, so that a run can be repeated. (`tiny` imports torch, which the
    tests' own virtual environment lacks.)

    Attributes:
        endless: generations that run until they are cancelled.
        stopped: those of them that were cancelled.
    """

    def __init__(self, folder: Path) -> None:
        import tiny

        self._engine = tiny.Engine(folder / "model", said)
        self.tokenizer = self._engine.tokenizer
        self.asked: list[Asked] = []
        self.version = 3
        self.endless = 0
        self.stopped = 0

    def load(self, weights: Mapping[str, Any]) -> None:
        """Go on with other weights."""
        missing, unexpected = self._engine.model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}  # it may be tied to the embeddings

    async def agenerate(self, prompt: list[int], limit: int | None, temperature: float) -> tuple[Asked, str]:
        """`generate`, for an engine whose generations can be cancelled."""
        text = self.tokenizer.decode(prompt)
        if case_of(text) == ABANDONED and "the total is" in text:
            self.endless += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.endless -= 1
                self.stopped += 1
        return self.generate(prompt, limit, temperature)

    async def sample(
        self, prompt: list[int], sampling: Mapping[str, Any]
    ) -> tuple[list[int], list[float], str]:
        """`agenerate`, as an endpoint asks for it (`support.endpoint`): an abort is an error there."""
        limit, temperature = sampling.get("max_tokens"), sampling.get("temperature", 1.0)
        asked, stop = await self.agenerate(prompt, limit, temperature)
        if stop == "abort":
            raise RuntimeError("the engine aborts the generation")
        return asked.generation, asked.logprobs, stop

    def generate(self, prompt: list[int], limit: int | None, temperature: float) -> tuple[Asked, str]:
        """A generation, and why it ended: ``stop``, ``length``, or ``abort``."""
        text = self.tokenizer.decode(prompt)
        outcome = case_of(text).outcome
        if outcome == "cancelled":
            return Asked(prompt, [], [], self.version, self.version), "abort"
        seed = zlib.crc32(json.dumps(prompt).encode())
        room = min(limit or LONGEST_RESPONSE, LONGEST_RESPONSE)
        ids, logprobs = self._engine.generate(prompt, room, temperature, seed)
        begun = self.version
        if outcome == "straddled":
            self.version += 1
        asked = Asked(prompt, ids, logprobs, begun, self.version)
        self.asked.append(asked)
        return asked, "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"


async def until(condition: Callable[[], bool], running: Sequence[asyncio.Future[Any]] = ()) -> None:
    """Wait for something that another thread or process does.

    Raises:
        TimeoutError: it has not come within a minute.
        BaseException: what ended one of ``running`` meanwhile.
    """
    for _ in range(3000):
        if condition():
            return
        for work in running:
            if work.done():
                raise RuntimeError(f"it has ended: {work.result()}")
        await asyncio.sleep(0.02)
    raise TimeoutError("not within a minute")


def open_sessions(folder: Path) -> int:
    """Sessions of ``stateful`` that were opened and not closed."""
    log = (folder / "sessions.log").read_text().split()
    return log.count("open") - log.count("close")


async def abandoned(
    folder: Path,
    policy: Policy,
    running: Sequence[asyncio.Future[Any]],
    cancel: Callable[[], Any],
    *,
    reaches_engine: bool = True,
) -> dict[str, int]:
    """What becomes of rollouts of `ABANDONED` when their trainer cancels them.

    Args:
        folder: the script's.
        policy: the engine.
        running: what the trainer awaits: one or more for both rollouts.
        cancel: the trainer's way.
        reaches_engine: whether the trainer passes it on to its engine.

    Returns:
        ``stopped`` generations, and sessions that are still ``open``.
    """
    before = policy.stopped
    await until(lambda: policy.endless == ABANDONED.size, running)
    assert open_sessions(folder) == ABANDONED.size
    found = cancel()
    if asyncio.iscoroutine(found):
        await found
    await asyncio.gather(*running, return_exceptions=True)
    await until(lambda: open_sessions(folder) == 0 and not (reaches_engine and policy.endless))
    return {"stopped": policy.stopped - before, "open": open_sessions(folder)}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty packages in the place of some that need a GPU, for trainers that import them at the top."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__ = spec, []
        return module

    def exec_module(self, module: Any) -> None:
        """There is nothing to run."""


def script(main: Callable[[Path], list[Ran]]) -> None:
    """A trainer's script: ``python run_x.py FOLDER`` prints its runs as JSON, in one line."""
    import tiny

    faulthandler.dump_traceback_later(400, exit=True)  # says where it hangs
    folder = Path(sys.argv[1])
    tiny.prepare(folder, graph(folder))
    runs = main(folder)
    tokenizer = tiny.PreTrainedTokenizerFast.from_pretrained(folder / "model")
    for sample in (sample for run in runs for sample in run.samples):
        sample.text = tokenizer.decode(sample.prompt + sample.response)
        sample.is_branch = "sub-agent" in sample.text
    print(json.dumps([dataclasses.asdict(run) for run in runs]))
