"""Serialization of the Tinker protocol: protobuf messages with numpy arrays, and the JSON forms of older clients."""
