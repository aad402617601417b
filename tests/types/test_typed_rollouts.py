"""`Rollout`: a dict, with properties for the keys that every rollout has."""

import pickle

import orjson
import pytest

from gym_serve import Rollout, Unavailable
from gym_serve.types.rows import failed_rollout

TEXT = {"type": "output_text", "text": "Hello.", "annotations": []}
TOKENS = {"prompt_token_ids": [1], "generation_token_ids": [2, 3], "generation_log_probs": [-0.5, -0.1]}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [TEXT]}
ROLLOUT = Rollout(
    {
        "prompt": "Hi",
        "response": {"id": "resp_1", "object": "response", "output": [{**MESSAGE, **TOKENS}], "mine": 1},
        "reward": 1,
        "extracted_answer": "B",
        "_ng_task_index": 7,
        "_ng_rollout_index": 2,
        "_ng_rollout_id": "7-2-a1",
        "_ng_attempt_index": 1,
        "_ng_latency_s": 0.25,
    }
)


def test_properties() -> None:
    assert (ROLLOUT.rollout_id, ROLLOUT.task_index, ROLLOUT.rollout_index, ROLLOUT.attempt) == (
        "7-2-a1",
        7,
        2,
        1,
    )
    assert (ROLLOUT.reward, ROLLOUT.latency, ROLLOUT.failure, ROLLOUT.masked) == (1.0, 0.25, None, False)
    assert ROLLOUT["extracted_answer"] == "B"
    assert ROLLOUT.output_text == "Hello."
    assert ROLLOUT.tokens == [TOKENS]


def test_the_response_is_that_of_openais_sdk() -> None:
    response = ROLLOUT.response
    assert type(response).__module__.startswith("openai.")
    assert response.output_text == "Hello."
    assert response.output[0].type == "message"
    assert response.model_extra == {"mine": 1}


def test_it_stays_a_dict() -> None:
    assert orjson.loads(orjson.dumps(ROLLOUT)) == ROLLOUT
    copied = pickle.loads(pickle.dumps(ROLLOUT))
    assert type(copied) is Rollout
    assert copied == ROLLOUT


def test_a_failure() -> None:
    error = Unavailable("gone", stage="model", retry_after=2.0)
    failed = Rollout(failed_rollout({"prompt": "Hi"}, error))
    assert failed.masked
    assert failed.failure is not None
    assert (failed.failure["kind"], failed.failure["stage"], failed.failure["retry_after"]) == (
        "unavailable", "model", 2.0,
    )  # fmt: skip
    assert (failed.attempt, failed.output, failed.tokens, failed.output_text) == (0, [], [], "")
    with pytest.raises(KeyError):
        _ = failed.response
