"""The viewer: rollouts are indexed, filtered, and read on a page (``gym-serve view``) or in a notebook.

    runs = gym_serve.view.open("out.jsonl")
    worst = runs.to_pandas("reward < 0.5 and tool('get_weather')", sort="-tokens")

- `open`: the runs of files and folders, as a `View`.
- `View`, `RolloutRow`: rollouts, summaries, data frames and tables.
- `BadExpression`: a filter that cannot be understood, with the position.
"""

from gym_serve.view.expression import BadExpression
from gym_serve.view.queries import RolloutRow
from gym_serve.view.view import View
from gym_serve.view.view import open_view as open

__all__ = ["BadExpression", "RolloutRow", "View", "open"]
