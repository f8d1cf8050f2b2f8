"""The modules with endpoints of the native protocol."""

from twinkle_server.native import futures, models, runs, sampling, sessions, streaming

PREFIX = "/twinkle"
# Routes are tried in order, so the most frequent ones come first.
MODULES = (models, futures, sampling, streaming, sessions, runs)
