"""Chat models behind an interface: something that answers a conversation."""

from twinkle_agentic.protocol.base import API, APIError
from twinkle_agentic.protocol.openai import OpenAI

__all__ = ["API", "APIError", "OpenAI"]
