"""Condensers: shorten the chunks of a conversation."""

from twinkle_agentic.condenser.base import Condenser
from twinkle_agentic.condenser.keyword import KeywordCondenser
from twinkle_agentic.condenser.model import ModelCondenser

__all__ = ["Condenser", "KeywordCondenser", "ModelCondenser"]
