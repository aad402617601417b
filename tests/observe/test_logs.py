"""The log of a replica: what its records say, how faults are limited, and how files are read again."""

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.traced import ROW, graph
from support.upstream import ChatEndpoint

from gym_serve import Gym, ModelServer, Unavailable
from gym_serve.observe import logs
from gym_serve.observe.logs import Record, admits, fault, read_log, write_log
from gym_serve.servers.context import CallContext, log_fields, use
from gym_serve.servers.runner import ServerRunner
from gym_serve.servers.transport import Call
from gym_serve.types.errors import BadRequest, DeadlineExceeded, EndpointAccessDenied

SERVER = [("math", "policy")]


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No counts of other tests, and the process's logging as it was."""
    monkeypatch.setattr(logs, "_kinds", {})
    loggers = [logging.getLogger(name) for name in ("", "gym_serve", "gym_serve.access")]
    before = [(each, each.level, each.handlers[:]) for each in loggers]
    yield
    for each, level, handlers in before:
        for handler in each.handlers:
            if handler not in handlers:
                handler.close()
        each.setLevel(level)
        each.handlers[:] = handlers


def write(folder: Path, **options: Any) -> Path:
    given: dict[str, Any] = {"format": "text", "level": "info", "access": False, **options}
    write_log(folder, ("math", "policy", "ab12"), context=log_fields, **given)
    return folder / "replica_math_policy_ab12_events.log"


def test_a_record_says_what_it_belongs_to(tmp_path: Path) -> None:
    file = write(tmp_path)
    with use(CallContext("r1", session="ab12.x", affinity="3-0")):
        logging.getLogger("an.author").warning("the page is %s", "empty")
    logging.getLogger("gym_serve").info("started")
    logging.getLogger("gym_serve").debug("not shown")
    first, second = file.read_text().splitlines()
    assert first.endswith(" WARNING policy the page is empty [rollout=3-0 session=ab12.x request=r1]")
    assert second.endswith(" INFO policy started")


def test_a_record_as_json(tmp_path: Path) -> None:
    file = write(tmp_path, format="json")
    with use(CallContext("r1", affinity="3-0")):
        try:
            raise KeyError("opening")
        except KeyError:
            logging.getLogger("gym_serve").exception("`seed` failed", extra={"server": "weather"})
    said = orjson.loads(file.read_bytes())
    assert said["level"] == "ERROR"
    assert (said["graph"], said["server"], said["replica"]) == ("math", "weather", "ab12")
    assert (said["rollout"], said["request"]) == ("3-0", "r1")
    assert said["traceback"].endswith("KeyError: 'opening'")


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_a_model_wrote_cannot_pass_for_a_record(tmp_path: Path, format: Any) -> None:
    write(tmp_path, format=format)
    logging.getLogger("gym_serve").warning("no tool 'x\n2026-01-01 00:00:00,000 ERROR policy forged\r\x85'")
    [record], _ = read_log(tmp_path, SERVER, {})
    assert "forged" in record.text
    assert read_log(tmp_path, SERVER, {}, level="error")[0] == []


def test_faults_of_a_kind_are_limited() -> None:
    assert [admits("policy", "unavailable", now=0.0) for _ in range(7)] == ["", "", "", "", "", None, None]
    assert admits("judge", "unavailable", now=0.0) == ""
    assert admits("policy", "unavailable", now=61.0) == " (2 more like this were not logged)"
    assert admits("policy", "unavailable", now=61.0) == ""


def test_a_graph_s_log_is_read_by_level_and_rollout(tmp_path: Path) -> None:
    write(tmp_path)
    log = logging.getLogger("gym_serve")
    for rollout in ("3-0", "3-0-a1", "3-01"):
        with use(CallContext("r", affinity=rollout)):
            log.warning("of %s", rollout)
    log.info("of none")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("broken")
    texts = [record.text for record in read_log(tmp_path, SERVER, {}, rollout="3-0")[0]]
    assert ["of 3-0 [" in text or "of 3-0-a1 [" in text for text in texts] == [True, True]
    [broken], _ = read_log(tmp_path, SERVER, {}, level="error")
    assert broken.text.endswith("\n  lines")
    assert len(read_log(tmp_path, SERVER, {}, last=2)[0]) == 2
    assert read_log(tmp_path, SERVER, {}, last=0)[0] == []
    assert read_log(tmp_path, [("math", "judge")], {}) == ([], {})


def test_a_record_of_several_lines_is_found_by_its_rollout(tmp_path: Path) -> None:
    write(tmp_path)
    with use(CallContext("r", affinity="3-0")):
        logging.getLogger("an.author").warning("the page has\n  two lines\n")
        logging.getLogger("an.author").warning("")
    [first, second], _ = read_log(tmp_path, SERVER, {}, rollout="3-0")
    assert first.text.endswith("policy the page has [rollout=3-0 request=r]\n    two lines")
    assert second.text.endswith("policy  [rollout=3-0 request=r]")


def test_reading_goes_on_over_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", "2000")
    clock = itertools.count(time.time(), 0.0004)  # which nobody sets back: records are sorted by their time
    monkeypatch.setattr(time, "time", lambda: next(clock))
    write(tmp_path)
    log = logging.getLogger("gym_serve")
    positions: dict[str, int] = {}
    found: list[Record] = []
    for number in range(300):  # more than the files that are kept hold
        log.info("record %d", number)
        if number % 7 == 0:
            records, positions = read_log(tmp_path, SERVER, positions)
            found += records
    found += read_log(tmp_path, SERVER, positions)[0]
    assert len(list(tmp_path.iterdir())) == 6
    assert [record.text.rpartition(" ")[2] for record in found] == [str(number) for number in range(300)]


def test_serve_s_own_log_is_read_as_well(tmp_path: Path) -> None:
    head = "2026-11-23 06:00:00,{} math_policy ab12 --"
    lines = [
        f"INFO {head.format('001')} Started.",
        f"ERROR {head.format('002')} Failed:",
        "Traceback",
        "Boom",
    ]
    (tmp_path / "replica_math_policy_ab12.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "replica_math_policy_two_ab12.log").write_text(f"ERROR {head} of another server\n")
    [record], _ = read_log(tmp_path, SERVER, {}, level="warning")
    assert record.text == "\n".join(lines[1:])


def test_a_line_that_is_still_being_written_is_read_later(tmp_path: Path) -> None:
    file = tmp_path / "replica_math_policy_ab12_events.log"
    file.write_text("2026-11-23 06:00:00,001 INFO policy one\n2026-11-23 06:00:00,002 INFO pol")
    records, positions = read_log(tmp_path, SERVER, {})
    assert len(records) == 1
    with file.open("a") as opened:
        opened.write("icy two\n")
    [record], _ = read_log(tmp_path, SERVER, positions)
    assert record.text.endswith("policy two")


class Broken(ModelServer):
    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["input"] == "crash":
            raise RuntimeError("a bug")
        raise Unavailable("the endpoint is away")


async def test_failed_calls_are_logged_and_refused_requests_are_not(caplog: pytest.LogCaptureFixture) -> None:
    runner = await started_runner(Broken(name="policy"))
    with caplog.at_level(logging.INFO):
        for _ in range(9):
            await runner.dispatch(Call("v1/responses", b'{"input": "Hi"}'))
        await runner.dispatch(Call("v1/responses", b'{"input": "crash"}'))
        await runner.dispatch(Call("no_such_operation"))
        await runner.dispatch(Call("v1/responses", b"no json"))
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said[:-1] == [("WARNING", "v1/responses failed: unavailable: the endpoint is away")] * 5
    level, message = said[-1]
    assert level == "ERROR"
    assert message.startswith("`responses` of policy failed at tests/observe/test_logs.py:")
    assert caplog.records[-1].exc_info is not None


async def test_every_call_is_logged_if_the_graph_asks_for_it(tmp_path: Path) -> None:
    file = write(tmp_path, access=True)
    runner = await started_runner(Broken(name="policy"))
    call = Call("v1/models", request_id="r1", affinity="3-0")
    await runner.dispatch(call)
    with pytest.raises(BadRequest):
        _ = [chunk async for chunk in runner.stream(call._replace(op="v1/responses", body=b"no json"))]
    whole, stream = file.read_text().splitlines()
    assert " INFO policy v1/models 200 " in whole
    assert " INFO policy v1/responses 400 " in stream
    assert {line.rpartition("s [")[2] for line in (whole, stream)} == {"rollout=3-0 request=r1]"}


async def test_a_call_that_takes_too_long_is_logged_with_its_rollout(tmp_path: Path) -> None:
    class Slow(ModelServer):
        async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

    file = write(tmp_path)
    runner = await started_runner(Slow(name="policy"))
    call = Call("v1/responses", b'{"input": "Hi"}', affinity="3-0", request_id="r1", timeout=0.05)
    await runner.dispatch(call)
    with pytest.raises(DeadlineExceeded):
        _ = [chunk async for chunk in runner.stream(call)]
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    assert all("deadline_exceeded" in line and line.endswith(" [rollout=3-0 request=r1]") for line in lines)


def test_a_failed_rollout_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    given = graph()
    del given["tracing"]
    given["models"]["policy"]["failures"] = 9
    with caplog.at_level(logging.INFO), Gym.from_graph(given, ray=False) as gym:
        [rollout] = gym.run([ROW])
    [record] = [record for record in caplog.records if "the rollout failed" in record.getMessage()]
    assert record.getMessage() == ("the rollout failed in its model stage: unavailable: the model is away")
    assert record.rollout == rollout["_ng_rollout_id"]  # type: ignore[attr-defined]


def test_a_refused_key_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    given = graph()
    del given["tracing"]
    with ChatEndpoint("done") as endpoint, caplog.at_level(logging.INFO):
        endpoint.refuses = 401
        key = {"api_key": "sk-a-wrong-key"}
        given["models"]["policy"] = {"type": "chat_model", "base_url": endpoint.url, "model": "m", **key}
        with Gym.from_graph(given, ray=False) as gym, pytest.raises(EndpointAccessDenied) as refused:
            gym.run([ROW])
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    error = f"endpoint_access_denied: {refused.value.message}"
    assert ("WARNING", f"v1/responses failed: {error}") in said
    assert ("WARNING", f"the rollout failed in its model stage: {error}") in said
    assert "sk-a-wrong-key" not in caplog.text


def test_outside_of_replicas_nobody_has_to_see_faults(capfd: pytest.CaptureFixture[str]) -> None:
    fault("policy", "unavailable", "the endpoint is away")
    sys.stderr.flush()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"format": "xml"}, "logs.format"),
        ({"level": "loud"}, "logs.level"),
        ({"colour": True}, "logs.colour"),
        ("json", "logs: must be a mapping of options of the log, got a string"),
    ],
)
def test_the_options_are_checked(given: Any, said: str) -> None:
    with pytest.raises(Exception, match=said):
        Gym.from_graph({**graph(), "logs": given}, ray=False)


async def started_runner(server: ModelServer) -> ServerRunner:
    runner = ServerRunner(server)
    await runner.start()
    return runner
