"""Pages of the dashboard without a browser: who sees what, that texts stay texts, and that forms need their token."""

import html
import re
import sqlite3
import time
from contextlib import closing
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from dashboard_runs import HOSTILE, ledger_logprobs
from server_raw import Failed, Raw

from twinkle_server.dashboard.pages import _next
from twinkle_server.dashboard.rendering import breakable, measured, number, size, span

from .conftest import Site, command

PAGES = ("/", "/ui/models", "/ui/operations", "/ui/checkpoints", "/ui/errors", "/ui/drain")
OF_RUN = ("", "/steps.json", "/cancel", "/rollouts/1")
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'"


def token(page: str) -> str:
    """Return the token of a page's forms."""
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page)
    assert found, page
    return found[1]


def eventually(client: httpx.Client, path: str, wanted: str) -> str:
    """Return a page when it contains a text."""
    end = time.monotonic() + 20
    while wanted not in (page := client.get(path).text):
        assert time.monotonic() < end, page
        time.sleep(0.1)
    return page


def test_without_a_login_every_page_leads_to_the_form(site: Site) -> None:
    client = site.client()
    for path in (*PAGES, *(f"/ui/runs/{site.run.id}{end}" for end in OF_RUN if not end.endswith("json"))):
        answer = client.get(path)
        assert answer.status_code == 303, path
        assert "ui/login?next=" in answer.headers["location"]
    assert client.get(f"/ui/runs/{site.run.id}/steps.json").status_code == 401
    for path in ("/ui/drain", "/ui/logout", f"/ui/runs/{site.run.id}/forget", f"/ui/runs/{site.run.id}/cancel"):
        assert client.post(path).status_code == 401
    assert "ui/login?next=ui%2Fruns%2Fa%3Foffset%3D3" in client.get("/ui/runs/a?offset=3").headers["location"]


@pytest.mark.parametrize("key", ["", "tml-short", "tml-" + "x" * 43])
def test_a_wrong_key_is_refused(site: Site, key: str) -> None:
    answer = site.client().post("/ui/login", data={"key": key})
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    assert "unknown or revoked" in answer.text


def test_the_cookie_is_signed_and_kept_from_scripts_and_other_sites(site: Site) -> None:
    client = site.client()
    answer = client.post("/ui/login", data={"key": site.keys["ana"], "next": "ui/models"})
    cookie = answer.headers["set-cookie"]
    assert answer.headers["location"] == "../ui/models"
    assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/"))
    assert "Secure" not in cookie
    assert site.keys["ana"] not in cookie
    secure = client.post("/ui/login", data={"key": site.keys["ana"]}, headers={"X-Forwarded-Proto": "https"})
    assert "Secure" in secure.headers["set-cookie"]
    name, value = next(iter(client.cookies.items()))
    content, _, signature = value.partition(".")
    other = "B" if signature[0] == "A" else "A"
    for forged in (f"{content}.{other}{signature[1:]}", f"e30.{signature}", content, "x"):
        assert httpx.get(f"{site.served.url}/", cookies={name: forged}, trust_env=False).status_code == 303


class Elements(HTMLParser):
    """Notes what a page would run or load.

    Attributes:
        found: elements and attributes that the policy forbids.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.found += [f"{tag} {name}" for name in names if name.startswith("on") or name == "style"]
        self.found += [tag] * (tag in ("style", "iframe", "object", "base") or (tag == "script" and "src" not in names))
        self.found += [
            f"{tag} {value}" for value in names.values() if value and "//" in value and "w3.org" not in value
        ]


def test_every_page_forbids_foreign_content(site: Site) -> None:
    client = site.client(site.keys["ana"])
    for path in (*PAGES, f"/ui/runs/{site.run.id}", "/ui/static/app.js", "/ui/login", "/ui/runs/none"):
        answer = client.get(path)
        assert answer.headers["content-security-policy"].startswith(POLICY), path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert Elements(answer.text).found == []


def test_texts_of_tenants_are_escaped_everywhere(site: Site) -> None:
    client = site.client(site.keys["ana"])
    run = f"/ui/runs/{site.run.id}"
    page = eventually(client, run, "/rollouts/")
    assert html.escape(HOSTILE) in page.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")
    rollout = re.search(r"/rollouts/\d+", page)
    assert rollout
    for path in (run, run + rollout[0], "/ui/errors", "/"):
        assert "<script>window" not in client.get(path).text
        assert "<img src=x" not in client.get(path).text
    assert "window.attacked" in client.get("/ui/errors").text


def test_a_run_shows_the_figures_of_its_steps(site: Site) -> None:
    client = site.client(site.keys["ana"])
    points: list[dict[str, Any]] = client.get(f"/ui/runs/{site.run.id}/steps.json").json()["points"]
    assert [point["step"] for point in points] == [1, 2, 3]
    assert [point["lr"] for point in points] == [0.001, 0.002, 0.003]
    for point in points:
        assert point["mismatch"] == pytest.approx(0.03, abs=1e-6)  # the rows differ by 0, 0.02, 0.04 and 0.06
        assert point["mismatch_max"] == pytest.approx(0.06, abs=1e-6)
        assert point["kl"] == pytest.approx(0.03, abs=1e-6)
        assert (point["reward"], point["advantage"]) == (0.5, pytest.approx(0.0))
    later = client.get(f"/ui/runs/{site.run.id}/steps.json?after=2").json()["points"]
    assert later == points[2:]
    assert client.get(f"/ui/runs/{site.run.id}/steps.json?after=x").status_code == 400


def test_a_rollout_shows_both_log_probabilities_of_each_token(site: Site) -> None:
    client = site.client(site.keys["ana"])
    page = eventually(client, f"/ui/runs/{site.run.id}", "/rollouts/")
    rows = re.findall(r'/rollouts/(\d+)">\d+\.(\d)', page)
    newest = next(row for row, place in rows if place == "3")
    tokens = re.findall(
        r'data-old="([^"]+)" data-new="([^"]+)"[^>]*data-ids="([\d ]+)"',
        client.get(f"/ui/runs/{site.run.id}/rollouts/{newest}").text,
    )
    assert len(tokens) > 50
    for old, new, ids in tokens:
        expected = ledger_logprobs([int(ids.split()[-1])])[0]
        assert float(new) == pytest.approx(expected, abs=1e-4)
        assert float(old) - float(new) == pytest.approx(0.06, abs=2e-4)


def test_a_tenant_does_not_see_anothers_things(site: Site) -> None:
    eve = site.client(site.keys["eve"])
    for path in PAGES:
        page = eve.get(path)
        assert page.status_code == 200
        assert site.run.id not in page.text
    for end in OF_RUN:
        answer = eve.get(f"/ui/runs/{site.run.id}{end}")
        missing = eve.get(f"/ui/runs/0{end}")
        assert (answer.status_code, missing.status_code) == (404, 404), end
        assert answer.text.replace(site.run.id, "0") == missing.text
    form = {"csrf": token(eve.get("/").text)}
    for end in ("/forget", "/cancel"):
        assert eve.post(f"/ui/runs/{site.run.id}{end}", data=form).status_code == 404


def test_an_operator_sees_all_tenants_but_not_their_texts(site: Site) -> None:
    operator = site.client(site.keys["operator"])
    assert site.run.id in operator.get("/").text
    page = eventually(operator, f"/ui/runs/{site.run.id}", "shown only to the tenant")
    assert "window.attacked = 1</script>" not in page.replace(html.escape(HOSTILE), "")
    assert "/rollouts/" not in page
    assert operator.get(f"/ui/runs/{site.run.id}/rollouts/1").status_code == 403


def test_forms_need_the_token_of_their_session(site: Site) -> None:
    ana, operator = site.client(site.keys["ana"]), site.client(site.keys["operator"])
    foreign = token(ana.get("/").text)
    for path in ("/ui/drain", "/ui/logout", f"/ui/runs/{site.run.id}/cancel", f"/ui/runs/{site.run.id}/forget"):
        for data in ({}, {"csrf": "x"}, {"csrf": foreign}, {"csrf": "é" * 64}):
            answer = operator.post(path, data=data)
            assert answer.status_code == 403, path
            assert "does not belong to this session" in answer.text
    assert httpx.get(f"{site.served.url}/readyz", trust_env=False).status_code == 200
    assert operator.post("/ui/logout", data={"csrf": token(operator.get("/").text)}).status_code == 303
    assert operator.get("/").status_code == 303
    assert operator.post("/ui/login", data={"key": "x" * 10_000}).status_code == 413


def test_cancelling_needs_an_operator_and_is_audited(site: Site) -> None:
    ana = site.client(site.keys["ana"])
    with Raw(site.served.url, site.keys["ana"]) as raw:
        model = raw.model()
        futures = [model.submit("optim_step", number=number, adam_params={}) for number in (5, 6)]
        path = f"/ui/runs/{model.id}/cancel"
        page = ana.get(path).text
        assert "Operator key" in page
        form = {"csrf": token(page), "key": site.keys["eve"]}
        refused = ana.post(path, data=form)
        assert (refused.status_code, "belongs to a user" in refused.text) == (403, True)
        assert ana.post(path, data={**form, "key": "tml-wrong"}).status_code == 403
        assert ana.post(path, data={**form, "key": site.keys["operator"]}).status_code == 303
        for future in futures:
            with pytest.raises(Failed, match="cancelled"):
                raw.result(future)
    again = ana.get("/ui/operations/999999/cancel")
    assert again.status_code == 404
    rows, end = audit(site), time.monotonic() + 20
    while not [row for row in rows if row[1] == "operation.cancel"] and time.monotonic() < end:
        rows = audit(site)  # an entry is written after the response
    assert ("ana", "dashboard.login") in {row[:2] for row in rows}
    [cancelled] = [row for row in rows if row[1] == "operation.cancel" and model.id in row[2]]
    assert cancelled[0] == "operator", "the audit log names whose key it was"
    assert not [row for row in rows for key in site.keys.values() if key in row[2]]
    lines = [line for line in site.served.log().splitlines() if line.startswith("{")]
    assert not [line for line in lines if site.keys["operator"] in line]


def audit(site: Site) -> list[tuple[str, str, str]]:
    """Return tenant, event and details of the entries of the audit log."""
    with closing(sqlite3.connect(f"file:{site.served.data / 'twinkle.db'}?mode=ro", uri=True)) as database:
        return database.execute("SELECT tenant, event, details FROM audit").fetchall()


def test_a_login_ends_with_its_key(site: Site) -> None:
    key = command(site.served, "keys", "create", "short").strip()
    client = site.client(key)
    assert client.get("/").status_code == 200
    command(site.served, "keys", "revoke", "short")
    end = time.monotonic() + 10
    while client.get("/").status_code == 200 and time.monotonic() < end:
        time.sleep(0.2)
    assert client.get("/").status_code == 303


def test_links_work_behind_a_proxy_that_strips_a_prefix(site: Site) -> None:
    client = site.client(site.keys["ana"])
    for path in (*PAGES, f"/ui/runs/{site.run.id}"):
        depth = path.count("/") - 1
        for target in re.findall(r'(?:href|src|action|data-url)="([^"]*)"', client.get(path).text):
            relative = target.startswith(("../" * depth or "./", "?", "#"))
            assert relative, (path, target)
            assert not target.startswith("../" * (depth + 1)), (path, target)


@pytest.mark.parametrize(
    "target",
    ["//evil.example", "https://evil.example", "ui/../../x", "ui//evil", "ui/\\evil", "ui/a\r\nX: y", "metrics"],
)
def test_a_login_leads_nowhere_else(target: str) -> None:
    assert _next(target) == ""


def test_the_overview_is_scoped_by_the_key(site: Site) -> None:
    def ask(key: str | None) -> httpx.Response:
        headers = {} if key is None else {"X-API-Key": key}
        return httpx.get(f"{site.served.url}/twinkle/overview", headers=headers, trust_env=False, timeout=20)

    assert ask(None).status_code == ask("tml-wrong").status_code == 401
    everything, own, foreign = (ask(site.keys[name]).json() for name in ("operator", "ana", "eve"))
    assert {row["tenant"] for row in everything["tenants"]} >= {"ana", "eve", "operator"}
    assert [row["tenant"] for row in own["tenants"]] == ["ana"]
    assert site.run.id in {row["model"] for row in everything["models"]} & {row["model"] for row in own["models"]}
    assert (foreign["models"], foreign["errors"]) == ([], [])
    assert "latency_ms" in everything["rates"]
    assert "latency_ms" not in own["rates"]
    place = {row["model"]: row["place"] for row in own["models"]}[site.run.id]
    assert place in ("device", "engine", "attached")


def test_rollouts_with_one_prompt_show_it_once_and_all_have_texts(site: Site) -> None:
    page = site.client(site.keys["ana"]).get(f"/ui/runs/{site.run.id}").text
    table = page.partition('<table id="rollouts"')[2].partition("</table>")[0]
    assert table.count('class="text prompt"') == 1
    assert table.count('class="text sampled"') == 3 * 4, "three steps of four rows"
    assert "open the row to read it" not in table


def test_only_operators_are_offered_the_drain(site: Site) -> None:
    pages = {name: site.client(site.keys[name]).get("/").text for name in ("ana", "operator")}
    assert {name: "ui/drain" in page for name, page in pages.items()} == {"ana": False, "operator": True}


def test_errors_lead_to_their_run(site: Site) -> None:
    client = site.client(site.keys["ana"])
    for path in ("/", "/ui/errors"):
        errors = client.get(path).text.partition('<table id="errors"')[2]
        assert f"ui/runs/{quote(site.run.id)}" in errors, path


def test_paths_of_checkpoints_break_after_their_separators() -> None:
    path = "tinker://ab12:train:0/weights/<b>"
    assert str(breakable(path)) == "tinker://<wbr>ab12:<wbr>train:<wbr>0/<wbr>weights/<wbr>&lt;b&gt;"


def test_what_was_measured_has_no_name_and_state() -> None:
    on = {"path": "packing", "exact": True, "summary": "packing on (rounding, float32): differs by 2e-07"}
    off = {"path": "steps", "exact": False, "summary": "steps off: steps is disabled"}
    assert [measured(row) for row in (on, off, {"path": "other"})] == [
        "(rounding, float32): differs by 2e-07", "steps is disabled", "",
    ]  # fmt: skip


def test_numbers_are_readable() -> None:
    assert [number(value) for value in (None, 0, 12345, 0.00012346, 1.0, 1234567.0, 199123.4, 933.71)] == [
        "–", "0", "12,345", "0.0001235", "1", "1,234,567", "199,123", "933.7",
    ]  # fmt: skip
    assert [size(value) for value in (0, 1023, 1024, 5 * 2**30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB"]
    assert [span(value) for value in (-1, 59, 119, 120, 7200, 2 * 86400)] == [
        "0 s",
        "59 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
    ]
