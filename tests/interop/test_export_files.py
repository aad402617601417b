import copy
import errno
import sys

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.export_cases import call, episode, episodes, failed, reasoning, returned, rollout, said

from gym_serve.interop.export import FORMATS, export
from gym_serve.types.errors import BadRequest, Conflict, InvalidRequest

pytest.importorskip("pyarrow", reason="pip install 'gym-serve[export]'")

MANY = [
    episode(),
    episode("4 degrees.", index=1, reward=0.0),
    failed(index=2),
    rollout([said("3"), said("")], task=1, mask_sample=True),
    rollout([said("")], task=2),
    rollout([{"type": "web_search_call"}], task=3),
    {"no": "rollout"},
]

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def output_of(format, folder):
    return folder / f"out{FORMATS[format].suffix}"


@pytest.mark.parametrize("format", FORMATS)
def test_every_rollout_is_exported_or_accounted_for(format, tmp_path):
    report = export(iter(MANY), format, output_of(format, tmp_path))
    assert report.read == len(MANY)
    assert report.read == report.exported + sum(dropped.count for dropped in report.dropped.values())
    assert report.exported > 0
    assert "no_prompt" in report.dropped
    assert report.path == str(output_of(format, tmp_path))
    assert orjson.loads(orjson.dumps(report.to_json()))["dropped"]["no_prompt"]["count"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [output_of(format, tmp_path).name]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rollouts", [[], [None]])
def test_nothing_to_export_is_an_empty_output(format, rollouts, tmp_path):
    report = export(rollouts, format, output_of(format, tmp_path))
    assert (report.exported, report.records) == (0, 0)
    assert output_of(format, tmp_path).exists()


@pytest.mark.parametrize("format", FORMATS)
def test_integers_of_any_size_and_halves_of_pairs_are_exported(format, tmp_path):
    odd = episode() | {"expected_answer": 2**70, "sizes": [-(2**65)], "name": "\ud83d"}
    report = export([odd], format, output_of(format, tmp_path))
    assert report.exported == 1, report.dropped
    if format in ("nemo_rl", "verifiers"):
        assert str(2**70) in output_of(format, tmp_path).read_text()


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(episodes() | anything, max_size=5),
    anything,
    st.sampled_from(["response", "input", "item", "tool", "extra"]),
)
def test_hostile_rollouts_never_raise(format, tmp_path, rollouts, odd, where):
    spoiled = copy.deepcopy(episode())
    if where == "response":
        spoiled["response"] = odd
    elif where == "tool":
        spoiled["responses_create_params"]["tools"][0]["parameters"] = odd
    elif where == "extra":
        spoiled |= {"reward_components": odd, "agent_ref": odd, "failure": odd, "expected_answer": odd}
    elif where == "input":
        spoiled["responses_create_params"]["input"] = odd
    else:
        spoiled["response"]["output"].append({"type": "message", "role": "assistant", "content": odd})
    path = output_of(format, tmp_path)
    if not path.suffix:
        path.mkdir(exist_ok=True)
        path /= str(len(list(tmp_path.glob("*/*"))))
    report = export([*rollouts, spoiled], format, path, overwrite=True)
    assert report.read == report.exported + sum(dropped.count for dropped in report.dropped.values())


@pytest.mark.parametrize("format", ["sft", "openrlhf", "trl", "verl"])
def test_what_failed_is_left_out_where_there_is_no_mask(format, tmp_path):
    report = export([episode(), failed(index=1)], format, output_of(format, tmp_path))
    assert report.dropped["failed: model_timeout"].example == "0-1"
    assert report.masked == 0


@pytest.mark.parametrize("format", ["nemo_rl", "verifiers"])
def test_what_failed_is_masked_where_there_is_a_mask(format, tmp_path):
    report = export([episode(), failed(index=1)], format, output_of(format, tmp_path))
    assert (report.exported, report.masked) == (2, 1)
    second = orjson.loads(output_of(format, tmp_path).read_bytes().splitlines()[1])
    if format == "nemo_rl":
        assert (second["loss_multiplier"], second["mask_sample"]) == (0.0, True)
    else:
        assert second["traces"][0]["agent"]["trainable"] is False


def test_a_failure_without_tokens_is_named_as_such(tmp_path):
    raw = failed()
    raw["response"] = {"output": []}
    report = export([raw], "nemo_rl", tmp_path / "out.jsonl")
    assert list(report.dropped) == ["failed: model_timeout"]


def test_low_rewards_can_be_left_out(tmp_path):
    rollouts = [episode(reward=r) for r in (0.0, 0.5, 1.0, None)]
    report = export(rollouts, "sft", tmp_path / "out.jsonl", min_reward=0.5)
    counts = {reason: dropped.count for reason, dropped in report.dropped.items()}
    assert (report.exported, counts) == (2, {"low_reward": 1, "no_reward": 1})


def test_names_of_failures_cannot_fill_the_memory(tmp_path):
    rollouts = ({**failed(), "_ng_failure_class": f"kind {i}"} for i in range(300))
    report = export(rollouts, "sft", tmp_path / "out.jsonl")
    assert len(report.dropped) == 101
    assert report.dropped["other"].count == 200


def test_unknown_formats_and_options(tmp_path):
    with pytest.raises(InvalidRequest, match="did you mean 'verl'"):
        export([], "verll", tmp_path / "x")
    with pytest.raises(InvalidRequest, match="known: verl, nemo_rl"):
        export([], "csv", tmp_path / "x")
    with pytest.raises(InvalidRequest, match="did you mean 'label'"):
        export([], "openrlhf", tmp_path / "x", labels=1)
    for format, option in (("verl", "per"), ("trl", "kind")):
        with pytest.raises(InvalidRequest, match=r"must be .*, got"):
            export([], format, tmp_path / "x", **{option: "all"})
    assert list(tmp_path.iterdir()) == []


def test_the_options_of_a_format_can_be_listed():
    assert set(FORMATS["sft"].options) == {"reasoning", "arguments"}
    assert FORMATS["openrlhf"].options["label"].default == "expected_answer"
    assert set(FORMATS["atif"].options) == set()


def test_an_existing_file_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("mine")
    with pytest.raises(Conflict):
        export([episode()], "sft", path)
    assert path.read_text() == "mine"
    export([episode()], "sft", path, overwrite=True)
    assert orjson.loads(path.read_bytes())["reward"] == 1.0


def test_a_device_is_not_replaced():
    with pytest.raises(Conflict, match="not a regular file"):
        export([episode()], "sft", "/dev/null", overwrite=True)


@pytest.mark.parametrize("format", ["sft", "atif"])
def test_a_folder_with_something_in_it_is_never_replaced(format, tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(Conflict, match="not empty"):
        export([episode()], format, tmp_path, overwrite=True)
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_source_that_breaks_leaves_nothing_behind(format, tmp_path):
    def rollouts():
        yield episode()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BadRequest, match="No space left"):
        export(rollouts(), format, output_of(format, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadRequest, match="does not exist; create it first"):
        export([episode()], "sft", tmp_path / "file" / "out.jsonl")
    with pytest.raises(BadRequest, match="does not exist; create it first"):
        export([episode()], "sft", tmp_path / "mispelt" / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_package_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'gym-serve\[export\]'"):
        export([episode()], "verl", tmp_path / "out.parquet")
    assert export([episode()], "sft", tmp_path / "out.jsonl").exported == 1


def test_the_rollouts_are_left_alone(tmp_path):
    def rollouts():
        for i in range(50):
            raw = episode(task=i)
            before = copy.deepcopy(raw)
            yield raw
            assert raw == before

    for format in FORMATS:
        (tmp_path / format).mkdir()
        export(rollouts(), format, output_of(format, tmp_path / format))


def test_sft_lines(tmp_path):
    turn = [reasoning("Ask."), call(arguments="not JSON"), returned(), said("3")]
    export([rollout(turn)], "sft", tmp_path / "out.jsonl", arguments="object", reasoning="think_tags")
    line = orjson.loads((tmp_path / "out.jsonl").read_bytes())
    assert [message["role"] for message in line["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert line["messages"][2]["content"] == "<think>Ask.</think>"
    assert line["messages"][2]["tool_calls"][0]["function"]["arguments"] == "not JSON"
    assert "tools" not in line
