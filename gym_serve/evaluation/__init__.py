"""Evaluations: benchmarks by name, any number of them with any number of models, in one run on one graph.

    benchmark = find_benchmark("gsm8k")                  # rows, prompt, environment, agent: one file
    gym = Gym.from_benchmark("gsm8k", {"type": "chat_model", ...}, split="train")
    rollouts = gym.run(gym.rows, limit=8)

A benchmark evaluates and trains from the same file. `gym-serve eval` is this package at the terminal.
"""

from gym_serve.evaluation.benchmark import Benchmark, benchmark_names, find_benchmark
from gym_serve.evaluation.plan import Plan
from gym_serve.evaluation.results import Results, results_of

__all__ = ["Benchmark", "Plan", "Results", "benchmark_names", "find_benchmark", "results_of"]
