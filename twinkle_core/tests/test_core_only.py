"""What client scripts import from `twinkle` needs core and the registry only: no torch, no `datasets`, no plugin."""

import subprocess
import sys

BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        heavy = {"torch", "datasets", "pyarrow", "pandas", "transformers", "peft", "ray", "vllm", "fastapi", "httpx"}
        if root in heavy or (root.startswith("twinkle_") and root != "twinkle_registry"):
            raise ModuleNotFoundError(f"No module named {root!r}", name=root)

sys.meta_path.insert(0, Absent())
"""
SCRIPT = """
from twinkle import DeviceGroup, DeviceMesh, Platform, exists, get_device_placement, get_logger, is_master, requires
from twinkle.advantage import Advantage
from twinkle.data_format import (
    InputFeature, LossOutput, Message, ModelOutput, SampledSequence, SampleResponse, SamplingParams, StopReason, Tool,
    ToolCall, Trajectory, pack_value, user_data_get,
)
from twinkle.dataset import DatasetMeta
from twinkle.loss import Loss
from twinkle.metric import Metric
from twinkle.notifier import Notifier
from twinkle.preprocessor import DataFilter, Preprocessor
from twinkle.reward import Reward
from twinkle.sampler import Sampler
from twinkle.template.tools import ToolCallParser

meta = DatasetMeta("ms://swift/self-cognition", data_slice=range(500))
assert meta.get_id().startswith("ms://swift/self-cognition:default:train")
assert user_data_get([("ground_truth", "42")], "ground_truth") == 42
assert user_data_get([("key_rounds", pack_value([1, 3]))], "key_rounds") == [1, 3]
assert SamplingParams.from_dict({"max_new_tokens": 5}).max_tokens == 5
assert DeviceMesh.from_sizes(dp_size=1).data_world_size == 1
get_logger().info("ready")
heavy = {"torch", "datasets", "transformers", "peft"} & set(sys.modules)
assert not heavy, heavy
print("done")
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + script], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_names_of_client_scripts_are_in_core() -> None:
    found = run(SCRIPT)
    assert found.stdout == "done\n", found.stderr
