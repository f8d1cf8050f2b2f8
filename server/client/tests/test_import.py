"""What the import of the client costs."""

import resource
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
GOAL_MS = 200.0


def test_it_imports_no_package_that_only_calls_need() -> None:
    code = f"import sys\nbefore = set(sys.modules){NAMES}"
    code += f"print([name for name in {HEAVY + LATER!r} if name in sys.modules and name not in before])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_names_of_published_scripts_take_less_than_200_ms() -> None:
    """CPU time over a bare interpreter, the least of some pairs: other processes can only add to it."""
    assert min(_cpu_ms(NAMES) - _cpu_ms("pass") for _ in range(5)) < GOAL_MS


def _cpu_ms(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
