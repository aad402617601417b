"""One rollout is one trace: what its spans say, and how they belong together."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from support.collector import Collector, tree
from support.processes import environment
from support.traced import ROW, TREE, graph
from support.upstream import ChatEndpoint

from gym_serve import Gym, ServerRunner
from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.observe import tracing
from gym_serve.observe.tracing import OFF, checked_parent, span
from gym_serve.servers.context import CallContext, use
from gym_serve.servers.transport import Call, encode
from gym_serve.types.errors import BadRequest

SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"
UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-00"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector
        tracing.stop()


@pytest.fixture
def memory() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.start(exporter=exporter)
    yield exporter
    tracing.stop()


def rollouts(given: dict[str, Any], rows: int = 1, **options: Any) -> list[Any]:
    with Gym.from_graph(given, ray=False) as gym:
        return gym.run([ROW] * rows, **options)


def test_a_rollout_is_one_trace(collector: Collector) -> None:
    [rollout] = rollouts(graph())
    assert rollout["reward"] == 1.0
    spans = {each.name: each for each in collector.spans}
    assert len({each.trace for each in collector.spans}) == 1
    assert "\n".join(tree(collector.spans)) == TREE.replace("AGENT", "agent")
    assert spans["rollout"].resource["service.name"] == "gym_serve"
    assert spans["rollout"].attributes == {
        "gym_serve.rollout": rollout["_ng_rollout_id"],
        "gym_serve.reward": 1.0,
        "gym_serve.attempts": 1,
    }
    assert spans["chat policy"].kind == "client"
    chat = spans["chat policy"].attributes
    assert chat["gen_ai.operation.name"] == "chat"
    assert chat["gen_ai.request.model"] == "policy"
    assert chat["gen_ai.response.model"] == "a-model"
    assert chat["gen_ai.usage.input_tokens"] == 7
    assert chat["gen_ai.usage.output_tokens"] == 2
    assert spans["execute_tool add"].attributes["gen_ai.tool.name"] == "add"
    assert spans["invoke_agent agent"].attributes["gen_ai.agent.name"] == "agent"
    assert spans["tools/add"].kind == "server"
    assert spans["tools/add"].attributes["gym_serve.rollout"] == rollout["_ng_rollout_id"]
    assert not any(each.failed for each in collector.spans)


def test_attempts_belong_to_their_rollout(collector: Collector) -> None:
    given = graph()
    given["models"]["policy"]["failures"] = 1
    [rollout] = rollouts(given, attempts=2)
    assert rollout["reward"] == 1.0
    attempts = sorted((each for each in collector.spans if each.name == "attempt"), key=lambda s: s.start)
    [root] = [each for each in collector.spans if not each.parent]
    assert root.attributes["gym_serve.attempts"] == 2
    assert not root.failed
    assert [each.parent for each in attempts] == [root.id, root.id]
    assert [each.failed for each in attempts] == [True, False]
    assert attempts[0].attributes["error.type"] == "unavailable"
    failed = {each.name for each in collector.spans if each.failed}
    assert failed == {"attempt", "invoke_agent agent", "chat policy", "v1/responses"}


def test_a_failed_rollout_is_a_failed_span(collector: Collector) -> None:
    given = graph()
    given["models"]["policy"]["failures"] = 9
    [rollout] = rollouts(given)
    assert rollout.failure is not None
    [root] = [each for each in collector.spans if not each.parent]
    assert root.failed
    assert "gym_serve.reward" not in root.attributes


def test_a_share_of_the_rollouts_is_traced_each_as_a_whole(collector: Collector) -> None:
    rollouts({**graph(), "tracing": 0.5}, rows=40)
    traces = Counter(each.trace for each in collector.spans)
    assert 1 <= len(traces) < 40  # one or none of 40 in 10^10 runs
    assert set(traces.values()) == {len(TREE.splitlines())}


def test_a_graph_without_the_setting_records_nothing(collector: Collector) -> None:
    given = graph()
    del given["tracing"]
    tracing.start()
    rollouts(given)
    tracing.flush()
    assert collector.spans == []


def test_the_request_at_an_endpoint_carries_its_span(collector: Collector) -> None:
    given = graph()
    with ChatEndpoint("done") as endpoint:
        given["models"]["policy"] = {"type": "chat_model", "base_url": endpoint.url, "model": "m"}
        rollouts(given)
        [headers] = endpoint.headers
    [post] = [each for each in collector.spans if each.name == "POST"]
    [answered] = [each for each in collector.spans if each.id == post.parent]
    assert answered.name == "v1/responses"
    assert post.attributes["http.response.status_code"] == 200
    assert headers["traceparent"].startswith(f"00-{post.trace}-{post.id}-0")


def test_each_request_at_an_endpoint_is_a_span_also_if_it_is_made_again(collector: Collector) -> None:
    given = graph()
    with ChatEndpoint("done") as endpoint:
        endpoint.fails = 1
        given["models"]["policy"] = {"type": "chat_model", "base_url": endpoint.url, "model": "m"}
        rollouts(given)
    first, second = sorted((each for each in collector.spans if each.name == "POST"), key=lambda s: s.start)
    assert first.parent == second.parent
    assert (first.failed, first.attributes["http.response.status_code"]) == (True, 500)
    assert (second.failed, second.attributes["http.response.status_code"]) == (False, 200)


def test_attributes_are_those_of_the_conventions(collector: Collector) -> None:
    known = {
        value
        for module in (gen_ai_attributes, error_attributes, http_attributes)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    given = graph()
    given["models"]["policy"]["failures"] = 1
    row = {"responses_create_params": {"input": "Add two.", "temperature": 0.5, "max_output_tokens": 9}}
    with Gym.from_graph(given, ray=False) as gym:
        gym.run([row], attempts=2)
    used = {name for each in collector.spans for name in each.attributes}
    assert {name for name in used if not name.startswith("gym_serve.")} <= known
    assert len([name for name in used if name.startswith("gen_ai.")]) > 8
    chat = next(each.attributes for each in collector.spans if each.name == "chat policy")
    assert chat["gen_ai.request.temperature"] == 0.5
    assert chat["gen_ai.request.max_tokens"] == 9


@pytest.mark.parametrize("op", ["v1/responses", "v1/chat/completions", "v1/messages"])
async def test_a_stream_is_a_span_of_who_asked(memory: InMemorySpanExporter, op: str) -> None:
    part = {"type": "output_text", "text": "Hello", "annotations": []}
    model = ScriptedModel(script=[[{"type": "message", "role": "assistant", "content": [part]}]])
    asked = {"input": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    call = Call(op, encode(asked), traceparent=SAMPLED)
    _ = [chunk async for chunk in ServerRunner(model).stream(call)]
    tracing.flush()
    [seen] = memory.get_finished_spans()
    assert seen.name == op
    assert seen.parent is not None
    assert f"{seen.parent.span_id:016x}" == "b" * 16


OWN_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.traced import ROW, graph
from gym_serve import Gym

memory = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(memory))
trace.set_tracer_provider(provider)
with Gym.from_graph(graph(), ray=False) as gym:
    gym.run([ROW])
with trace.get_tracer("trainer").start_as_current_span("step"):
    pass  # it is still there
print([span.name for span in memory.get_finished_spans()][-2:])
"""


def test_a_process_keeps_the_provider_that_it_has_set_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_PROVIDER],
        capture_output=True,
        text=True,
        check=False,
        env=environment(tests=True),
    )
    assert done.stdout.splitlines() == ["['rollout', 'step']"], done.stderr


def test_without_the_extra_a_process_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gym-serve\[otel\]'"):
        tracing.start()


@pytest.mark.parametrize("setting", [1.5, -0.1, "often", True])
def test_the_setting_is_a_share(setting: Any) -> None:
    with pytest.raises(Exception, match="tracing: must be a share of the rollouts from 0 to 1"):
        Gym.from_graph({**graph(), "tracing": setting}, ray=False)


def test_without_a_parent_only_a_sampled_root_begins(memory: InMemorySpanExporter) -> None:
    assert span("call", None) is OFF
    root, other = span("call", None, sampling=1.0), span("call", None, sampling=0.0)
    assert root.recording
    assert checked_parent(root.traceparent) == root.traceparent
    assert not other.recording
    assert other.traceparent is not None  # so that nobody below decides again
    assert other.traceparent.endswith("-00")
    assert not span("below", other.traceparent).recording


def test_a_parent_decides(memory: InMemorySpanExporter) -> None:
    assert span("call", SAMPLED).recording
    unsampled = span("call", UNSAMPLED, sampling=1.0)
    assert not unsampled.recording
    assert unsampled.traceparent == UNSAMPLED


def test_a_process_that_does_not_record_passes_the_parent_on() -> None:
    seen = span("call", SAMPLED)
    assert not seen.recording
    assert seen.traceparent == SAMPLED
    with use(CallContext(traceparent=SAMPLED)) as context:
        assert context.within(3.0).traceparent == SAMPLED


def test_errors_are_named_by_their_kind(memory: InMemorySpanExporter) -> None:
    with pytest.raises(BadRequest), span("one", SAMPLED):
        raise BadRequest("no such thing")
    with pytest.raises(ZeroDivisionError), span("two", SAMPLED):
        raise ZeroDivisionError
    tracing.flush()
    one, two = memory.get_finished_spans()
    assert one.attributes is not None
    assert one.attributes["error.type"] == "bad_request"
    assert one.status.description == "no such thing"
    assert not one.events
    assert two.events[0].name == "exception"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        SAMPLED + "-more",
        SAMPLED + "\nx: y",
    ],
)
def test_a_header_that_is_no_traceparent_is_ignored(header: str | None) -> None:
    assert checked_parent(header) is None
