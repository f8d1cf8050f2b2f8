"""A stranger's plugin: built as a wheel, installed into a clean environment, used by name like one of ours."""

import json
import textwrap
from pathlib import Path

import pytest
from environments import Environment, EnvironmentMaker
from hatchling.builders.wheel import WheelBuilder
from house import MEMBERS

pytestmark = pytest.mark.full

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.2.3"
dependencies = ["twinkle-core>=0.1,<1"]

[project.entry-points.twinkle]
plugin = "{package}"
"""
MANIFEST = 'schema = 1\ncore = ">=0.1,<1"\nname = "{name}"\n'
COMPONENT = '\n[[component]]\nkind = "loss"\nname = "{0}"\nref = "{1}"\nsummary = "{2}"\nrequires = [{3}]\n'
FOCAL = '''
from twinkle.data_format import LossOutput
from twinkle.loss import Loss



class AcmeFocalLoss(Loss):
    """Focal loss: -(1 - p)^gamma log p."""

    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma

    def __call__(self, inputs, outputs, **kwargs):
        mask = inputs["labels"] != -100
        logps = outputs["logps"][mask]
        return LossOutput(-((1 - logps.exp()) ** self.gamma * logps).sum(), int(mask.sum()))


class SharedLoss(AcmeFocalLoss):
    """A name that two plugins offer."""
'''
ONE_STEP = """
import math, sys
import torch
from twinkle.testing import tiny_model
from twinkle.model import TransformersModel

torch.manual_seed(0)
model = TransformersModel(model_id=str(tiny_model(sys.argv[1])), mixed_precision="no")
model.set_loss("AcmeFocalLoss", gamma=1.5)
model.set_optimizer("SGD", lr=0.1)
rows = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, {"input_ids": [9, 10], "labels": [10, -100]}]

with torch.no_grad():
    expected = 0.0
    for row in rows:
        logps = model.model(input_ids=torch.tensor([row["input_ids"]])).logits[0].double().log_softmax(-1)
        for position, label in enumerate(row["labels"]):
            if label != -100:
                logp = float(logps[position, label])
                expected -= (1 - math.exp(logp)) ** 1.5 * logp / 4
before = [parameter.detach().clone() for parameter in model.model.parameters()]
found = model.forward_backward(inputs=rows)
model.clip_grad_and_step()
assert abs(float(found["loss"]) - expected) < 1e-5, (found, expected)
assert any(not torch.equal(old, new) for old, new in zip(before, model.model.parameters()))
print("stepped")
"""


def write_plugin(folder: Path, name: str, components: list[tuple[str, str, str, str]], **modules: str) -> Path:
    """Write the project of a plugin: `components` are (name, ref, summary, requires), `modules` the sources by name."""
    package = folder / "src" / name.replace("-", "_")
    package.mkdir(parents=True)
    project = PROJECT.format(name=name, package=package.name)
    (folder / "pyproject.toml").write_text(project, "utf-8")
    listed = "".join(COMPONENT.format(label, f"{package.name}.{ref}", *rest) for label, ref, *rest in components)
    (package / "twinkle-plugin.toml").write_text(MANIFEST.format(name=name) + listed, "utf-8")
    for module, source in {"__init__": "", **modules}.items():
        (package / f"{module}.py").write_text(textwrap.dedent(source), "utf-8")
    return folder


@pytest.fixture(scope="module")
def strangers(environment: EnvironmentMaker, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with all of our wheels and those of two strangers."""
    sources = tmp_path_factory.mktemp("strangers")
    torch = '"torch>=2.6"'
    acme = [
        ("AcmeFocalLoss", "focal:AcmeFocalLoss", "Focal loss", torch),
        ("SharedLoss", "focal:SharedLoss", "Offered twice", torch),
        ("BrokenLoss", "broken:BrokenLoss", "Raises at import", ""),
        ("NeedyLoss", "needy:NeedyLoss", "Needs what is not there", '"acme-telescope>=3"'),
    ]
    broken = "raise RuntimeError('the telescope is not calibrated')"
    rival = [("SharedLoss", "focal:SharedLoss", "Offered twice", torch)]
    plugins = [
        write_plugin(sources / "acme", "acme-losses", acme, focal=FOCAL, broken=broken, needy="import acme_telescope"),
        write_plugin(sources / "rival", "rival-losses", rival, focal=FOCAL),
    ]
    for plugin in plugins:
        list(WheelBuilder(str(plugin)).build(directory=str(sources), versions=["standard"]))
    made = environment(text for member in MEMBERS for text in member.requirements)
    made.install(wheels, *(member.name for member in MEMBERS))
    made.install(sources, "acme-losses", "rival-losses")
    return made


def test_it_is_imported_from_its_room(strangers: Environment) -> None:
    code = "from twinkle.loss import AcmeFocalLoss as X; print(X.__module__, X(gamma=1.0).gamma)"
    assert strangers.run("python", "-W", "error", "-c", code).stdout == "acme_losses.focal 1.0\n"


def test_its_name_trains_a_model(strangers: Environment, tmp_path: Path) -> None:
    assert strangers.run("python", "-c", ONE_STEP, tmp_path / "model").stdout.endswith("stepped\n")


def test_the_command_explains_it(strangers: Environment) -> None:
    (found,) = json.loads(strangers.run("twinkle", "plugins", "info", "AcmeFocalLoss", "--json").stdout)
    assert (found["plugin"], found["version"], found["missing"]) == ("acme-losses", "1.2.3", [])
    assert [parameter["name"] for parameter in found["parameters"]] == ["gamma"]
    assert found["file"].endswith("acme_losses/focal.py")


CONFLICT = "loss 'SharedLoss' is offered by acme-losses and rival-losses; write 'acme-losses/SharedLoss', "
BROKEN = (
    "loss 'BrokenLoss' of acme-losses: importing acme_losses.broken failed: "
    "RuntimeError: the telescope is not calibrated"
)
NEEDY = "loss 'NeedyLoss' of acme-losses needs acme-telescope>=3 (not installed); run: pip install 'acme-telescope>=3'"
UNKNOWN = "loss 'AcmeFocalLos': no installed plugin offers it; nearest: 'AcmeFocalLoss'"


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        ("from twinkle.loss import SharedLoss", "ComponentConflict", CONFLICT),
        ("from twinkle.loss import BrokenLoss", "PluginBroken", BROKEN),
        ("from twinkle.loss import NeedyLoss", "RequirementMissing", NEEDY),
        ("import twinkle.loss; twinkle.loss.AcmeFocalLos", "AttributeError", UNKNOWN),
        ("import twinkle; twinkle.registry().resolve('SharedLoss', 'loss')", "ComponentConflict", CONFLICT),
        ("import twinkle; twinkle.registry().resolve('AcmeFocalLos', 'loss')", "ComponentNotFound", UNKNOWN),
    ],
)
def test_python_says_why_a_name_is_no_use(use: str, error: str, text: str, strangers: Environment) -> None:
    done = strangers.run("python", "-c", use, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert error in last.partition(":")[0]
    assert text in last


@pytest.mark.parametrize(("name", "text"), [("BrokenLoss", BROKEN), ("NeedyLoss", NEEDY)])
def test_the_command_describes_what_it_cannot_import(name: str, text: str, strangers: Environment) -> None:
    assert f"unknown: {text}" in strangers.run("twinkle", "plugins", "info", name).stdout


def test_the_command_names_the_nearest_of_an_unknown_name(strangers: Environment) -> None:
    done = strangers.run("twinkle", "plugins", "info", "AcmeFocalLos", check=False)
    assert done.returncode == 2
    assert "no plugin or component is called 'AcmeFocalLos'; nearest: AcmeFocalLoss" in done.stderr


def test_the_doctor_finds_the_conflict_and_the_missing_package(strangers: Environment) -> None:
    done = strangers.run("twinkle", "plugins", "doctor", "--json", check=False)
    assert done.returncode == 1
    problems = {problem["kind"]: problem["what"] for problem in json.loads(done.stdout)}
    assert problems["duplicate provider"].startswith(CONFLICT)
    assert problems["missing requirement"] == "NeedyLoss of acme-losses needs acme-telescope>=3 (not installed)"


def test_a_conflict_is_settled_by_naming_the_plugin(strangers: Environment) -> None:
    code = "import twinkle; print(twinkle.registry().resolve('rival-losses/SharedLoss', 'loss').__module__)"
    assert strangers.run("python", "-c", code).stdout == "rival_losses.focal\n"


def test_a_strangers_mistakes_leave_ours_alone(strangers: Environment) -> None:
    listed = json.loads(strangers.run("twinkle", "plugins", "list", "--json").stdout)
    assert {plugin["status"] for plugin in listed} == {"ok"}
    strangers.run("python", "-c", "from twinkle.loss import CrossEntropyLoss")
