"""Judges: models that score what a policy did. What environments with a judge have in common.

    prompt     check_fields  check_labels  defused  judge_messages
    call       JudgeCalls: bounded concurrency, typed failures, `VerdictCache`
    verdict    label_of  json_objects
    decision   LabelJudge: votes of several judges;  both_orders
    trust      calibrate: agreement and kappa with labels that people gave

What the calls cost is counted by `gym_serve.servers.usage`, as for every other model call.
"""

from gym_serve.judging.cache import CacheSettings, VerdictCache
from gym_serve.judging.calibration import Calibration, calibrate
from gym_serve.judging.calls import Answer, JudgeCalls
from gym_serve.judging.label_judge import Ballot, LabelJudge, both_orders, majority
from gym_serve.judging.prompts import check_fields, check_labels, defused, judge_messages
from gym_serve.judging.settings import JudgeSettings, open_cache
from gym_serve.judging.verdicts import final_text, first_label, json_objects, label_of, whole_text

__all__ = [
    "Answer",
    "Ballot",
    "CacheSettings",
    "Calibration",
    "JudgeCalls",
    "JudgeSettings",
    "LabelJudge",
    "VerdictCache",
    "both_orders",
    "calibrate",
    "check_fields",
    "check_labels",
    "defused",
    "final_text",
    "first_label",
    "json_objects",
    "judge_messages",
    "label_of",
    "majority",
    "open_cache",
    "whole_text",
]
