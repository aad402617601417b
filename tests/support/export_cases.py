"""Rollouts to export: a builder for episodes, and a hypothesis strategy for many of them."""

from hypothesis import strategies as st

WEATHER_TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CLOCK_TOOL = {
    "type": "function",
    "name": "clock",
    "description": "Time in a zone",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}


def reasoning(*texts):
    return {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": t} for t in texts]}


def said(text):
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": [part]}


def call(call_id="c1", arguments='{"city": "Oslo"}', name="weather"):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def returned(call_id="c1", output="3 degrees"):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def bundle(prompt, generation, logprobs=None):
    values = [-0.5] * len(generation) if logprobs is None else logprobs
    return {"prompt_token_ids": prompt, "generation_token_ids": generation, "generation_log_probs": values}


def rollout(output, *, task=0, index=0, reward=1.0, tools=(), **fields):
    """A finished rollout of a row with one question."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Oslo?"}]
    return {
        "responses_create_params": {"input": messages, **({"tools": list(tools)} if tools else {})},
        "agent_ref": {"type": "responses_api_agents", "name": "weather_agent"},
        "expected_answer": "3",
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "_ng_rollout_id": f"{task}-{index}",
        "response": {
            "id": "resp_1",
            "object": "response",
            "created_at": 1700000000.0,
            "model": "policy",
            "output": list(output),
            "usage": {"input_tokens": 20, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 4}},
        },
        "reward": reward,
        **fields,
    }


def episode(answer="3 degrees.", **fields):
    """Two model calls with reasoning, a tool call, text, and tokens."""
    return rollout(
        [
            reasoning("Ask the tool."),
            said("Let me look."),
            {**call(), **bundle([1, 2, 3], [4, 5], [-0.25, -0.5])},
            returned(),
            reasoning("Now answer."),
            {**said(answer), **bundle([1, 2, 3, 4, 5, 6, 7], [8], [-1.0])},
        ],
        tools=[WEATHER_TOOL],
        **fields,
    )


def failed(**fields):
    """A rollout whose model timed out after its first turn."""
    kind = "model_timeout"
    return {
        **episode(**fields),
        "reward": 0.0,
        "mask_sample": True,
        "instance_config": {"mask_sample": True},
        "_ng_failure_class": kind,
        "_ng_failure_terminal": False,
        "failure": {"kind": kind, "stage": "model", "status": 504, "retryable": True, "detail": "too slow"},
    }


def timed(raw, *, calls=2, **fields):
    """The same with a timeline: of 10 s with a failed call, ``calls`` others, a tool and a judge."""
    second = 1_000_000
    answered = (second, 0, 1, 20, 4, 9, "stop", {"version": "7", "endpoint": 0})
    judged = {"stage": "verify", "prompt": "Right?", "answer": "yes"}
    steps = [
        ["seed", 0, second, 0, 0],
        ["model", second, second, 0, 1, None, None, None, None, {"status": 503}],
        *(["model", (2 + i) * second, *answered] for i in range(calls)),
        ["tool", 6 * second, second // 2, 0, 0, "weather", 16, None],
        ["model", 8 * second, second, 0, 2, 5, 0, 1, None, judged],
        ["verify", 8 * second, 2 * second, 0, 0],
    ]
    line = {"began": 1_800_000_000.5, "dur": 10 * second, "agent": "weather_agent/a1", "steps": steps}
    places = {"servers": ["weather/e1", "policy/p1", "judge"], "endpoints": ["http://host/v1"]}
    return {**raw, "_ng_timeline": line | places, **fields}


SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}}


def response(*output, **fields):
    return {"id": "r", "object": "response", "model": "policy", "output": list(output), **fields}


def user(text):
    return {"type": "message", "role": "user", "content": text}


SUBAGENT = {
    "input": [user("Look it up.")],
    "response": response({**said("It is 3."), **bundle([40, 41], [42])}, tools=[SHELL]),
    "calls": 1,
    "context": 0,
}
RETRY = {
    "input": [user("Weather in Oslo?")],
    "response": response(call(), returned(), {**said("No idea."), **bundle([1, 2, 3, 4, 5, 9], [50, 51])}),
    "calls": 1,
    "context": 2,
}


def captured(*branches, **fields):
    """A harness's rollout: what it asked is not what the row has."""
    own = {"captured_input": [user("Harness: weather in Oslo?")], "captured_context": 0}
    return episode(branches=list(branches), **own, **fields)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda t: "<" not in t)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
logprobs = st.floats(-50, 0, width=32)


@st.composite
def episodes(draw, with_tokens=None):
    """A rollout of one to four model calls; its prompts are contiguous."""
    with_tokens = draw(st.booleans()) if with_tokens is None else with_tokens
    output, seen = [], []
    for turn in range(draw(st.integers(1, 4))):
        items = [reasoning(*draw(st.lists(texts, min_size=1, max_size=2)))] if draw(st.booleans()) else []
        items += [said(draw(texts))] if draw(st.booleans()) or not items else []
        ids = [f"c{turn}_{i}" for i in range(draw(st.integers(0, 2)))]
        items += [call(call_id, draw(st.one_of(texts, st.just('{"city": "Oslo"}')))) for call_id in ids]
        if with_tokens:
            prompt = seen + draw(tokens)
            generation = draw(tokens)
            items[-1].update(bundle(prompt, generation, [draw(logprobs) for _ in generation]))
            seen = prompt + generation if generation else seen
        output += items
        output += [returned(call_id, draw(texts)) for call_id in ids]
    return rollout(output, tools=[WEATHER_TOOL], task=draw(st.integers(0, 3)), reward=draw(st.floats(0, 1)))
