"""The HTTP endpoints of the native protocol, as used by `twinkle_client`: `/twinkle/...`.

A model is a row of the same tables and a queue of the same log as those of the Tinker protocol.
"""
