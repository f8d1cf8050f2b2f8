"""Line 113: older SDKs, unmodified, run one smoke script each; their wheels come from the package index."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Served

VERSIONS = ("0.16.1", "0.18.0", "0.24.0", "0.25.0", "0.28.1", "0.34.0")
SMOKE = """
import sys, tinker
from tinker import types
url, model, version = sys.argv[1:]
assert tinker.__version__ == version, tinker.__version__
done = lambda future: future.result() if hasattr(future, "result") else future
client = tinker.ServiceClient(base_url=url, api_key="tml-x")
training = done(client.create_lora_training_client(base_model=model, rank=4))
tokens = [5, 9, 4, 8, 2]
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 4},
)
losses = []
for _ in range(3):
    passed = training.forward_backward([datum, datum], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
    output = passed.result()
    losses.append(output.metrics["loss:sum"])
    total = -sum(sum(out["logprobs"].data) for out in output.loss_fn_outputs)
    assert abs(total - losses[-1]) < 1e-3, (total, losses)
    stepped.result()
assert losses[2] < losses[0], losses
assert training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].shape == [4]
path = training.save_state("a").result().path
again = done(client.create_training_client_from_state(path))
assert again.forward([datum], "cross_entropy").result().metrics["loss:sum"] < losses[0] / 2
sampling = done(training.save_weights_and_get_sampling_client(**({"name": "b"} if version < "0.26" else {})))
params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
answer = sampling.sample(types.ModelInput.from_ints(tokens), num_samples=2, sampling_params=params).result()
assert [len(sequence.tokens) for sequence in answer.sequences] == [4, 4]
assert all(len(sequence.logprobs) == 4 for sequence in answer.sequences)
print("smoke passed")
"""


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fetch every version; skip all where the package index gives none, and leave none out where it gives one."""
    folder, found, failed = tmp_path_factory.mktemp("sdks"), {}, []
    for version in VERSIONS:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / version)]
        done = subprocess.run(
            [*install, f"tinker=={version}"], capture_output=True, text=True, check=False, timeout=200
        )  # fmt: skip
        if done.returncode == 0:
            found[version] = folder / version
        else:
            failed.append(f"{version}: {done.stderr.strip()[-300:]}")
            if not found and len(failed) > 1:
                break
    if not found:
        pytest.skip(f"the package index gives no tinker: {failed}")
    assert not failed, f"the package index gave {sorted(found)}, but not {failed}"
    return found


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_line_113_an_older_sdk_trains_saves_and_samples(
    served: Served, tiny: Path, fetched: dict[str, Path], version: str
) -> None:
    environment = {
        **os.environ, "PYTHONPATH": str(fetched[version]), "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
    }  # fmt: skip
    command = [sys.executable, "-c", SMOKE, served.url, str(tiny), version]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert "smoke passed" in ended.stdout, f"{ended.stdout[-1000:]}\n{ended.stderr[-4000:]}\n{served.log()[-1500:]}"
