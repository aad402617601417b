# gym_serve with Ray, for CPU nodes: docker build -t gym-serve .  (after `make dist`; `make image` does both)
# KubeRay, Slurm and plain containers start it with their own command.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# bubblewrap: the sandbox of code that a model wrote. wget: KubeRay's own probes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap wget \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 gym
COPY dist/*.whl /tmp/
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$(echo /tmp/gym_serve-*.whl)[math]" && rm /tmp/*.whl

USER 1000
WORKDIR /home/gym
# Serve, and Ray's metrics.
EXPOSE 8000 8080
CMD ["gym-serve", "--help"]
