"""The dashboard in a real browser: what people see, and that nothing foreign runs."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import Browser, Page, browser
from dashboard_runs import HOSTILE, hostile_model, learn, model_folder
from server_raw import Failed, Raw, RawModel, row
from serving import Served, ledger

pytestmark = pytest.mark.browser


@dataclass
class Scene:
    """A service with a tenant that has trained a run, and a browser."""

    served: Served
    operator: str
    ana: str
    raw: Raw
    run: RawModel
    browser: Browser

    def page_of(self, page: Page, key: str) -> Page:
        """Log in with a key by typing it."""
        page.goto(f"{self.served.url}/")
        page.type(key)
        page.press("Enter", navigates=True)
        return page


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("dashboard")
    settings = {"model": str(model_folder(folder / "model")), "auth": True, "times": {"gap_fail": 1e6}}
    served = ledger(folder / "data", settings).start()
    operator = served.key
    ana = served.new_key("ana")
    try:
        with Raw(served.url, ana) as raw, browser() as running:
            run = hostile_model(raw)
            learn(run, 5, HOSTILE)
            run.save("kept")
            with pytest.raises(Failed):
                run.forward([row([1, 2])], "no_such_loss")
            yield Scene(served, operator, ana, raw, run, running)
    finally:
        served.stop()


@pytest.fixture
def page(scene: Scene) -> Iterator[Page]:
    """A page without cookies; it must show no error, violate no policy and load nothing from elsewhere."""
    with scene.browser.page() as opened:
        yield opened
        assert opened.problems == []
        foreign = [url for url in opened.requests if not url.startswith((scene.served.url, "data:", "about:"))]
        assert foreign == []


def test_a_wrong_key_is_refused_and_the_right_one_opens_the_page(scene: Scene, page: Page) -> None:
    page.goto(f"{scene.served.url}/ui/errors")
    assert page.eval("document.activeElement.id") == "key"
    page.type("tml-" + "x" * 43)
    page.press("Enter", navigates=True)
    assert "unknown or revoked" in page.text("[role=alert]")
    assert len(page.problems) == 1, "a refused login is a response 401, which the console notes"
    assert "401" in page.problems.pop()
    page.type(scene.ana)
    page.click("button.primary", navigates=True)
    assert page.eval("location.pathname") == "/ui/errors"
    assert "no_such_loss" in page.text("#errors")
    assert page.eval("document.cookie") == "", "a script cannot read the session"
    page.click("header form button", navigates=True)
    page.goto(f"{scene.served.url}/")
    assert page.eval("location.pathname") == "/ui/login"


def test_every_page_shows_a_tenant_its_own_things(scene: Scene, page: Page) -> None:
    scene.page_of(page, scene.ana)
    for path, expected in (
        ("", scene.run.id), ("ui/models", scene.run.id), ("ui/checkpoints", "weights/kept"),
        ("ui/errors", "no_such_loss"), ("ui/operations", "nothing waits"), (f"ui/runs/{scene.run.id}", "Curves"),
    ):  # fmt: skip
        page.goto(f"{scene.served.url}/{path}")
        assert expected in page.text(), path
        assert page.eval("document.documentElement.scrollWidth <= innerWidth"), f"{path} is broader than the window"


def test_curves_grow_while_the_run_trains(scene: Scene, page: Page) -> None:
    scene.page_of(page, scene.ana).goto(f"{scene.served.url}/ui/runs/{scene.run.id}")
    before = int(page.wait("document.getElementById('curves').dataset.steps"))
    trainer = threading.Thread(target=learn, args=(scene.run, 4, HOSTILE))
    trainer.start()
    page.wait(f"Number(document.getElementById('curves').dataset.steps) >= {before + 4}")
    page.wait(f"document.getElementById('step-count').textContent >= {before + 4}")
    trainer.join()
    shown = page.eval("[...document.querySelectorAll('figure')].map(figure => figure.dataset.metric)")
    assert {"loss", "reward", "mismatch", "mismatch_max", "kl", "grad_norm", "lr", "tokens"} <= set(shown)
    assert "of |" not in page.text("figure output")


def test_curves_show_values_under_the_pointer_and_by_keyboard(scene: Scene, page: Page) -> None:
    scene.page_of(page, scene.ana).goto(f"{scene.served.url}/ui/runs/{scene.run.id}")
    rate = "figure[data-metric=lr]"
    page.wait(f"document.querySelector('{rate} polyline') !== null")
    page.hover(f"{rate} svg", share=0.13)
    assert page.text(f"{rate} output") == "step 1: 0.001"
    page.eval(f"document.querySelector('{rate} svg').focus()")
    page.press("ArrowRight")
    assert page.text(f"{rate} output") == "step 2: 0.002"
    straight = page.eval(f"document.querySelector('{rate} polyline').getAttribute('points')")
    page.click("#log-scale")
    assert page.eval(f"document.querySelector('{rate} polyline').getAttribute('points')") != straight


def test_texts_of_rollouts_are_text(scene: Scene, page: Page) -> None:
    time.sleep(1.2)  # rollouts are written once a second
    scene.page_of(page, scene.ana).goto(f"{scene.served.url}/ui/runs/{scene.run.id}")
    assert HOSTILE in page.eval("document.querySelector('#rollouts .sampled').textContent")
    assert HOSTILE in page.eval("document.getElementById('facts').textContent")
    page.click("#rollouts a", navigates=True)
    assert HOSTILE in page.eval("document.getElementById('tokens').textContent")
    page.hover("#tokens .t")
    assert "mismatch" in page.text("#token-facts")
    assert page.eval("window.attacked ?? null") is None
    assert page.eval("document.querySelectorAll('main script, main img').length") == 0


def test_an_operator_sees_all_tenants_but_no_texts(scene: Scene, page: Page) -> None:
    scene.page_of(page, scene.operator).goto(f"{scene.served.url}/ui/runs/{scene.run.id}")
    assert "shown only to the tenant" in page.text("#rollouts")
    page.goto(f"{scene.served.url}/")
    assert "forward_backward" in page.text("#latency")
    assert page.eval("document.documentElement.scrollWidth <= innerWidth")
    page.goto(f"{scene.served.url}/ui/runs/{scene.run.id}")
    assert "<script>" not in page.text("#rollouts")


def test_cancelling_asks_for_the_key_of_an_operator(scene: Scene, page: Page) -> None:
    with Raw(scene.served.url, scene.ana) as raw:
        waiting = raw.model()
        request = waiting.submit("optim_step", number=5, adam_params={})  # number 1 never came
        scene.page_of(page, scene.ana).goto(f"{scene.served.url}/ui/operations")
        page.click("#queue td a[href$=cancel]", navigates=True)
        page.type(scene.ana)
        page.press("Enter", navigates=True)
        assert "belongs to a user" in page.text("[role=alert]")
        assert "403" in page.problems.pop()
        page.type(scene.operator)
        page.click("button.danger", navigates=True)
        assert "nothing waits" in page.text("#queue")
        with pytest.raises(Failed, match="cancelled"):
            raw.result(request)


def test_pages_can_be_used_without_a_mouse(scene: Scene, page: Page) -> None:
    scene.page_of(page, scene.ana)
    page.press("Tab")
    assert page.eval("document.activeElement.className") == "skip"
    assert page.eval("getComputedStyle(document.activeElement).left") == "8px", "the link is visible with the focus"
    for _ in range(3):
        page.press("Tab")
    assert page.eval("document.activeElement.textContent") == "Models"
    assert page.eval("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter", navigates=True)
    assert page.eval("location.pathname") == "/ui/models"


def test_colors_follow_the_preference(scene: Scene, page: Page) -> None:
    page.goto(f"{scene.served.url}/")
    colors = {}
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        style = "getComputedStyle(document.body)"
        colors[scheme] = [_brightness(page.eval(f"{style}.{name}")) for name in ("backgroundColor", "color")]
    assert colors["light"][0] > 200 > colors["light"][1]
    assert colors["dark"][0] < 60 < colors["dark"][1]


def _brightness(color: str) -> float:
    parts = [float(part) for part in color.removeprefix("rgb(").rstrip(")").split(",")]
    return sum(parts) / 3


def test_pages_fit_a_phone(scene: Scene, page: Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    scene.page_of(page, scene.ana)
    for path in ("", "ui/models", "ui/operations", "ui/checkpoints", "ui/errors", f"ui/runs/{scene.run.id}"):
        page.goto(f"{scene.served.url}/{path}")
        assert page.eval("document.documentElement.scrollWidth") <= 390, f"{path} is wider than the window"
        heights = page.eval("[...document.querySelectorAll('td code')].map(code => code.offsetHeight)")
        assert all(height < 80 for height in heights), f"{path}: an id takes more than four lines"
        assert page.eval("document.querySelector('header nav').offsetHeight") < 40, "all links are in one line"
        cards = page.eval("[...document.querySelectorAll('#curves figure')].map(box => box.offsetWidth)")
        assert all(width <= 340 for width in cards)
        hidden = page.eval(f"[...document.querySelectorAll('.rows td')].filter({_CUT}).map(cell => cell.innerText)")
        assert hidden == [], f"{path}: cells are cut or outside the window"


_CUT = "cell => cell.getBoundingClientRect().right > innerWidth || cell.scrollWidth > cell.clientWidth + 1"


def test_labels_on_a_phone_are_those_of_the_columns(scene: Scene, page: Page) -> None:
    scene.page_of(page, scene.operator)
    named = (
        "[...document.querySelectorAll('.rows td[data-label]')].map(cell => [cell.dataset.label,"
        " cell.closest('table').tHead.rows[0].cells[cell.cellIndex].textContent])"
    )
    found = 0
    for path in ("", "ui/models", "ui/operations", "ui/checkpoints", "ui/errors", f"ui/runs/{scene.run.id}"):
        page.goto(f"{scene.served.url}/{path}")
        pairs = page.eval(named)
        assert all(label == column for label, column in pairs), path
        found += len(pairs)
    assert found > 20


def test_the_focus_ring_of_the_key_leaves_its_label_free(scene: Scene, page: Page) -> None:
    page.goto(f"{scene.served.url}/")
    style = "getComputedStyle(document.getElementById('key'))"
    ring = page.eval(f"parseFloat({style}.outlineOffset) + parseFloat({style}.outlineWidth)")
    space = page.eval(
        "document.getElementById('key').getBoundingClientRect().top"
        " - document.querySelector('label').getBoundingClientRect().bottom"
    )
    assert ring == 4
    assert space >= ring + 2


def test_tiles_fill_the_width(scene: Scene, page: Page) -> None:
    scene.page_of(page, scene.operator)
    edges = page.eval(
        "['#tiles', '#tiles .tile:last-child', '#tenants'].map(name =>"
        " document.querySelector(name).getBoundingClientRect().right)"
    )
    assert edges[0] == edges[1]
    widths = page.eval("['latency', 'tenants'].map(name => document.getElementById(name).offsetWidth)")
    assert widths[0] < 400 < 600 < widths[1]


def test_draining_ends_the_service(tmp_path: Path, scene: Scene) -> None:
    served = ledger(tmp_path / "data", {"auth": True}).start()
    operator, ana = served.key, served.new_key("ana")
    try:
        with scene.browser.page() as page:
            page.goto(f"{served.url}/ui/drain")
            page.type(ana)
            page.press("Enter", navigates=True)
            page.type(operator)
            page.click("button.danger", navigates=True)
            assert "draining" in page.text("h1")
            assert page.problems == []
        assert served.process is not None
        assert served.process.wait(30) == 0
    finally:
        served.kill()
