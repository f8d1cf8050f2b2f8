"""What the page "Run your own training service" tells people to install suffices to serve and to train."""

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from environments import Environment, EnvironmentMaker
from hatchling.builders.wheel import WheelBuilder
from house import MEMBERS, ROOT, SETTINGS, members_below
from ledger_engine import ENGINE, MODEL
from packaging.requirements import Requirement
from serving import Served

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "guides" / "operator" / "serving.md").read_text("utf-8")
WORKBENCH = "twinkle-workbench"


def block(language: str, holds: str) -> str:
    """Return the page's only block of a language that holds some text."""
    (found,) = (body for body in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) if holds in body)
    return str(found)


def installed_by_the_page() -> list[str]:
    """Return what the page's lines of pip name; `.` is the meta distribution of the checkout, here from its wheel."""
    (sdk,) = re.findall(r"^Install the SDK \(`(.*?)`\)", PAGE, re.M)
    names = []
    for line in (block("bash", "pip install"), sdk):
        command, what, *rest = shlex.split(line)
        assert (command, what) == ("pip", "install")
        assert rest[-2:] == ["-c", "constraints.txt"]
        names += rest[:-2]
    return [re.sub(r"^\.(?=\[|$)", WORKBENCH, name) for name in names]


def of_others(requirements: Iterable[str]) -> list[str]:
    """Return what requirements bring of other people, those on our members resolved."""
    projects = {member.name: member.project for member in MEMBERS} | {WORKBENCH: SETTINGS["project"]}
    found: set[str] = set()
    for requirement in map(Requirement, requirements):
        if requirement.name not in projects:
            found.add(str(requirement))
            continue
        named = [member for member in MEMBERS if requirement.name in (WORKBENCH, member.name)]
        members = [*named, *(below for member in named for below in members_below(member))]
        found |= {text for member in members for text in member.project["dependencies"]}
        extras = projects[requirement.name].get("optional-dependencies", {})
        found |= {text for extra in requirement.extras for text in extras[extra]}
    return sorted(found)


@pytest.fixture(scope="module")
def all_wheels(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The members' wheels, and that of the meta distribution as a release has it."""
    folder = tmp_path_factory.mktemp("released")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINKLE_RELEASE", "1")
        list(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    for wheel in wheels.iterdir():
        (folder / wheel.name).symlink_to(wheel)
    return folder


def installed(environment: EnvironmentMaker, wheels: Path, requirements: list[str]) -> Environment:
    """Return an environment in which pip installed the requirements, and found there all that they need of others."""
    made = environment(of_others(requirements))
    made.install(wheels, *requirements, dependencies=True)
    return made


@pytest.fixture(scope="module")
def by_the_page(environment: EnvironmentMaker, all_wheels: Path) -> Environment:
    return installed(environment, all_wheels, installed_by_the_page())


@pytest.fixture(scope="module")
def alone(environment: EnvironmentMaker, all_wheels: Path) -> Environment:
    return installed(environment, all_wheels, ["twinkle-server"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def serving(tmp_path: Path) -> Iterator["Serving"]:
    service = Serving(tmp_path)
    yield service
    if service.served:
        service.served.stop()


class Serving:
    """Starts the `twinkle serve` of an environment."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.served: Served | None = None

    def start(self, made: Environment, *arguments: str | Path) -> Served:
        data = self._place / "data"
        command = [made.folder / "bin" / "twinkle", "serve", *arguments, "--data", data, "--port", "0"]
        self.served = Served(data, list(map(str, command)), {"HOME": str(self._place), "PYTHONPATH": ""})
        return self.served.start()


def run_snippet(made: Environment, served: Served) -> list[str]:
    """Run the page's program in an environment, and return what it printed."""
    told = {"TINKER_BASE_URL": served.url, "TINKER_API_KEY": served.key, "NO_PROXY": "127.0.0.1"}
    done = made.run("python", "-c", block("python", "service_client ="), more=told | {"TINKER_TELEMETRY": "0"})
    return done.stdout.splitlines()


def test_the_lines_of_the_page_train_its_program(by_the_page: Environment, serving: Serving, model: Path) -> None:
    served = serving.start(by_the_page, model)
    lines = [line.split() for line in run_snippet(by_the_page, served)[:5]]
    assert [number for number, _ in lines] == ["0", "1", "2", "3", "4"]
    losses = [float(loss) for _, loss in lines]
    assert losses == sorted(losses, reverse=True)


def test_the_server_alone_serves_the_ledger(alone: Environment, serving: Serving) -> None:
    served = serving.start(alone, MODEL, "--name", "any/model", "--backend", ENGINE)
    answer = httpx.get(
        f"{served.url}/api/v1/get_server_capabilities", headers={"x-api-key": served.key}, trust_env=False
    )
    assert [model["model_name"] for model in answer.json()["supported_models"]] == ["any/model"]


@pytest.mark.parametrize(
    ("requirements", "words"),
    [
        (["twinkle-server"], ["no engine is installed", "TransformersEngine: pip install twinkle-transformers"]),
        (["twinkle-server", "twinkle-transformers"], ["torch>=2.6 (not installed)", "pip install 'twinkle-"]),
    ],
    ids=["server", "server and plugin"],
)
def test_what_training_lacks_is_told_before_anything_is_made(
    requirements: list[str],
    words: list[str],
    environment: EnvironmentMaker,
    all_wheels: Path,
    model: Path,
    tmp_path: Path,
) -> None:
    made = installed(environment, all_wheels, requirements)
    data = tmp_path / "data"
    done = made.run("twinkle", "serve", model, "--data", data, "--port", "0", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr
    assert not data.exists()
