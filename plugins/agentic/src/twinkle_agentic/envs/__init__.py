"""Environments that a model acts in by calling tools."""

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_pool import EnvPool, EnvPoolAdapter
from twinkle_agentic.envs.env_tool import EnvTool, Episode
from twinkle_agentic.envs.openenv import OpenEnv
from twinkle_agentic.envs.reasoning import ReasoningGymEnv

__all__ = ["Env", "EnvPool", "EnvPoolAdapter", "EnvTool", "Episode", "OpenEnv", "ReasoningGymEnv", "StepResult"]
