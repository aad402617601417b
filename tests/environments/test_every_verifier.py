"""Every verifier of the catalogue, against one set of hostile answers (tests/support/hostile.py).

What an answer causes is its score: each gets a reward, never a failure, and costs little time, memory, and
delay of the event loop, on which hundreds of other episodes wait. Limits are of this process's CPU time, in
seconds of a core that adds `ADDITIONS` numbers in one, so that no busy or slow machine fails a test;
processes of an environment's own have the limits of its settings.

An environment that is new is found by its entry point. It needs an entry in `CASES` if it has settings that
are required, or if its verifier does something that its example rows do not show.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import resource
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
from support.environments import Bench, called, examples, fixture_problems, said
from support.hedges import BY_A_MODEL, HEDGED, Texts, hedges
from support.hostile import answers
from support.sandboxes import AVAILABLE

from gym_serve.environments import equivalence_llm_judge
from gym_serve.environments.mcqa import grading
from gym_serve.graph.classes import references_of
from gym_serve.servers import Call, ResourcesServer, ServerRunner, VerifyRequest
from gym_serve.servers.transport import encode
from gym_serve.types.errors import GraphError

JSON = dict[str, Any]

FOREIGN = {"graded", "inspect", "lm_eval", "nemo_gym", "openenv", "verifiers"}
"""Hosts of verifiers that are none of ours: other libraries', and a function of a user."""

ADDITIONS = 40_000_000
"""What the core that the limits are for adds in a second, in CPython 3.11."""
LOOP_SECONDS = 0.5
"""CPU time of this process between two turns of the event loop."""
ANSWER_SECONDS = 0.05
"""CPU time of this process for an answer, on average."""
MEMORY = 400 << 20
"""Bytes that this process may have more than before, at any time."""
AT_ONCE = 4


@dataclass(frozen=True)
class Case:
    """How an environment is run here.

    Attributes:
        settings: its settings; models stand in by themselves.
        rows: rows beside the first of its example rows.
        num_examples: how many of those are taken.
        calls: whether answers that are calls are tried, where the verifier looks at texts alone.
        code: whether texts are tried that are code where an answer is expected; not where programs are.
    """

    settings: JSON = field(default_factory=dict)
    rows: list[JSON] = field(default_factory=list)
    num_examples: int = 2
    calls: bool = True
    code: bool = True


MATH = {"library_verifier_timeout_seconds": 5.0}
FIXTURES: dict[str, list[JSON]] = {
    "code_gen": [{"sandbox": AVAILABLE}],
    "google_search": [{"mode": "replay"}],
    "gymnasium": [{"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}}],
    "math_with_code": [{"sandbox": AVAILABLE, "memory_mb": 512, "max_execution_time": 20}],
    "math_with_judge": [MATH],
    "mcp": [{"command": ["python", "-m", "gym_serve.environments.mcp.warehouse"], "connection": "replica"}],
    "reasoning_gym": [{"num_processes": 1, "score_timeout_seconds": 3.0}],
    "text_to_sql": [{"sandbox": AVAILABLE}, {"sandbox": "process"}],
}
"""Settings with which fixtures are run, where the defaults are not enough."""


def _schema(schema: JSON, **row: Any) -> JSON:
    return {"schema_str": json.dumps(schema), **row}


_LIST = {"type": "array", "uniqueItems": True, "items": {"type": "object"}}
_TREE = {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/t"}}, "minProperties": 9}] * 2}
_ANY = {"patternProperties": {"^(a|a)*$": {"type": "string"}, "(\\w+\\s?)*$": {"type": "string"}}}
_IFEVAL: dict[str, JSON] = {
    "detectable_content:number_placeholders": {"num_placeholders": 3},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:constrained_response": {},
    "detectable_format:json_format": {},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 3},
    "detectable_format:number_bullet_lists": {"num_bullets": 3},
    "detectable_format:number_highlighted_sections": {"num_highlights": 3},
    "detectable_format:title": {},
    "change_case:capital_word_frequency": {"capital_frequency": 3, "capital_relation": "at least"},
    "change_case:english_capital": {},
    "combination:two_responses": {},
    "keywords:existence": {"keywords": ["a", "word"]},
    "keywords:frequency": {"keyword": "a", "frequency": 3, "relation": "at least"},
    "language:response_language": {"language": "de"},
    "length_constraints:nth_paragraph_first_word": {
        "first_word": "a",
        "num_paragraphs": 2,
        "nth_paragraph": 1,
    },
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_sentences": {"num_sentences": 3, "relation": "at least"},
    "length_constraints:number_words": {"num_words": 3, "relation": "at least"},
    "punctuation:no_comma": {},
    "startend:quotation": {},
}

CASES: dict[str, Case] = {
    # What is scored is the box: two are made for each answer.
    "workspace": Case(rows=[{"test_command": "true"}], num_examples=0, calls=False, code=False),
    "code_gen": Case(
        {"sandbox": AVAILABLE, "unit_test_timeout_secs": 0.5, "memory_mb": 512},
        num_examples=1,
        calls=False,
        code=False,
    ),
    "equivalence_llm_judge": Case(
        rows=[
            {
                "expected_answer": "a",
                "responses_create_params": {"input": "?"},
                "template_metadata": {"output_regex": "(a|a)*$"},
            }
        ],
        num_examples=1,
        calls=False,
    ),
    "google_search": Case({"mode": "replay"}),
    "gymnasium": Case({"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}}),
    "instruction_following": Case(
        {"check_timeout_seconds": 0.2, "num_workers": 2},
        rows=[
            {"verifier_metadata": {"instruction_id_list": list(_IFEVAL), "kwargs": list(_IFEVAL.values())}}
        ],
        num_examples=0,
        calls=False,
    ),
    "math_with_code": Case(
        {"sandbox": AVAILABLE, "library_verifier_timeout_seconds": 0.2, "num_workers": 4},
        num_examples=1,
        calls=False,
    ),
    "math_with_judge": Case(
        {"should_use_judge": False, "library_verifier_timeout_seconds": 0.2, "num_workers": 4},
        num_examples=1,
        calls=False,
    ),
    "mcp": Case(
        {"command": ["python", "-m", "gym_serve.environments.mcp.warehouse"], "connection": "replica"}
    ),
    "mcqa": Case(
        rows=[
            *(
                {"options": [{"A": "a"}, {"B": "b"}], "expected_answer": "A", "grading_mode": mode}
                for mode in ("lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md")
            ),
            {
                "options": [{"A": "a"}, {"B": "b"}],
                "expected_answer": "A",
                "template_metadata": {"output_regex": ["(a|a)*$", "(\\w+\\s?)*$"]},
            },
        ],
        num_examples=1,
        calls=False,
    ),
    "reasoning_gym": Case({"num_processes": 2, "score_timeout_seconds": 0.2}, num_examples=1, calls=False),
    "reward_model": Case({"conversation": "episode"}),
    "string_match": Case(
        rows=[
            {"expected_answer": "42", "extraction_mode": mode}
            for mode in ("boxed", "final_answer", "last_line", "full_response")
        ],
        num_examples=0,
        calls=False,
    ),
    "structured_outputs": Case(
        {"validation_timeout_seconds": 0.2},
        [
            *(
                _schema({"type": "object", "properties": {"a": {"type": "integer"}}}, schema_type=format_)
                for format_ in ("json", "yaml", "xml", "toml", "csv")
            ),
            _schema(_LIST),
            _schema({"$defs": {"t": _TREE}, "$ref": "#/$defs/t"}),
            _schema({**_ANY, "additionalProperties": False}),
            _schema({"unevaluatedProperties": False, **_ANY}),
            _schema({"type": "object"}, response_mode="tool_call"),
        ],
    ),
    "text_to_sql": Case({"sandbox": AVAILABLE}, num_examples=1, calls=False, code=False),
}
"""What environments need beside their example rows."""

ENVIRONMENTS = sorted(
    (entry for entry in entry_points(group="gym_serve.environments") if entry.name not in FOREIGN),
    key=lambda entry: entry.name,
)


class AnyModel:
    """Stands in for every judge and reward model: says no, and gives the scores of a pair and of a text."""

    async def responses(self, params: JSON) -> JSON:
        return {"id": "resp", "output": said("[[A!=B]]")}

    async def chat_completions(self, body: JSON) -> JSON:
        message = {"role": "assistant", "content": '{"score_1": 3, "score_2": 2, "ranking": 3}'}
        return {"id": "chat", "choices": [{"index": 0, "message": message}]}

    async def fetch(self, op: str, body: Any = None, *, session: str | None = None) -> Any:
        return {"data": [{"data": [0.5], "probs": [0.5, 0.5]}]}


def add(count: float) -> float:
    """Add ``count`` numbers; returns the CPU time that this took."""
    started, total = time.process_time(), 0
    for number in range(int(count)):
        total += number
    return time.process_time() - started


class Costs:
    """What this process used, while it is a context.

    Attributes:
        seconds: CPU time in all.
        longest: CPU time between two turns of the event loop.
        bytes: memory at its peak, beyond what there was.
    """

    async def __aenter__(self) -> Costs:
        gc.collect()
        with suppress(OSError):  # Linux: the peak begins anew
            Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240
        self._before = _peak_bytes()
        self._slowness = max(1.0, 20 * add(ADDITIONS / 20))
        self._started = time.process_time()
        self.longest = 0.0
        self._beats = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.01)
        self._beats.cancel()
        self.seconds = (time.process_time() - self._started) / self._slowness
        self.longest /= self._slowness
        self.bytes = _peak_bytes() - self._before

    async def _beat(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.005)
            now = time.process_time()
            self.longest, last = max(self.longest, now - last), now


def _peak_bytes() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def started(environment: type[ResourcesServer], settings: JSON) -> ResourcesServer:
    """The environment, with a model wherever it names one."""
    references = references_of(environment.Config, dict.fromkeys(environment.Config.model_fields, "model"))
    models = {
        path: AnyModel()
        for path, leaves in references.items()
        if any(getattr(leaf.annotation, "kind", None) == "model" for leaf in leaves)
    }
    return environment(**{**models, **settings})


async def verdict_of(host: ServerRunner, row: JSON, output: list[Any]) -> JSON:
    """The verdict on an answer, in a session of its own; a failure is raised."""
    seeded = await host.dispatch(Call("seed_session", encode(row)))
    seeded.json()
    step = "step" if "step" in host.operations else "verify"
    body = json.dumps({**row, "response": {"output": output}}).encode()  # lone surrogates as they are
    try:
        verdict: JSON = (await host.dispatch(Call(step, body, seeded.session))).json()
        if step == "step":
            verdict = (await host.dispatch(Call("verify", body, seeded.session))).json()
        return verdict
    finally:
        await host.dispatch(Call("close_session", b"", seeded.session))


async def problem_of(host: ServerRunner, row: JSON, output: list[Any]) -> str | None:
    """What is wrong with the verdict on an answer, if anything."""
    try:
        verdict = await verdict_of(host, row, output)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    reward = verdict.get("reward")
    if isinstance(reward, int | float) and math.isfinite(reward):
        return None
    return f"no reward: {str(verdict)[:300]}"


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns that backtrack are stopped sooner than otherwise, as there are many of them here."""
    monkeypatch.setattr(grading, "SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(equivalence_llm_judge, "_SEARCH_SECONDS", 0.1)


async def complaints(host: ServerRunner, work: list[tuple[str, JSON, list[Any]]]) -> dict[str, str]:
    """What is wrong with the verdicts on answers to rows, or with what they cost; several at a time."""
    todo = iter(work)
    problems: dict[str, str] = {}

    async def try_some() -> None:
        for name, row, output in todo:
            if (problem := await problem_of(host, row, output)) is not None:
                problems[name] = problem
            await asyncio.sleep(0)  # a verifier that never waits gives the event loop no turn

    async with Costs() as costs:
        await asyncio.gather(*(try_some() for _ in range(AT_ONCE)))
    if costs.longest > LOOP_SECONDS:
        problems["event loop"] = f"no turn for {costs.longest:.2f} s of CPU time"
    if costs.seconds > ANSWER_SECONDS * len(work):
        problems["CPU time"] = f"{costs.seconds:.2f} s for {len(work)} answers"
    if costs.bytes > MEMORY:
        problems["memory"] = f"{costs.bytes >> 20} MiB"
    return problems


@pytest.fixture(params=ENVIRONMENTS, ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> EntryPoint:
    entry: EntryPoint = request.param
    if entry.name == "workspace" and AVAILABLE != "bubblewrap":
        pytest.skip("its boxes need bubblewrap")
    return entry


async def test_its_fixtures_pass_and_are_of_every_kind(entry: EntryPoint) -> None:
    for settings in FIXTURES.get(entry.name, [{}]):
        assert await fixture_problems(entry.load(), **settings) == []


async def test_its_server_says_whether_stored_rollouts_can_be_scored_again(entry: EntryPoint) -> None:
    environment = entry.load()  # whose README says the same (test_readmes.py)
    server = started(environment, CASES.get(entry.name, Case()).settings)
    assert await Bench(server).call("reverify_mode") == environment.reverify_mode


@pytest.mark.parametrize("name", ["code_gen", "math_with_code", "text_to_sql"])
async def test_without_bubblewrap_it_does_not_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    environment = next(entry for entry in ENVIRONMENTS if entry.name == name).load()
    with pytest.raises(GraphError, match=r"bubblewrap.*sandbox: process"):
        await started(environment, {}).start()


@pytest.mark.parametrize(
    "every_row",
    [pytest.param(False, id="a row each"), pytest.param(True, id="every row", marks=pytest.mark.slow)],
)
async def test_no_answer_is_a_failure_or_expensive(entry: EntryPoint, every_row: bool) -> None:
    """Each answer is given to one of the rows, in turn; to every row where time does not matter."""
    environment = entry.load()
    case = CASES.get(entry.name, Case())
    host = ServerRunner(started(environment, case.settings))
    rows = [*examples(environment)[: case.num_examples], *case.rows]
    work = [
        (f"row {number}, {name}", row, output)
        for number, row in enumerate(rows)
        for turn, (name, output) in enumerate(
            answers(row, environment.tools, calls=case.calls, code=case.code)
        )
        if every_row or turn % len(rows) == number
    ]
    await host.start()
    try:
        found = await complaints(host, work)
        if found.keys() & {"event loop", "CPU time", "memory"}:
            # What the kernel does for a process is its CPU time too, and takes longer on a busy machine.
            found = await complaints(host, work)
    finally:
        await host.stop()
    assert found == {}


class Naive(ResourcesServer):
    """Does with an answer what its text says, on the event loop."""

    async def verify(self, request: VerifyRequest) -> float:
        text = request.response.output_text
        if text == "raise":
            raise ValueError(text)
        if text == "hold":
            add(ADDITIONS * 4 * LOOP_SECONDS)
        return float(len(bytes([1]) * (2 * MEMORY))) if text == "allocate" else 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [("raise", {"raise"}), ("hold", {"event loop", "CPU time"}), ("allocate", {"memory"}), ("x", set())],
)
async def test_a_verifier_that_is_naive_is_found_out(text: str, found: set[str]) -> None:
    host = ServerRunner(Naive())
    work: list[tuple[str, JSON, list[Any]]] = [(text, {}, said(text)), *[("y", {}, said("y"))] * 9]
    complained = (await complaints(host, work)).keys()
    assert found <= complained <= found | {"event loop", "CPU time"}


async def test_a_group_of_hostile_answers_is_compared() -> None:
    environment = next(entry for entry in ENVIRONMENTS if entry.name == "genrm_compare").load()
    host = ServerRunner(
        started(environment, {"group_style_penalty_coeff": 1.0, "group_answer_length_penalty_coeff": 1.0})
    )
    outputs = [output for name, output in answers({}, ())]
    history = [{"role": "user", "content": "?"}]
    await host.start()
    try:
        async with Costs() as costs:
            for first in range(0, len(outputs), 8):
                group = [{"output": output} for output in outputs[first : first + 8]]
                body = encode({"conversation_history": history, "response_objs": group})
                rewards = (await host.dispatch(Call("compare", body))).json()["rewards"]
                assert len(rewards) == len(group)
    finally:
        await host.stop()
    assert costs.seconds < ANSWER_SECONDS * len(outputs)


STATEFUL = {
    "gymnasium": "the reward is the game's; there is no answer",
    "multi_step_synonyms": "test_multi_step_synonyms.py",
    "session_counter": "test_session_counter.py",
    "simple_weather": "test_simple_weather.py",
    "workspace": "test_workspace_cheats.py",
}
"""Environments whose reward is for what the tools did in the session."""


def test_every_environment_has_hedging_answers() -> None:
    names = {name.partition(":")[0] for name in HEDGED}
    assert names | BY_A_MODEL.keys() | STATEFUL.keys() == {entry.name for entry in ENVIRONMENTS}
    assert all(len(list(hedges(case))) > 20 for case in HEDGED.values())


JUDGED = {"equivalence_llm_judge", "text_to_sql"}
"""Environments that give nothing without a judge's consent; the judge here always says no."""


async def hedging(name: str) -> tuple[float, dict[str, JSON]]:
    """The full reward, and verdicts by the name of the hedge."""
    case = HEDGED[name]
    entry = next(entry for entry in ENVIRONMENTS if entry.name == name.partition(":")[0])
    host = ServerRunner(started(entry.load(), case.settings))
    if isinstance(case, Texts):
        right = said(case.form.replace("@", case.right))
    else:
        right = [called(case.name, case.right)]
    await host.start()
    try:
        full = (await verdict_of(host, case.row, right))["reward"]
        verdicts = {what: await verdict_of(host, case.row, output) for what, output in hedges(case)}
    finally:
        await host.stop()
    return full, verdicts


@pytest.mark.parametrize("name", HEDGED)
async def test_hedging_earns_no_more_than_an_honest_wrong_answer(name: str) -> None:
    full, verdicts = await hedging(name)
    kind = name.partition(":")[0]
    honest = verdicts["wrong"]["reward"]
    assert honest < full or kind in JUDGED
    paid = {what: verdict["reward"] for what, verdict in verdicts.items() if verdict["reward"] > honest}
    assert paid.keys() == HEDGED[name].takes.keys(), paid
    least = full if full > honest else 1.0
    unsaid = [what for what, one in verdicts.items() if one["reward"] < least and not one.get("reason")]
    assert unsaid == []
