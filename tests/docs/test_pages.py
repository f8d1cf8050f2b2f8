"""What the pages say beside their examples: generated tables, links, targets of make, keys of the manifest, figures."""

import ast
import builtins
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    p for pattern in ("*.md", "docs/**/*.md", "*/README.md", "plugins/*/README.md") for p in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)#\s]*)(#[\w./-]+)?\)")
ASSETS = DOCS / "assets"


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "tables.py"))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_generated_parts_say_what_the_code_says(page: Path, tables: dict[str, Any]) -> None:
    text = page.read_text("utf-8")
    assert text == tables["renewed"](text), "run: python docs/tables.py"


def test_every_generated_part_has_a_place(tables: dict[str, Any]) -> None:
    used = {match["name"] for page in DOCS.rglob("*.md") for match in tables["BLOCK"].finditer(page.read_text("utf-8"))}
    assert used == set(tables["GENERATED"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(without_code(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and not anchor.startswith("#twinkle."):
            assert anchor[1:] in anchors(path), f"{page.name} links to {target}{anchor}"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_and_targets_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names `make {target}`"
    folders = "plugins|tests|examples|registry|twinkle_core|docs|benchmarks"
    for path in re.findall(rf"(?:`|TESTS=)((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize(
    ("name", "folders"),
    [("index.md", ("start", "guides", "explanations")), ("reference/index.md", ("reference",))],
)
def test_an_index_links_every_page(name: str, folders: tuple[str, ...]) -> None:
    index = DOCS / name
    linked = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text("utf-8")) if target}
    pages = {found for folder in folders for found in (DOCS / folder).rglob("*.md")}
    assert pages - linked - set((DOCS / "reference" / "api").glob("*.md")) - {index} == set()


def test_every_page_is_in_a_folder_that_says_its_purpose() -> None:
    guides = {f"guides/{role}" for role in ("researcher", "plugin-author", "tenant", "operator")}
    folders = {"start", "reference", "reference/api", *guides}
    found = {page.parent.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page.name != "index.md"}
    assert found == folders | {"explanations", "decisions"}


def test_the_readme_links_every_way_to_train() -> None:
    linked = {target for target, _ in LINK.findall((ROOT / "README.md").read_text("utf-8"))}
    ways = "reinforcement-learning preference-and-distillation agents rewards-and-advantages sampling weight-sync"
    guides = {f"docs/guides/researcher/{name}.md" for name in (*ways.split(), "write-your-own-algorithm")}
    assert linked >= guides | {"docs/guides/operator/serving.md", "docs/index.md", "docs/explanations/guarantees.md"}


CONTINUED = "each block uses the names defined above it"


@pytest.mark.parametrize(
    "name",
    [
        "guides/researcher/agents",
        "reference/losses",
        "guides/researcher/preference-and-distillation",
        "guides/researcher/reinforcement-learning",
        "guides/researcher/rewards-and-advantages",
        "guides/researcher/sampling",
        "guides/researcher/weight-sync",
        "guides/researcher/write-your-own-algorithm",
    ],
)
def test_a_block_runs_alone_unless_its_page_says_that_blocks_go_on(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text("utf-8")
    if CONTINUED in " ".join(text.split()):
        return
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert borrowed(match[1]) == set(), f"line {text.count(chr(10), 0, match.start()) + 1}"


def borrowed(code: str) -> set[str]:
    """Return the names that code reads and makes nowhere."""
    nodes = list(ast.walk(ast.parse(code)))
    made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - made - set(dir(builtins))


def test_the_manifest_reference_names_every_key() -> None:
    from twinkle_registry import reading

    tables = {
        "hooks": reading._HOOKS,
        "component": reading._COMPONENT,
        "command": reading._COMMAND,
        "export": reading._EXPORT,
    }
    keys = {*reading._TOP} - {*tables} | {f"{table}.{name}" for table, names in tables.items() for name in names}
    section = (DOCS / "reference" / "manifest.md").read_text("utf-8").partition("## Keys")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)) == keys


def test_the_variables_that_the_code_reads_are_documented() -> None:
    read = set()
    for folder in ("registry/src", "twinkle_core/src", "hub/src", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            if "tests" not in path.parts:
                read |= set(re.findall(r"\"(TWINKLE_[A-Z_]+[A-Z])\"", path.read_text("utf-8")))
    page = (DOCS / "reference" / "settings.md").read_text("utf-8")
    assert {name for name in read if f"`{name}" not in page} == set()


def test_the_published_arguments_of_portability_exist() -> None:
    import inspect

    import twinkle
    from twinkle.model import TransformersModel

    page = (DOCS / "explanations" / "portability.md").read_text("utf-8")
    for name in inspect.signature(twinkle.initialize).parameters:
        assert f"`{name}`" in page
    section = page.partition("## `TransformersModel`")[2].partition("\n## ")[0]
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE)))
    known = {*inspect.signature(TransformersModel).parameters, *inspect.signature(TransformersModel.forward).parameters}
    assert set(names) <= known


@pytest.mark.parametrize(("draw", "name"), [("draw_loss", "loss.png"), ("draw_demo", "grpo-demo.png")])
def test_the_curves_are_our_plots_of_the_metrics_beside_them(
    tmp_path: Path, tables: dict[str, Any], draw: str, name: str
) -> None:
    from matplotlib.image import imread

    tables[draw](tmp_path / name)
    ours, kept = imread(tmp_path / name), imread(ASSETS / name)
    assert ours.shape == kept.shape, "run: python docs/tables.py"
    # matplotlib brings its own fonts; another smoothing of the curve already differs by 0.005.
    assert abs(ours - kept).mean() < 0.001, "run: python docs/tables.py"


def test_the_figures_of_the_quickstart_are_those_of_the_kept_run() -> None:
    text = (DOCS / "start" / "install.md").read_text("utf-8")
    lines = [json.loads(line) for line in (ASSETS / "metrics.jsonl").read_text("utf-8").splitlines()]
    by_step = {line["step"]: line for line in lines}
    shown = re.findall(r"^step (\d+)/(\d+) loss=([\d.]+)(?: eval/loss=([\d.]+))?", text, re.MULTILINE)
    assert len(shown) >= 3
    for step, total, loss, held_out in shown:
        line = by_step[int(step)]
        assert int(total) == len(lines)
        assert f"{line['loss']:.4f}" == loss
        assert not held_out or f"{line['eval/loss']:.4f}" == held_out
    answers = json.loads((ASSETS / "answers.json").read_text("utf-8"))
    for row in answers:
        assert row["question"] in text
        assert row["after"].partition("\n")[0][:60] in text


def test_every_limit_of_the_service_is_on_its_page(tables: dict[str, Any]) -> None:
    from dataclasses import fields

    from twinkle_server.settings import Limits, Times

    said = set(re.findall(r"\{(\w+)\}", " ".join(tables["LIMITS"].values())))
    assert said >= {field.name for kind in (Limits, Times) for field in fields(kind)}


def test_times_in_the_words_of_the_services_page_are_those_of_the_service() -> None:
    from twinkle_server.settings import Times

    page, times = (DOCS / "guides" / "operator" / "failures.md").read_text("utf-8"), Times()
    words = {300: "five minutes", 600: "ten minutes", 7 * 86400: "seven days"}
    assert f"after {words[int(times.session)]} without a heartbeat its session ends" in page
    assert f"after {words[int(times.deadline)]} the engine is restarted" in page
    assert f"is kept for {words[int(times.kept_run)]}" in page
    assert times.poll <= 31, "clients are promised an answer to every poll within that time"


def test_the_versions_that_pages_name_are_those_that_the_tests_run() -> None:
    from importlib.metadata import version

    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    sdk, cookbook = version("tinker"), version("tinker_cookbook")
    assert (sdk, cookbook) == (pinned["tinker"], pinned["tinker_cookbook"])
    guarantees = (DOCS / "explanations" / "guarantees.md").read_text("utf-8")
    assert f"The unmodified Tinker SDK {sdk} and cookbook {cookbook} " in guarantees
    text = " ".join((DOCS / "reference" / "tinker-conformance.md").read_text("utf-8").split())
    assert re.search(rf"unmodified SDK {re.escape(sdk)}(,| and) cookbook {re.escape(cookbook)}\b", text)
    older = runpy.run_path(str(ROOT / "tests" / "conformance" / "test_older_sdks.py"))["VERSIONS"]
    assert f"older SDKs {', '.join(older[:-1])} and {older[-1]}" in guarantees
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"({older[0]} to {sdk})" in changes
    assert f"older SDKs, from {older[0]} on" in text


@pytest.mark.full
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    index = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert "fonts.googleapis.com" not in index
    shutil.rmtree(tmp_path / "site")


def without_code(page: Path) -> str:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_the_figures_of_the_demo_are_those_of_all_kept_runs() -> None:
    text = (DOCS / "guides" / "researcher" / "reinforcement-learning.md").read_text("utf-8")
    shown = re.findall(r"^\| seed (\d) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    runs = sorted(ASSETS.glob("grpo-demo-seed*.jsonl"))
    assert [f"grpo-demo-seed{seed}" for seed, _, _ in shown] == [run.stem for run in runs]
    for run, (_, before, after) in zip(runs, shown, strict=True):
        lines = [json.loads(line) for line in run.read_text("utf-8").splitlines()]
        told = [line["eval/reward"] for line in lines if "eval/reward" in line]
        assert [f"{told[0]:.3f}", f"{told[-1]:.3f}"] == [before, after]
        assert told[-1] - told[0] >= 0.25
