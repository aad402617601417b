"""Rollouts of external harnesses: every conversation that carries what the model said reaches each format."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.export_cases import RETRY, SUBAGENT, bundle, captured, episode, response, rollout, said, user

from gym_serve.capture import CallTree, trajectories_of
from gym_serve.interop.export import FORMATS, NotExportable, Rollout, export
from gym_serve.interop.export.chat_messages import conversation, trl_tokens
from gym_serve.interop.export.token_data import nemo_rl_record
from gym_serve.interop.export.traces import atif_trajectory, verifiers_episode
from gym_serve.types.protocols import TOKEN_KEYS


def records(raw, format, tmp_path, **options):
    path = tmp_path / f"out{FORMATS[format].suffix}"
    report = export([raw], format, path, overwrite=True, **options)
    if path.suffix == ".parquet":
        return report, pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return report, [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("format", ["verl", "nemo_rl", "openrlhf", "trl", "sft"])
def test_each_branch_is_a_row_with_the_reward_of_the_whole(format, tmp_path):
    report, found = records(captured(SUBAGENT, RETRY, reward=0.5), format, tmp_path)
    assert (report.read, report.exported, report.records) == (1, 1, 3)
    assert (report.dropped, report.dropped_branches) == ({}, {})
    assert [row.get("reward", row.get("total_reward")) for row in found] == [0.5] * 3


def test_tokens_are_those_of_the_branch(tmp_path):
    raw = captured(SUBAGENT, RETRY)
    _, trl = records(raw, "trl", tmp_path, kind="tokens")
    assert [row["input_ids"] for row in trl] == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [40, 41, 42],
        [1, 2, 3, 4, 5, 9, 50, 51],
    ]
    assert trl[2]["assistant_masks"] == [0, 0, 0, 0, 0, 0, 1, 1], "its context is trained on elsewhere"
    _, verl = records(raw, "verl", tmp_path)
    assert [row["rollout"]["response_ids"] for row in verl] == [[4, 5, 6, 7, 8], [42], [50, 51]]
    assert [row["rollout"]["reward_score"] for row in verl] == [1.0] * 3
    _, nemo_rl = records(raw, "nemo_rl", tmp_path)
    assert [[m["token_ids"] for m in row["message_log"]] for row in nemo_rl][1:] == [
        [[40, 41], [42]],
        [[1, 2, 3, 4, 5, 9], [50, 51]],
    ]


def test_the_group_is_kept(tmp_path):
    raw = captured(SUBAGENT, RETRY, task=7, _rowidx=4)
    _, verl = records(raw, "verl", tmp_path)
    assert [(row["extra_info"]["index"], row["extra_info"]["branch"]) for row in verl] == [
        (7, 0),
        (7, 1),
        (7, 2),
    ]
    assert not {"branches", "captured_input"} & set(orjson.loads(verl[0]["extra_info"]["row"]))
    _, nemo_rl = records(raw, "nemo_rl", tmp_path)
    assert [(row["_rowidx"], row["branch"]) for row in nemo_rl] == [(4, 0), (4, 1), (4, 2)]
    assert [row["full_result"]["_ng_rollout_id"] for row in nemo_rl] == ["7-0", "7-0.1", "7-0.2"]
    assert all("branches" not in row["full_result"] for row in nemo_rl), "they are lines of their own"
    _, tasks = records(raw, "verl", tmp_path, per="task")
    assert len(tasks) == 1


def test_a_group_without_an_index_is_that_of_the_row():
    raw = captured(SUBAGENT)
    del raw["_ng_task_index"], raw["_ng_rollout_id"]
    main, branch = Rollout.read(raw).conversations()
    plain = {key: value for key, value in raw.items() if key[:8] != "captured"}
    assert main.task == branch.task == Rollout.read(plain).task


def test_prompts_are_what_the_model_was_shown():
    main, subagent, retry = Rollout.read(captured(SUBAGENT, RETRY)).conversations()
    assert [m["content"] for m in conversation(main).prompt] == ["Harness: weather in Oslo?"]
    assert [tool["function"]["name"] for tool in conversation(main).tools] == ["weather"]
    assert [tool["function"]["name"] for tool in conversation(subagent).tools] == ["shell"]
    assert [m["role"] for m in conversation(retry).prompt] == ["user", "assistant", "tool"]
    assert [m["content"] for m in conversation(retry).completion] == ["No idea."]


def test_atif_has_them_as_trajectories_of_their_own():
    made = atif_trajectory(Rollout.read(captured(SUBAGENT, RETRY)))
    inner = made["subagent_trajectories"]
    assert [t["trajectory_id"] for t in inner] == ["0-0.1", "0-0.2"]
    assert [step["source"] for step in inner[1]["steps"]] == ["user", "agent", "agent"]
    assert [step.get("is_copied_context", False) for step in inner[1]["steps"]] == [False, True, False]
    assert "branches" not in made["extra"]


def test_a_trace_of_verifiers_has_them_as_paths():
    (trace,) = verifiers_episode(Rollout.read(captured(SUBAGENT, RETRY)))["traces"]
    nodes = trace["nodes"]
    roots = [i for i, node in enumerate(nodes) if "parent" not in node]
    assert len(roots) == 3
    ends = [call["node"] for call in trace["calls"]]
    assert len(ends) == 4, "two calls of the one that was verified, one of each branch"
    path, tokens = ends[-1], []
    while path is not None:
        tokens = nodes[path].get("token_ids", []) + tokens
        path = nodes[path].get("parent")
    assert tokens == [1, 2, 3, 4, 5, 9, 50, 51]
    assert sum(bool(node.get("sampled")) for node in nodes) == 4


@pytest.mark.parametrize(
    ("branch", "reason"),
    [
        ({**SUBAGENT, "response": response(said("x"))}, "no_tokens"),
        ({"input": [], "response": None}, "no_tokens"),
        ("?", "no_tokens"),
    ],
)
def test_a_branch_that_a_format_cannot_hold_is_counted(branch, reason, tmp_path):
    report, found = records(captured(branch, SUBAGENT), "nemo_rl", tmp_path)
    assert (report.exported, len(found), report.dropped) == (1, 2, {})
    assert report.dropped_branches[reason].count == 1
    assert report.dropped_branches[reason].example == "0-0.1"
    assert orjson.loads(orjson.dumps(report.to_json()))["dropped_branches"]


def test_branches_reach_a_format_that_cannot_hold_the_rest(tmp_path):
    raw = captured(SUBAGENT)
    raw["response"]["output"] = [said("3")]
    report, found = records(raw, "nemo_rl", tmp_path)
    assert [row["branch"] for row in found] == [1]
    assert (report.exported, report.dropped_branches["no_tokens"].example) == (1, "0-0")


def test_what_failed_takes_its_branches_along(tmp_path):
    report, found = records(captured(SUBAGENT, mask_sample=True), "sft", tmp_path)
    assert (found, report.dropped["masked"].count) == ([], 1)
    report, found = records(captured(SUBAGENT, mask_sample=True), "nemo_rl", tmp_path)
    assert [row["loss_multiplier"] for row in found] == [0.0, 0.0]
    assert (report.exported, report.masked) == (1, 1)


@pytest.mark.parametrize("context", [None, True, -1, 99, "2", 1.0])
def test_a_context_that_is_none(context):
    (_, branch) = Rollout.read(captured({**SUBAGENT, "context": context})).conversations()
    assert branch.context == 0


def test_rollouts_without_branches_are_as_before():
    record = nemo_rl_record(Rollout.read(episode()))
    assert "branch" not in record
    assert list(Rollout.read(episode()).conversations()) == [Rollout.read(episode())]


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=8))
def test_every_generated_token_is_trained_on_once(calls):
    """Calls that go on from any earlier one, retokenized at times, as captures make trajectories of them."""
    tree, histories = CallTree(), [([user("start")], [0])]
    for number, (at, retokenized) in enumerate(calls):
        items, seen = histories[at % len(histories)]
        asked = [*items, user(f"ask {number}")]
        prompt = [*([t + 1000 for t in seen] if retokenized else seen), 100 + number]
        generation = [10_000 + number]
        output = [{**said(f"say {number}"), **bundle(prompt, generation)}]
        parent, begins = tree.parent_of(asked)
        tree.add(asked, response(*output), parent, begins)
        plain = {k: v for k, v in output[0].items() if k not in TOKEN_KEYS}
        histories.append(([*asked, plain], prompt + generation))
    main, *branches = trajectories_of(tree.nodes)
    raw = rollout(
        main["response"]["output"],
        branches=branches,
        captured_input=main["input"],
        captured_context=main["context"],
    )
    trained, said_once = [], []
    for part in Rollout.read(raw).conversations():
        row = trl_tokens(part)
        trained += [t for t, m in zip(row["input_ids"], row["assistant_masks"], strict=True) if m]
        said_once += [m["content"] for m in conversation(part).completion if m["role"] == "assistant"]
    assert sorted(trained) == [10_000 + number for number in range(len(calls))]
    assert sorted(said_once) == sorted(f"say {number}" for number in range(len(calls)))


def test_no_prompt_at_all_is_told():
    with pytest.raises(NotExportable) as error:
        conversation(list(Rollout.read(captured({"response": response(said("x"))})).conversations())[1])
    assert error.value.reason == "no_prompt"
