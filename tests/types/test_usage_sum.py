from gym_serve.types.protocols import usage_sum


def usage(tokens, cached=None, reasoning=None):
    return {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": tokens + 1,
    }


def test_usage_adds_up():
    assert usage_sum([usage(3, 1, 0), None, usage(4, 2, 5)]) == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 9,
    }


def test_a_detail_that_a_call_does_not_tell_adds_nothing():
    without = {key: value for key, value in usage(4, 1).items() if key != "input_tokens_details"}
    for other in (usage(4), without, {**usage(4), "input_tokens_details": 5}):
        for order in ([usage(3, 1), other], [other, usage(3, 1)]):
            assert usage_sum(order)["input_tokens_details"] == {"cached_tokens": 1}


def test_no_usage_has_no_sum():
    assert usage_sum([]) is None
    assert usage_sum([None, None]) is None
