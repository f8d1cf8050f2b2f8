"""Two packages of strangers: a loss with a dependency of its own, and a sampler with a lifecycle hook."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import Environment, EnvironmentMaker
from house import MEMBERS

pytestmark = pytest.mark.full


def test_pip_brings_what_the_package_declares_and_nothing_is_broken(downstream: Environment) -> None:
    listed = {row["name"]: row for row in json.loads(downstream.run("twinkle", "plugins", "list", "--json").stdout)}
    assert {row["status"] for row in listed.values()} == {"ok"}
    assert listed["acme-losses"]["kinds"] == {"loss": ["PolyLoss"]}
    assert listed["acme-sampling"]["kinds"] == {"sampler": ["AcmeGreedySampler"]}
    assert listed["acme-sampling"]["hooks"] == ["twinkle_run_start", "twinkle_step_end", "twinkle_run_end"]
    assert downstream.run("python", "-c", "import acme_numbers").returncode == 0
    assert downstream.run("twinkle", "plugins", "doctor").stdout.endswith("0 problems found\n")


def test_they_train_sample_and_write_by_name(train: Callable[..., dict[str, Any]]) -> None:
    told = train("PolyLoss", {"coefficients": [0.5, 2.0]}, "AcmeGreedySampler")
    expected = [0.5 * (1 - math.exp(logp)) + 2 * (1 - math.exp(logp)) ** 2 - logp for logp in told["logps"]]
    assert told["losses"][0] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert told["losses"][-1] < told["losses"][0] - 1

    tokens, logprobs = told["AcmeGreedySampler"]
    assert len(tokens) == 5
    assert tokens == told["TorchSampler"][0]
    found = [pair[0][1] for pair in logprobs]
    assert found == pytest.approx([pair[0][1] for pair in told["TorchSampler"][1]], abs=1e-4)

    diary = (Path(told["folder"]) / "diary.txt").read_text("utf-8").splitlines()
    steps = [f"step {step}: {loss:.4f}" for step, loss in enumerate(told["losses"], 1)]
    assert diary == ["downstream began", *steps, "downstream ended after 8 steps"]


def test_info_tells_of_the_package_and_where_it_comes_from(downstream: Environment) -> None:
    (found,) = json.loads(downstream.run("twinkle", "plugins", "info", "PolyLoss", "--json").stdout)
    assert (found["plugin"], found["version"], found["tenant_safe"]) == ("acme-losses", "1.2.0", True)
    assert (found["licence"], found["homepage"]) == ("MIT", "https://acme.example/losses")
    assert found["file"].endswith("acme_losses/poly.py")
    assert [(p["name"], p["default"], p["meaning"]) for p in found["parameters"]] == [
        ("coefficients", "(1.0,)", "c_1, c_2, ...; none is cross entropy.")
    ]


@pytest.fixture(scope="module")
def bare(environment: EnvironmentMaker, shelf: Path) -> Environment:
    """Core, the command line and the loss package without what it needs: neither torch nor its own dependency."""
    floors = [member for member in MEMBERS if member.name in ("twinkle-registry", "twinkle-core", "twinkle-cli")]
    made = environment(text for member in floors for text in member.project["dependencies"])
    made.install(shelf, *(member.name for member in floors), "acme-losses")
    return made


def test_without_what_it_needs_it_says_what_to_install(bare: Environment) -> None:
    done = bare.run("python", "-c", "from twinkle.loss import PolyLoss", check=False)
    assert done.stderr.splitlines()[-1] == (
        "twinkle_registry.errors.RequirementMissing: loss 'PolyLoss' of acme-losses needs torch>=2.6 (not installed), "
        "acme-numbers>=1.2 (not installed); run: pip install 'acme-losses[torch]' 'acme-numbers>=1.2'"
    )
    doctor = bare.run("twinkle", "plugins", "doctor", check=False)
    assert doctor.returncode == 1
    assert "pip install 'acme-losses[torch]'" in doctor.stdout
    assert "pip install 'acme-numbers>=1.2'" in doctor.stdout


def test_a_name_of_ours_that_is_not_installed_is_in_the_index(bare: Environment) -> None:
    done = bare.run("python", "-c", "import twinkle; twinkle.registry().find('CrossEntropyLoss', 'loss')", check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "the index lists it in 'twinkle-losses'; run: pip install twinkle-losses"
    )
    found = json.loads(bare.run("twinkle", "plugins", "search", "--json").stdout)
    assert found[0]["name"] == "qwen3_moe_transformers4_patch"
