"""Two tenants teach the real small model two identities at once, through the unmodified Tinker SDK.

Data, steps and questions are those of `examples/serve_demo.py`, which shows the same with a live table.
"""

import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_sdk import opened
from serving import Served, commanded

pytestmark = [pytest.mark.full, pytest.mark.model, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]

DEMO = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "serve_demo.py")))
NAMES = {tenant: name for tenant, (name, _) in DEMO.TENANTS.items()}
SECONDS = 500.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("service") / "data"
    served = commanded(["twinkle", *DEMO.SERVE, "--data", str(data)]).start()
    yield served
    served.stop()


class Tenant:
    """Trains with a key of its own on a thread of its own."""

    def __init__(self, service: Served, name: str, begin: threading.Barrier) -> None:
        self.losses: list[float] = []
        self.answers: list[str] = []
        self.error: BaseException | None = None
        self._key = service.new_key(name)
        self._data = [DEMO.datum_of(row) for row in DEMO.rows(*DEMO.TENANTS[name])]
        self._url, self._begin = service.url, begin
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with opened(self._url, self._key) as client:
                training = client.create_lora_training_client(base_model=DEMO.MODEL, rank=16, seed=1).result(SECONDS)
                self._begin.wait(SECONDS)
                DEMO.train(training, self._data, lambda step, loss: self.losses.append(loss))
                sampling = training.save_weights_and_get_sampling_client().result(SECONDS)
                self.answers = DEMO.ask(sampling)
        except BaseException as error:
            self.error = error


@pytest.fixture(scope="module")
def tenants(service: Served) -> dict[str, Tenant]:
    begin = threading.Barrier(len(NAMES))
    made = {name: Tenant(service, name, begin) for name in NAMES}
    for tenant in made.values():
        tenant.thread.start()
    for tenant in made.values():
        tenant.thread.join(SECONDS)
        assert not tenant.thread.is_alive(), service.log()[-4000:]
        assert tenant.error is None, tenant.error
    return made


@pytest.mark.parametrize("own", NAMES)
def test_each_answers_with_its_own_identity_and_not_with_the_others(tenants: dict[str, Tenant], own: str) -> None:
    (other,) = set(NAMES) - {own}
    answers = tenants[own].answers
    assert len(answers) == len(DEMO.QUESTIONS)
    assert [NAMES[own] in answer for answer in answers] == [True] * len(answers), answers
    assert [NAMES[other] in answer for answer in answers] == [False] * len(answers), answers


@pytest.mark.parametrize("own", NAMES)
def test_the_loss_of_each_fell(tenants: dict[str, Tenant], own: str) -> None:
    losses = tenants[own].losses
    assert len(losses) == DEMO.STEPS
    assert losses[-1] < 0.1 * losses[0]


def test_the_base_model_names_neither_afterwards(service: Served, tenants: dict[str, Tenant]) -> None:
    with opened(service.url, service.new_key("carol")) as client:
        sampling = client.create_sampling_client(base_model=DEMO.MODEL).result(SECONDS)
        answers = DEMO.ask(sampling)
    assert len(answers) == len(DEMO.QUESTIONS)
    assert [name for name in NAMES.values() for answer in answers if name in answer] == [], answers


def test_the_tenants_shared_passes_and_steps(service: Served, tenants: dict[str, Tenant]) -> None:
    text = httpx.get(f"{service.url}/metrics", headers={"X-API-Key": service.key}, trust_env=False).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found: Any = {(sample.name, sample.labels.get("kind")): sample.value for sample in samples}
    for kind in ("pass", "optim_step"):
        shared = found["twinkle_pass_tenants_sum", kind] - found["twinkle_pass_tenants_count", kind]
        assert shared > DEMO.STEPS / 2, (kind, shared)
