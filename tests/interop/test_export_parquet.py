import orjson
import pytest
from support.export_cases import CLOCK_TOOL, WEATHER_TOOL, call, episode, returned, rollout, said, timed

import gym_serve.interop.export.files as parquet_module
from gym_serve.interop.export import export
from gym_serve.interop.export.chat_messages import with_placeholders

pq = pytest.importorskip("pyarrow.parquet", reason="pip install 'gym-serve[export]'")

IMAGE = {"type": "input_image", "image_url": "https://host/a.png"}


def rows(rollouts, format, folder, **options):
    report = export(rollouts, format, folder / "out.parquet", overwrite=True, **options)
    return pq.read_table(folder / "out.parquet").to_pylist(), report


def asking(*parts, **fields):
    raw = rollout([said("ok")], **fields)
    raw["responses_create_params"]["input"] = [{"role": "user", "content": list(parts)}]
    return raw


def text(value):
    return {"type": "input_text", "text": value}


def test_verl_rows(tmp_path):
    (row, plain), _ = rows([timed(episode()), rollout([said("3")], task=1)], "verl", tmp_path)
    assert row["data_source"] == row["ability"] == "weather_agent"
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (0, "train")
    inside = orjson.loads(row["extra_info"]["row"])
    assert inside.keys() == {"responses_create_params", "agent_ref", "expected_answer"}
    assert row["rollout"] == {
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5, 6, 7, 8],
        "response_mask": [1, 1, 0, 0, 1],
        "response_logprobs": [-0.25, -0.5, 0.0, 0.0, -1.0],
        "reward_score": 1.0,
        "num_turns": 5,
        "metrics": {"generate_sequences": 3.0, "tool_calls": 0.5, "compute_score": 2.0},
    }
    assert plain["rollout"] is None
    assert (plain["reward"], plain["tools"]) == (1.0, [])


def test_verl_tasks_once(tmp_path):
    rollouts = [episode(), episode(index=1), episode(task=1, mask_sample=True)]
    found, report = rows(
        rollouts, "verl", tmp_path, per="task", data_source="s", split="test", ground_truth="_ng_task_index"
    )
    assert [row["extra_info"]["index"] for row in found] == [0, 1]
    assert found[0].keys() == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert (found[0]["data_source"], found[1]["reward_model"]["ground_truth"]) == ("s", "1")
    assert report.dropped["same_task"].count == 1


def test_messages_get_only_the_keys_that_are_used(tmp_path):
    found, _ = rows([rollout([said("3")])], "verl", tmp_path)
    assert found[0]["messages"][-1] == {"role": "assistant", "content": "3"}
    found, _ = rows([episode()], "verl", tmp_path)
    assert found[0]["messages"][0].keys() >= {"role", "content", "tool_calls", "reasoning_content"}
    assert found[0]["prompt"][0].keys() == {"role", "content"}


@pytest.mark.parametrize(
    ("tool_sets", "kept"),
    [
        ([[WEATHER_TOOL]], True),
        ([[WEATHER_TOOL], []], True),
        ([[WEATHER_TOOL, CLOCK_TOOL]], False),
        ([[WEATHER_TOOL], [CLOCK_TOOL]], False),
        ([[{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}]], False),
        ([[{"type": "function", "name": f"t{i}"}] for i in range(80)], False),
        ([[{**CLOCK_TOOL, "parameters": {"maximum": 1 << 63}}]], False),
        ([[{**CLOCK_TOOL, "parameters": {"enum": [1, "2"]}}]], False),
    ],
)
def test_tools_that_parquet_would_change_are_left_out_with_a_note(tool_sets, kept, tmp_path):
    rollouts = [rollout([said("x")], task=i, tools=tools) for i, tools in enumerate(tool_sets)]
    found, report = rows(rollouts, "verl", tmp_path)
    assert ("tools" in found[0]) is kept
    assert bool(report.notes) is not kept
    if kept:
        function = found[0]["tools"][0]["function"]
        assert function == {key: WEATHER_TOOL[key] for key in ("name", "description", "parameters")}


def test_nulls_in_a_tool_are_kept(tmp_path):
    tool = {**CLOCK_TOOL, "parameters": {"enum": [None, None]}}
    found, _ = rows([rollout([said("x")], tools=[tool])], "verl", tmp_path)
    assert found[0]["tools"][0]["function"]["parameters"] == {"enum": [None, None]}


def test_images_are_placeholders_and_a_list(tmp_path):
    rollouts = [asking(text("What is "), IMAGE, text("?")), rollout([said("3")], task=1)]
    for format in ("verl", "openrlhf"):
        (row, other), report = rows(rollouts, format, tmp_path)
        assert row["prompt"] == [{"role": "user", "content": "What is <image>?"}]
        assert (row["images"], other["images"]) == (["https://host/a.png"], [])
        assert report.exported == 2


@pytest.mark.parametrize("format", ["verl", "openrlhf"])
def test_media_without_a_form(format, tmp_path):
    rollouts = [
        asking({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}),
        asking(text("a literal <image>"), IMAGE),
        rollout([call(), returned(output=[IMAGE]), said("x")]),
    ]
    _, report = rows(rollouts, format, tmp_path)
    assert {reason: dropped.count for reason, dropped in report.dropped.items()} == {
        "media": 2,
        "placeholder": 1,
    }
    literal = [asking(text("a literal <image>"))]
    assert rows(literal, format, tmp_path)[1].exported == (format == "verl")


def test_messages_are_copied_before_they_are_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert with_placeholders(messages) == ([{"role": "user", "content": "a"}], [])
    assert messages[0]["content"] == [{"type": "text", "text": "a"}]


def test_openrlhf_rows(tmp_path):
    rollouts = [episode("a"), episode("b", index=1, reward=0.0, expected_answer=[3])]
    (row, other), report = rows(rollouts, "openrlhf", tmp_path)
    assert (row["label"], other["label"], row["datasource"], row["reward"]) == (
        "3",
        "[3]",
        "weather_agent",
        1.0,
    )
    assert [message["role"] for message in row["messages"]][:2] == ["system", "user"]
    assert "tools" not in row
    assert "without tools" in report.notes[0]


def test_trl_rows(tmp_path):
    (row, plain), _ = rows([episode(), rollout([said("3")], task=1)], "trl", tmp_path)
    assert [orjson.loads(message) for message in plain["completion"]] == [
        {"role": "assistant", "content": "3"}
    ]
    assert plain["tools"] is None
    first = orjson.loads(row["completion"][0])
    assert first["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert orjson.loads(row["tools"][0])["function"]["name"] == "weather"
    assert rows([asking(IMAGE)], "trl", tmp_path)[1].dropped["media"].count == 1


def test_trl_tokens(tmp_path):
    ((row,), report) = rows([episode(), rollout([said("3")], task=1)], "trl", tmp_path, kind="tokens")
    assert row["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row["assistant_masks"] == [0, 0, 0, 1, 1, 0, 0, 1]
    assert row["logprobs"] == [0.0, 0.0, 0.0, -0.25, -0.5, 0.0, 0.0, -1.0]
    assert report.dropped["no_tokens"].count == 1


@pytest.mark.parametrize("format", ["verl", "openrlhf", "trl"])
def test_rows_are_written_in_batches(format, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_module, "_BATCH_BYTES", 5000)
    found, report = rows((episode(task=i) for i in range(40)), format, tmp_path)
    assert len(found) == report.records == 40
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups > 2
