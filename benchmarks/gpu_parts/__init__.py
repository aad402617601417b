"""The parts of `benchmarks.gpu`: ``figures(arguments)`` of each measures, and gives figures by name."""
