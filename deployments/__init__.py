"""Models and agents, each a server that a graph deploys by its ``type``; docs/models.md lists them."""
