"""What the import of the client loads; `benchmarks/native_calls.py --imports` measures its time."""

import subprocess
import sys

NAMES = """
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.processor import InputProcessor
from twinkle_client.sampler import TorchSampler, vLLMSampler
"""
"""What published scripts import."""
HEAVY = ("torch", "transformers", "peft", "datasets", "numpy", "fastapi", "vllm", "ray")
LATER = ("asyncio", "httpx", "importlib.metadata", "pydantic", "pydantic_core")
"""What calls need and the import does not."""


def test_it_imports_no_package_that_only_calls_need() -> None:
    code = f"import sys\nbefore = set(sys.modules){NAMES}"
    code += f"print([name for name in {HEAVY + LATER!r} if name in sys.modules and name not in before])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
