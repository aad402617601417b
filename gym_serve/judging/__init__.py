"""Judges: models that score what a policy did. What environments with a judge have in common.

    prompt     check_fields  check_labels  escape_labels  delimiters_of  filled_in  judge_messages
    call       JudgeCalls: bounded concurrency, typed failures, `VerdictCache`;  ask_within
    verdict    label_of  verdict_in  contradicts  json_objects
    decision   LabelJudge: votes of several judges;  both_orders
    trust      calibrate: agreement and kappa with labels that people gave

What the calls cost is counted by `gym_serve.servers.usage`, as for every other model call.
"""

from gym_serve.judging.calls import Answer, CacheSettings, JudgeCalls, VerdictCache, ask_within
from gym_serve.judging.label_judge import (
    Ballot,
    Calibration,
    JudgeSettings,
    LabelJudge,
    both_orders,
    calibrate,
    dissent,
    majority,
    open_cache,
)
from gym_serve.judging.prompts import (
    check_fields,
    check_labels,
    contradicts,
    delimiters_of,
    escape_labels,
    filled_in,
    final_text,
    json_objects,
    judge_messages,
    label_of,
    verdict_in,
    whole_text,
)

__all__ = [
    "Answer",
    "Ballot",
    "CacheSettings",
    "Calibration",
    "JudgeCalls",
    "JudgeSettings",
    "LabelJudge",
    "VerdictCache",
    "ask_within",
    "both_orders",
    "calibrate",
    "check_fields",
    "check_labels",
    "contradicts",
    "delimiters_of",
    "dissent",
    "escape_labels",
    "filled_in",
    "final_text",
    "json_objects",
    "judge_messages",
    "label_of",
    "majority",
    "open_cache",
    "verdict_in",
    "whole_text",
]
