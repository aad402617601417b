"""What runs inside of a sandbox: it executes code for the process outside.

The modules of this package use the standard library alone, and import one another relatively: in the
sandbox they are a package ``inside`` with nothing of gym_serve around it. They hold no secret, and
nothing that they say is trusted: code that takes them over can only claim things about itself, and
what is right or wrong is decided outside.
"""
