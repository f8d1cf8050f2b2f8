"""A plugin's loss that hangs, eats memory or crashes costs the operation that named it, and nothing else."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rogue_plugin
import torch
from server_pool import Bench, answer, datum, drawn, request

import twinkle_server.engine.losses.workers.workers
import twinkle_server.workers.child
from twinkle import registry
from twinkle_server.engine.errors import UserError, failed, is_passing
from twinkle_server.engine.executor import Pass
from twinkle_server.engine.losses.workers.frames import TensorFrames, pack
from twinkle_server.engine.losses.workers.workers import LossWorkers, WorkerLimits
from twinkle_server.engine.messages import SIZES, Message
from twinkle_server.engine.queues import Task
from twinkle_server.workers.child import Child, Ended

SECONDS = 4.0
MEMORY = 128 * 2**20
PROCESS = "losses.workers.process"
LIMITS = {"seconds": SECONDS, "memory": MEMORY}


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the plugin for this module."""
    site = str(rogue_plugin.write(tmp_path_factory.mktemp("site")))
    sys.path.append(site)
    registry.cache_clear()
    yield
    sys.path.remove(site)
    registry.cache_clear()


@pytest.fixture(scope="module")
def shared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(base, tmp_path_factory.mktemp("shared"), extra={"loss_workers": LIMITS})
    for queue_id in "ab":
        bench.create(queue_id, seed=1)
        bench.shake(queue_id)
    yield bench
    workers(bench).close()


@pytest.fixture(scope="module")
def inside(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Serve the same models, with all losses in this process."""
    bench = Bench(base, tmp_path_factory.mktemp("inside"), extra={"loss_workers": None})
    for queue_id in "ab":
        bench.create(queue_id, seed=1)
        bench.shake(queue_id)
    return bench


def workers(bench: Bench) -> LossWorkers:
    found = bench.executor._losses.workers
    assert found is not None
    return found


def plain_row(length: int = 6, seed: int = 1) -> Any:
    tokens, inputs = datum(length, seed)
    return tokens, {"target_tokens": inputs["target_tokens"]}


def rich_row(length: int, seed: int) -> Any:
    tokens, inputs = plain_row(length, seed)
    return tokens, {**inputs, "fractions": np.random.default_rng(seed).normal(size=length).astype(np.float32)}


def gradient(bench: Bench, queue_id: str) -> torch.Tensor:
    """Return a copy of a model's pending gradient, and forget it."""
    tenant = bench.tenant(queue_id)
    found = tenant.flat.grad.clone()
    bench.step(queue_id, learning_rate=0.0)
    return found


def beside(bench: Bench, loss: str, rows: Any = None, **config: Any) -> tuple[Any, Any]:
    """Do a pass of a plugin's loss and of a neighbour together; return what each gave."""
    rows = [plain_row()] if rows is None else rows
    payload = request(rows, loss, **config)
    found, _ = bench.executor.run([Pass("a", payload, 1), Pass("b", request([datum(6, 2)]), 2)])
    return found[0], found[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [[rich_row(6, 1)], [rich_row(5, 2), rich_row(9, 3), rich_row(1, 4)]])
@pytest.mark.parametrize("config", [{}, {"share": 0.25, "mode": "other"}])
def test_value_and_gradient_are_those_of_the_loss_in_process_to_the_bit(shared, inside, rows, config):
    found = []
    for bench in (shared, inside):
        logprobs, metrics = bench.run("a", rows, "AcmeRich", **config)
        found.append((logprobs, metrics, gradient(bench, "a")))
    (logprobs, metrics, grads), (expected, said, wanted) = found
    assert metrics == said
    assert all((one == two).all() for one, two in zip(logprobs, expected, strict=True))
    assert wanted.abs().max() > 0
    assert torch.equal(grads, wanted)


@pytest.mark.full
def test_many_rows_that_go_through_the_model_in_pieces_give_the_same_bits(shared, inside, monkeypatch):
    rows = [rich_row(5 + number % 7, number) for number in range(24)]
    found = []
    for bench in (shared, inside):
        monkeypatch.setattr(bench.pool, "tokens_per_pass", 32)
        _, metrics = bench.run("a", rows, "AcmeRich")
        found.append((metrics, gradient(bench, "a")))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_a_forward_alone_gives_the_same_number_and_no_gradient(shared, inside):
    rows = [rich_row(6, 1)]
    assert shared.run("a", rows, "AcmeRich", forward=True)[1] == inside.run("a", rows, "AcmeRich", forward=True)[1]


PASSING = ("AcmeSleeps", "AcmeSpins", "AcmeEats", "AcmeEatsShared", "AcmeCloses")
BAD = {
    "AcmeSleeps": rf"'AcmeSleeps' of plugin 'acme-rogue' took longer than {SECONDS:g} s, the limit",
    "AcmeSpins": rf"took longer than {SECONDS:g} s",
    "AcmeEats": r"'AcmeEats' of plugin 'acme-rogue' took more than 128 MiB of memory, the limit",
    "AcmeEatsShared": r"more than 128 MiB of memory, the limit",
    "AcmeExits": r"'AcmeExits' of plugin 'acme-rogue' crashed: its process ended with the exit status 3",
    "AcmeQuits": r"raised SystemExit: 4",
    "AcmeSegfaults": r"crashed: its process was killed by SIGSEGV",
    "AcmeAborts": r"crashed: its process was killed by SIGABRT",
    "AcmeRaises": r"raised RuntimeError: the moon is in the wrong phase: …/loss.py;",
    "AcmeSurrogate": r"raised RuntimeError: a file named \?;",
    "AcmeNan": r"'AcmeNan' of plugin 'acme-rogue' is nan; this operation had no effect",
    "AcmeNanGradient": r"the gradient of loss_fn 'AcmeNanGradient' of plugin 'acme-rogue' is not finite",
    "AcmeCloses": r"crashed: its process was killed by SIGKILL",
    "AcmeScribbles": r"returned an invalid loss",
    "AcmeSpawns": r"exit status 5",
    "AcmeText": r"returned a str; return LossOutput",
    "AcmeDetached": r"the result of AcmeDetached has no gradient",
    "AcmeReadsLogits": r"reads outputs\['logits'\], which is not sent to its worker process",
    "AcmeWhole": r"'AcmeWhole' of plugin 'acme-rogue' cannot be used by requests: it requires full logits",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", BAD)
def test_it_fails_its_own_operation_and_no_other(shared, inside, loss, caplog):
    _, alone = inside.run("b", [datum(6, 2)])
    alone_gradient = gradient(inside, "b")
    begin = time.monotonic()
    bad, good = beside(shared, loss)
    seconds = time.monotonic() - begin
    assert isinstance(bad, UserError), bad
    said = failed(Task(1, "a", 1, "forward_backward", "t", replay=True), bad)
    assert bool(said.head.get("later")) == (loss in PASSING), "a replay is tried again where time or memory lacked"
    assert re.search(BAD[loss], Message.unpack(said.pack_head()[SIZES.size :], b"").head["error"])
    caplog.text.encode()  # any log can write what a plugin raised
    with pytest.raises(UserError) as caught:
        answer(bad)
    assert "/site" not in str(caught.value)
    _, metrics = answer(good)
    # a pass of two models multiplies other shapes than a pass of one: float32 sums in another order
    assert metrics["loss:sum"] == pytest.approx(alone["loss:sum"], rel=1e-5)
    assert gradient(shared, "b").numpy() == pytest.approx(alone_gradient.numpy(), rel=1e-4, abs=1e-6)
    assert seconds < 6 * SECONDS
    assert shared.step("a", learning_rate=0.0) == {"grad_norm": 0.0}
    if loss not in ("AcmeWhole",):
        _, again = shared.run("a", [plain_row()], "AcmePlain")
        assert again["loss:sum"] > 0
        shared.step("a", learning_rate=0.0)


@pytest.mark.full
def test_two_losses_that_hang_in_one_pass_delay_it_by_one_deadline(shared):
    shared.run("a", [plain_row()], "AcmePlain")
    shared.run("b", [plain_row()], "AcmePlain")
    for queue_id in "ab":
        shared.step(queue_id, learning_rate=0.0)
    begin = time.monotonic()
    found, _ = shared.executor.run([Pass(queue_id, request([plain_row()], "AcmeSleeps"), 1) for queue_id in "ab"])
    seconds = time.monotonic() - begin
    assert all(isinstance(one, UserError) for one in found)
    assert SECONDS <= seconds < 1.9 * SECONDS


def test_what_a_loss_prints_goes_nowhere(shared, capfd):
    capfd.readouterr()
    bad, good = beside(shared, "AcmePrints")
    assert answer(bad)[1]["loss:sum"] == pytest.approx(
        shared.run("a", [plain_row()], "AcmePlain")[1]["loss:sum"], rel=1e-5
    )
    assert answer(good)[1]["loss:sum"]
    assert capfd.readouterr() == ("", "")
    for queue_id in "ab":
        shared.step(queue_id, learning_rate=0.0)


def test_a_loss_that_overwrites_its_inputs_changes_nothing_of_the_answer(shared):
    [logprobs], _ = shared.run("a", [plain_row()], "AcmeOverwrites", forward=True)
    [expected], _ = shared.run("a", [plain_row()], "AcmePlain", forward=True)
    assert (logprobs == expected).all()


def test_the_older_form_of_a_loss_is_read(shared):
    _, metrics = shared.run("a", [plain_row()], "AcmeOlder", forward=True)
    assert metrics["loss:sum"] == pytest.approx(
        shared.run("a", [plain_row()], "AcmePlain", forward=True)[1]["loss:sum"], rel=1e-6
    )


def test_random_numbers_follow_from_the_number_of_the_operation(shared):
    def value(number: int) -> float:
        [found], _ = shared.executor.run([Pass("a", request([plain_row()], "AcmeRandom", forward=True), number)])
        return answer(found)[1]["loss:sum"]

    assert value(5) == value(5) != value(6)


def test_a_worker_has_no_secret_no_socket_but_its_own_and_no_file_of_the_service(shared):
    _, metrics = shared.run("a", [plain_row()], "AcmeLooks", forward=True)
    assert metrics["pid:sum"] not in (os.getpid(), 0)
    assert (metrics["secrets:sum"], metrics["sockets:sum"], metrics["files:sum"]) == (0, 1, 0)
    _, other = shared.run("b", [plain_row()], "AcmeLooks", forward=True)
    assert other["pid:sum"] != metrics["pid:sum"]


def test_the_engine_imports_nothing_of_the_plugin(shared, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("acme_rogue")]:
        monkeypatch.delitem(sys.modules, name)
    shared.run("a", [plain_row()], "AcmePlain", forward=True)
    assert not [name for name in sys.modules if name.startswith("acme_rogue")]


@pytest.mark.full
def test_secrets_of_the_environment_do_not_reach_a_worker(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("ACME_API_KEY", "secret")
    before = set(children_of(os.getpid(), PROCESS))
    made = LossWorkers(WorkerLimits())
    [spec] = registry().specs("loss")["AcmeLooks"]
    try:
        made.prepare([spec])
        made.open(spec, {}, queue_id="a", number=1, weighted=False)
        [first] = set(children_of(os.getpid(), PROCESS)) - before
        environment = Path(f"/proc/{first}/environ").read_bytes()
        assert b"secret" not in environment
        assert b"PYTHONPATH" in environment
    finally:
        made.close()


@pytest.mark.parametrize(
    ("loss", "rows", "config", "words"),
    [
        ("AcmeRich", [plain_row()], {}, r"'AcmeRich' requires the loss_fn_input 'fractions'"),
        ("AcmeRich", [rich_row(6, 1)], {"shar": 1.0}, r"shar.*share"),
        ("AcmePlain", [plain_row()], {"worse": 1.0}, r"worse"),
        (
            "AcmeRich",
            [(rich_row(6, 1)[0], {**rich_row(6, 1)[1], "weights": np.full(6, 0.5, np.float32)})],
            {},
            "only accepts the weights",
        ),
    ],
)
def test_what_is_wrong_with_a_request_is_said_as_of_any_loss(shared, inside, loss, rows, config, words):
    for bench in (shared, inside):
        with pytest.raises(UserError, match=words):
            bench.run("a", rows, loss, **config)


def test_weights_reach_a_loss_that_reads_them(shared, inside):
    rows = [datum(6, 1), datum(4, 2)]
    assert shared.run("a", rows, "AcmePlain", forward=True)[1] == inside.run("a", rows, "AcmePlain", forward=True)[1]


def test_losses_that_ship_with_twinkle_stay_in_the_engine(shared):
    before = set(children_of(os.getpid(), PROCESS))
    shared.run("b", [drawn(6, 1)], "GRPOLoss", forward=True)
    assert set(children_of(os.getpid(), PROCESS)) == before
    assert not workers(shared).find(registry().specs("loss")["GRPOLoss"][0], "b")


def test_an_operator_may_trust_a_plugin_with_the_engine(base, tmp_path):
    bench = Bench(base, tmp_path, extra={"in_process_losses": ["acme-rogue"]})
    bench.create("a")
    _, metrics = bench.run("a", [plain_row()], "AcmeLooks", forward=True)
    assert metrics["pid:sum"] == os.getpid()
    assert bench.executor._losses.workers is None


def test_the_worker_of_a_model_ends_with_the_model(shared):
    shared.create("gone")
    _, metrics = shared.run("gone", [plain_row()], "AcmeLooks", forward=True)
    pid = int(metrics["pid:sum"])
    assert Path(f"/proc/{pid}").exists()
    shared.executor.remove("gone")
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.full
def test_no_process_of_a_plugin_that_is_revoked_goes_on(base, tmp_path, monkeypatch):
    site = rogue_plugin.write(tmp_path / "site", "acme-import", HANGS, {"AcmeImport": ""})
    monkeypatch.syspath_prepend(str(site))
    registry.cache_clear()
    bench = Bench(base, tmp_path, extra={"loss_workers": LIMITS})
    registry.cache_clear()
    bench.create("a")
    before = bench.run("a", [plain_row()], "AcmePlain", forward=True)
    tree = workers(bench)._tree
    wait_for(lambda: len(children_of(tree.first.pid, PROCESS)) == 2)
    rogue = {tree.workers["a", "acme-rogue"].process.pid, tree.plugins["acme-rogue"].process.pid}
    losses, there = bench.executor._losses, bench.executor._losses._specs()

    def without(dist: str) -> None:
        monkeypatch.setattr(losses, "_specs", lambda: {n: spec for n, spec in there.items() if spec.dist != dist})
        bench.executor.drop_plugins()

    without("acme-import")
    assert set(children_of(tree.first.pid, PROCESS)) <= rogue, "though it was never asked for anything"
    assert bench.run("a", [plain_row()], "AcmePlain", forward=True)[1] == before[1]
    assert {tree.workers["a", "acme-rogue"].process.pid, tree.plugins["acme-rogue"].process.pid} == rogue
    without("acme-rogue")
    assert not any(alive(pid) for pid in rogue)
    workers(bench).close()


@pytest.mark.full
def test_no_more_workers_are_kept_than_the_limit(base, tmp_path):
    bench = Bench(base, tmp_path, extra={"loss_workers": {**LIMITS, "warm": 2}})
    pids = []
    for queue_id in ("a", "b", "c"):
        bench.create(queue_id)
        pids.append(int(bench.run(queue_id, [plain_row()], "AcmeLooks", forward=True)[1]["pid:sum"]))
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False, True, True]
    assert int(bench.run("a", [plain_row()], "AcmeLooks", forward=True)[1]["pid:sum"]) not in pids
    workers(bench).close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.full
def test_nothing_that_a_loss_started_outlives_the_workers(base, tmp_path):
    bench = Bench(base, tmp_path, extra={"loss_workers": LIMITS})
    bench.create("a")
    before = set(processes("sleep 3600"))
    with pytest.raises(UserError, match="exit status 5"):
        bench.run("a", [plain_row()], "AcmeSpawns")
    workers(bench).close()
    assert set(processes("sleep 3600")) == before


@pytest.mark.full
def test_processes_that_are_killed_from_outside_are_replaced(base, tmp_path):
    bench = Bench(base, tmp_path, extra={"loss_workers": LIMITS})
    bench.create("a")
    before = bench.run("a", [plain_row()], "AcmePlain", forward=True)
    tree = workers(bench)._tree
    for victim in (
        lambda: tree.workers["a", "acme-rogue"].process.pid,
        lambda: tree.plugins["acme-rogue"].process.pid,
        lambda: tree.first.pid,
    ):
        worker = tree.workers["a", "acme-rogue"].process.pid
        os.kill(victim(), signal.SIGKILL)
        wait_for(lambda pid=worker: not alive(pid))  # it ends with those that it was forked from
        again = bench.run("a", [plain_row()], "AcmePlain", forward=True)
        assert again[1] == before[1]
    workers(bench).close()


FLOOD = """
import socket, sys, time
link, end = socket.socket(fileno=int(sys.argv[1])), time.monotonic() + 20
frames = bytes.fromhex(sys.argv[2]) * 20_000
while time.monotonic() < end:
    link.sendall(frames)
"""


@pytest.mark.full
def test_a_process_that_sends_without_end_is_ended_at_its_deadline(monkeypatch):
    monkeypatch.setattr(twinkle_server.workers.child, "_TRANSFER", 0.5)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", FLOOD, str(theirs.fileno()), pack({"id": 1}).hex()]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        child = Child(ours, None, MEMORY, TensorFrames(), process.kill)
        with pytest.raises(Ended, match="did not answer in time") as late:
            child.receive(time.monotonic() + 0.5, lambda frame: frame["id"] == 2)
        child.end()
    assert late.value.slow


@pytest.mark.full
def test_an_answer_may_not_be_much_larger_than_what_was_sent():
    ours, theirs = socket.socketpair()
    child = Child(ours, None, MEMORY, TensorFrames())
    values = torch.zeros(2**18 + 64)
    theirs.sendall(pack({"values": values})[:64])
    with pytest.raises(Ended, match="returned an invalid loss"):
        child.receive(time.monotonic() + 60.0)
    ours, theirs = socket.socketpair()
    child = Child(ours, None, MEMORY, TensorFrames())
    frame = pack({"values": values})

    def echo() -> None:
        theirs.sendall(theirs.recv(len(frame), socket.MSG_WAITALL))

    answering = threading.Thread(target=echo, daemon=True)
    answering.start()
    child.send({"values": values}, time.monotonic() + 60.0)
    assert torch.equal(child.receive(time.monotonic() + 60.0)["values"], values)
    answering.join(60.0)


@pytest.mark.full
def test_want_of_descriptors_costs_an_operation_and_no_process(base, tmp_path, monkeypatch):
    bench = Bench(base, tmp_path, extra={"loss_workers": LIMITS})
    for queue_id in "ab":
        bench.create(queue_id)
    before = bench.run("a", [plain_row()], "AcmePlain", forward=True)
    plugin = workers(bench)._tree.plugins["acme-rogue"].process

    def lacking() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", lacking)
        with pytest.raises(UserError, match=r"AcmePlain' of .* could not be started: Too many open files") as lack:
            bench.run("b", [plain_row()], "AcmePlain", forward=True)
    assert is_passing(lack.value)
    assert bench.run("b", [plain_row()], "AcmePlain", forward=True)[1] == before[1]
    assert workers(bench)._tree.plugins["acme-rogue"].process is plugin
    workers(bench).close()


CRASHES = "import os\nos._exit(9)\n"
HANGS = "import time\ntime.sleep(3600)\n"
RAISES = "raise ValueError('broken on purpose')\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (CRASHES, r"the plugin 'acme-import' cannot be loaded: its worker process ended with the exit status 9"),
        (HANGS, r"the plugin 'acme-import' cannot be loaded: its worker process took longer than 15 s"),
    ],
)
def test_a_plugin_whose_import_crashes_or_hangs_is_refused_and_tried_again_later(
    base, tmp_path, monkeypatch, code, words
):
    site = rogue_plugin.write(tmp_path / "site", "acme-import", code, {"AcmeImport": ""})
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(twinkle_server.engine.losses.workers.workers, "_PAUSE", 0.0)
    registry.cache_clear()
    bench = Bench(base, tmp_path, extra={"loss_workers": {**LIMITS, "start": 15.0}})
    registry.cache_clear()
    for queue_id in "ab":
        bench.create(queue_id)
    bad, good = beside(bench, "AcmeImport")
    with pytest.raises(UserError, match=words):
        answer(bad)
    assert answer(good)[1]["loss:sum"] > 0
    assert bench.run("a", [plain_row()], "AcmePlain")[1]["loss:sum"] > 0, "another plugin's losses work"
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(UserError, match=r"cannot be loaded: .*(being loaded again|exit status 9)") as again:
            bench.run("a", [plain_row()], "AcmeImport")
        assert is_passing(again.value), "models that were trained with it are made again later"
    monkeypatch.setattr(twinkle_server.engine.losses.workers.workers, "_PAUSE", 30.0)
    [plugin] = [found for found in workers(bench)._tree.plugins.values() if found.name == "acme-import"]
    plugin.again = time.monotonic() + 30.0
    with pytest.raises(UserError, match=r"cannot be loaded: .*it is loaded again in \d+ s") as again:
        bench.run("a", [plain_row()], "AcmeImport")
    assert is_passing(again.value)
    plugin.again = 0.0
    monkeypatch.setattr(twinkle_server.engine.losses.workers.workers, "_PAUSE", 0.0)
    assert time.monotonic() - begin < 10, "nobody waits for it a second time"
    (site / "acme_import" / "loss.py").write_text(WORKS, "utf-8")
    if code == CRASHES:
        wait_for(lambda: works(bench, "AcmeImport"))
    workers(bench).close()


WORKS = """
from twinkle.data_format import LossOutput


def AcmeImport(inputs, outputs):
    return LossOutput(-outputs["logps"].sum(), 1.0)
"""


@pytest.mark.full
def test_a_plugin_whose_import_raises_fails_its_own_operations(base, tmp_path, monkeypatch):
    site = rogue_plugin.write(tmp_path / "site", "acme-import", RAISES, {"AcmeImport": ""})
    monkeypatch.syspath_prepend(str(site))
    registry.cache_clear()
    bench = Bench(base, tmp_path, extra={"loss_workers": LIMITS})
    registry.cache_clear()
    for queue_id in "ab":
        bench.create(queue_id)
    bad, good = beside(bench, "AcmeImport")
    with pytest.raises(
        UserError, match=r"'AcmeImport' of plugin 'acme-import' raised PluginBroken: .*broken on purpose"
    ):
        answer(bad)
    assert answer(good)[1]["loss:sum"] > 0
    workers(bench).close()


def works(bench: Bench, loss: str) -> bool:
    try:
        return bool(bench.run("a", [plain_row()], loss)[1])
    except UserError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def processes(command: str) -> list[int]:
    """Return the processes with a command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cmdline").read_bytes().replace(b"\0", b" ").strip() == command.encode():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def children_of(parent: int, command: str) -> list[int]:
    """Return the direct children of a process whose command line has a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and command.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue
    return found
