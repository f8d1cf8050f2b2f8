"""Every example of the README and the docs is executed, page by page, in the order in which a reader would.

- ```python: all blocks of a page share one namespace; blocks with `>>>` are doctests.
- ```lang title="name": the file `name` in the working directory.
- ```bash and ```console: each command is run; in `console`, what follows `$ command` is its output (`...` stands for
  anything).
- a block after `<!-- not run: reason -->` is not run; ALLOWED counts them.
"""

import contextlib
import doctest
import io
import itertools
import json
import os
import re
import runpy
import shlex
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import torchrun
from serving import Served, commanded

from twinkle import registry
from twinkle.cli import main

ROOT = Path(__file__).parents[2]
PATTERNS = ("README.md", "docs/**/*.md", "*/README.md", "plugins/*/README.md")
# Their blocks are fragments that belong to a longer text; unit tests show what they say.
FRAGMENTS = ("registry/README.md", "plugins/recipes/README.md")
PAGES = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
PAGES = [path for path in PAGES if path.relative_to(ROOT).as_posix() not in FRAGMENTS]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*$")
STARTED: list[Served] = []  # services of the page that is being read
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SMALL = {"--max_steps": "2", "--data.slice": "40", "--sampler.max_tokens": "4"}

# How many blocks of a page are shown but not run, and why they cannot be.
ALLOWED = {
    "README.md": {"make": 1},
    "docs/start/install.md": {"make": 1, "installs packages": 2, "changes the shell": 1},
    "docs/guides/researcher/hub.md": {"needs a network": 1},
    "docs/guides/researcher/recipes.md": {"starts processes": 1},
    "docs/guides/tenant/data-on-the-service.md": {"needs a network": 1},
    "docs/guides/operator/backup.md": {"empties the folder that the other examples use": 1},
    "docs/guides/operator/deployment.md": {"needs a container engine": 1, "needs root rights": 1},
    "docs/guides/operator/merge.md": {"the path of a checkpoint differs": 1},
    "docs/guides/operator/configuration.md": {"serves until it is stopped": 1},
    "docs/guides/tenant/client.md": {
        "installs packages": 1,
        "changes the shell": 1,
        "needs a service that allows it": 1,
    },
    "docs/guides/tenant/tinker.md": {"installs packages": 1, "changes the shell": 1},
    "docs/guides/operator/dashboard.md": {"installs packages": 1, "needs a collector": 1},
    "docs/guides/tenant/chat.md": {"changes the shell": 1, "needs a model with tools": 1},
    "docs/guides/operator/serving.md": {"installs packages": 1, "changes the shell": 1},
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    body: str
    line: int
    not_run: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        reason = NOT_RUN.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(language, title[1] if title else "", match["body"], line, reason[1] if reason else ""))
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


HEAVY = {
    "docs/explanations/simulation.md",
    "docs/guides/plugin-author/write-a-plugin.md",
    "docs/guides/researcher/recipes.md",
    "docs/guides/operator/backup.md",
    "docs/guides/operator/dashboard.md",
    "docs/guides/operator/deployment.md",
    "docs/guides/operator/keys.md",
    "docs/guides/operator/merge.md",
    "docs/guides/operator/serving.md",
    "docs/guides/operator/tls-and-proxies.md",
    "docs/guides/operator/upgrading.md",
    "docs/guides/tenant/data-on-the-service.md",
    "docs/guides/tenant/chat.md",
    "docs/guides/tenant/client.md",
    "docs/guides/tenant/custom-losses.md",
    "docs/guides/tenant/tinker.md",
    "docs/guides/plugin-author/write-an-engine.md",
    "docs/guides/researcher/preference-and-distillation.md",
    "docs/guides/researcher/reinforcement-learning.md",
    "docs/guides/researcher/torchrun.md",
    "docs/guides/researcher/write-your-own-algorithm.md",
    "docs/start/first-loss.md",
    "docs/start/tutorial.md",
    "examples/README.md",
}
"""Pages whose examples take longer than three seconds of a core: `make test-all` runs them."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.full if name_of(page) in HEAVY else ()) for page in PAGES],
    ids=name_of,
)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the Tinker SDK, on the pages that serve
def test_every_example_of_a_page_runs(page: Path, place: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with services(namespace):
        for block in blocks(page):
            if not block.not_run:
                with located(page, block):
                    perform(block, namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_that_are_not_run_are_few_and_known(page: Path) -> None:
    found: dict[str, int] = {}
    for block in blocks(page):
        if block.not_run:
            found[block.not_run] = found.get(block.not_run, 0) + 1
    assert found == ALLOWED.get(name_of(page), {})


@contextlib.contextmanager
def services(namespace: dict[str, Any]) -> Iterator[None]:
    """Run the services that a page starts beside it, and tell the SDK where they are, until the page is over."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("NO_PROXY", "no_proxy"):
                patch.setenv(name, "127.0.0.1,localhost")
            for name in ("TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN"):
                patch.setenv(name, "")
            for name in ("TINKER", "OPENAI", "ANTHROPIC"):
                patch.setenv(f"{name}_BASE_URL", "")
                patch.setenv(f"{name}_API_KEY", "")
            patch.setenv("TINKER_TELEMETRY", "0")
            yield
    finally:
        if "tinker" in sys.modules:
            import server_sdk

            namespace.clear()
            server_sdk.sweep()
            server_sdk.forget_connections()
        while STARTED:
            STARTED.pop().stop()


@contextlib.contextmanager
def located(page: Path, block: Block) -> Any:
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the block at {name_of(page)}:{block.line}")
        raise


def perform(block: Block, namespace: dict[str, Any]) -> None:
    if block.title:
        path = Path(block.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.body, "utf-8")
        forget(path)
    elif block.language == "python":
        run_python(block, namespace)
    elif block.language in ("bash", "console"):
        for command, expected in commands(block):
            run_command(command, expected)
    if block.language in READERS:
        READERS[block.language](block.body)
    elif block.language not in ("python", "bash", "console", "text", "makefile"):
        raise AssertionError(f"a block in {block.language or 'no language'}: nothing checks it")


READERS = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}


def forget(path: Path) -> None:
    """Let a file that a page writes anew be imported anew: a reader's commands are processes of their own."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(path.resolve()):
            del sys.modules[name]


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    if ">>>" not in block.body:
        exec(compile(block.body, f"<line {block.line}>", "exec", dont_inherit=True), namespace)
        return
    test = doctest.DocTestParser().get_doctest(block.body, namespace, "block", None, block.line)
    test.globs = namespace
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report = io.StringIO()
    runner.run(test, out=report.write, clear_globs=False)
    assert runner.failures == 0, report.getvalue()


def commands(block: Block) -> list[tuple[str, str | None]]:
    body = block.body.replace("\\\n", " ")
    if block.language == "bash":
        lines = [line.split("  #")[0].strip() for line in body.splitlines()]
        return [(line, None) for line in lines if line and not line.startswith("#")]
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with '$ '"
    split = [part.partition("\n") for part in parts[1:]]
    return [(command, output if output.strip() else None) for command, _, output in split]


def run_command(command: str, expected: str | None) -> None:
    words = [path for word in shlex.split(command) for path in expanded(word)]
    changes = {}
    while "=" in words[0] and words[0].split("=")[0].isupper():
        name, _, value = words.pop(0).partition("=")
        changes[name] = value
    output, code = in_this_process(words, changes)
    if expected is None:
        assert code == 0, f"{command}: exit code {code}\n{output}"
    else:
        pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*?")
        clean = "\n".join(line.rstrip() for line in output.strip().splitlines())
        assert re.fullmatch(pattern, clean, re.DOTALL), f"{command} printed\n{clean}\ninstead of\n{expected}"


def expanded(word: str) -> list[str]:
    """Return the paths that a shell would put in place of a word with `*`."""
    return sorted(str(path) for path in Path().glob(word)) or [word] if "*" in word else [word]


def in_this_process(words: list[str], changes: dict[str, str]) -> tuple[str, int]:
    """Run one command here, which spares the seconds that a new process needs to import torch."""
    screen, code = io.StringIO(), 0
    registry.cache_clear()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        for name, value in changes.items():
            patch.setenv(name, value)
        patch.setenv("COLUMNS", "120")
        try:
            dispatch(words, patch)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    registry.cache_clear()
    return screen.getvalue(), code


def dispatch(words: list[str], patch: pytest.MonkeyPatch) -> None:
    if words[:2] == ["twinkle", "serve"]:
        STARTED.append(commanded(words))
        if "--tls-cert" in words:
            STARTED[-1].verify = ssl.create_default_context(cafile="authority.pem")
        STARTED[-1].start()
        url, key = STARTED[-1].url, STARTED[-1].key
        os.environ.update(TINKER_BASE_URL=url, TINKER_API_KEY=key, OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY=key)
        os.environ.update(ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=key)
        os.environ.update(TWINKLE_SERVER_URL=url, TWINKLE_SERVER_TOKEN=key)
    elif words[0] == "twinkle":
        small = [text for flag, value in SMALL.items() if flag not in words for text in (flag, value)]
        patch.setattr(sys, "argv", words)
        main([*words[1:], *(small if words[1:3] == ["run", "sft"] and "--help" not in words else [])])
    elif words[0] == "python" and words[1].startswith("scripts/"):  # of a clone; with few seeds of many
        few = ["2" if before == "--seeds" else word for before, word in itertools.pairwise(words)]
        finish([sys.executable, str(ROOT / words[1]), *few[1:]])
    elif words[0] == "python" and words[1].endswith(".py"):
        patch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
    elif words[0] in ("curl", "openssl"):
        finish([os.path.expandvars(word) for word in words])
    elif words[0] == "torchrun":
        run_on_ranks(words[1:])
    elif words[:3] == ["python", "-m", "pytest"]:
        finish([sys.executable, *words[1:]], PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    elif words[:3] == ["pip", "install", "-e"]:
        install(Path(words[3]))
    else:
        raise AssertionError(f"the tests of the docs do not know how to run {shlex.join(words)}")


def finish(words: list[str], **variables: str) -> None:
    """Run a process of its own and exit with its status."""
    done = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout + done.stderr)
    raise SystemExit(done.returncode)


def run_on_ranks(words: list[str]) -> None:
    """Run a script (made small) or a module under torchrun, and show what the ranks wrote."""
    split = next(place for place, word in enumerate(words) if not word.startswith("--"))
    flag, target, rest = words[:split], words[split], words[split + 1 :]
    ranks = int(flag[0].partition("=")[2])
    script = Path("small.py")
    script.write_text(re.sub(r"range\(\d{3,}\)", "range(24)", Path(target).read_text("utf-8")), "utf-8")
    done = torchrun(script, *rest, ranks=ranks)
    sys.stdout.write(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(done.returncode)


def install(folder: Path) -> None:
    """Leave behind what an editable install does: metadata, and the sources on sys.path."""
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    source = (folder / "src").resolve()
    metadata = source / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n", "utf-8")
    entries = "\n".join(f"{name} = {value}" for name, value in project["entry-points"]["twinkle"].items())
    (metadata / "entry_points.txt").write_text(f"[twinkle]\n{entries}\n", "utf-8")
    sys.path.insert(0, str(source))


def test_the_heavy_pages_exist() -> None:
    assert {name_of(page) for page in PAGES} >= HEAVY
