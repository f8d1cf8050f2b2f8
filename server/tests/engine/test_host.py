"""The engine's process with the ledger in it: what the service is told, in which order, whatever goes wrong."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from ledger_engine import ENGINE, MODEL
from server_engine import Engine, engine, request

from twinkle_server.engine import files, messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import Create, Load, OptimStep, Sample, Save, Unload
from twinkle_server.wire import codec


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Engine]:
    with engine(tmp_path) as made:
        yield made


def sampled(outcome: Message) -> list[int]:
    [text], _ = codec.read_sample_response(outcome.body)
    return [int(token) for token in text.tokens]


def begun(made: Engine) -> list[list[int]]:
    return [message.head["ids"] for message in made.seen if message.type == messages.BEGIN]


def test_ready_tells_the_model_and_torch_is_not_imported(tmp_path: Path) -> None:
    with engine(tmp_path, name="served") as made:
        info = made.seen[0].head["info"]
        assert (info["name"], info["vocabulary"]) == ("served", 2**31 - 1)
        assert {"cross_entropy", "gspo"} <= set(info["losses"])
        maps = Path(f"/proc/{made.process.pid}/maps").read_text()
        assert "torch" not in maps


def test_operations_of_a_queue_are_done_in_order(ledger: Engine) -> None:
    ledger.create("m")
    for number in range(1, 13, 3):
        ledger.backward("m", number, number)
        ledger.backward("m", number + 1, number + 1, number + 2)
        ledger.step("m", number + 2)
    ledger.backward("m", 13, 99)
    applied, pending = ledger.ledger("m", 14)
    assert applied == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert pending == [99]
    done = [message.head["id"] for message in ledger.seen if message.type == messages.DONE]
    assert done == sorted(done)


def test_a_step_tells_its_metrics_and_an_empty_one_counts(ledger: Engine) -> None:
    ledger.create("m")
    ledger.backward("m", 1, 5, 6, 7)
    first, second = ledger.step("m", 2), ledger.step("m", 3)
    assert b'"grad_norm":3.0' in ledger.done(first).body
    assert b'"grad_norm":0.0' in ledger.done(second).body


def test_tenants_share_passes_and_steps(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"seconds_per_token": 0.1}) as made:
        queues = [f"m{n}" for n in range(5)]
        made.done(*[made.create(queue_id, tenant=queue_id) for queue_id in queues])
        first = made.backward(queues[0], 1, 1, tenant=queues[0])
        made.begun(first)  # the others come while it runs
        rest = [made.backward(queue_id, 1, 1, tenant=queue_id) for queue_id in queues[1:]]
        steps = [made.step(queue_id, 2, tenant=queue_id) for queue_id in queues[1:]]
        made.done(first, *rest, *steps)
        passed = made.wait(messages.PASSED).head
        passes = [m.head for m in made.seen if m.type == messages.PASSED and m.head["kind"] == "pass"]
        assert [(p["operations"], p["tenants"], p["tokens"]) for p in passes] == [(1, 1, 1), (4, 4, 4)]
        assert passed["kind"] == "optim_step"
        assert passed["operations"] == 4
        assert begun(made)[-2:] == [rest, steps]


def test_what_is_under_way_is_told_before_its_outcome(ledger: Engine) -> None:
    ids = [ledger.create("m"), ledger.backward("m", 1, 1), ledger.step("m", 2)]
    ids.append(ledger.sample(Sample([1])))
    ledger.done(*ids)
    for operation in ids:
        of_begin = next(i for i, m in enumerate(ledger.seen) if m.type == messages.BEGIN and operation in m.head["ids"])
        of_done = next(i for i, m in enumerate(ledger.seen) if m.type == messages.DONE and m.head["id"] == operation)
        assert of_begin < of_done


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (request([1], loss="nonsense"), "unknown loss_fn 'nonsense'"),
        (request(), "at least one datum"),
        (request([]), "model_input must have at least one token"),
        (request([-1]), "got -1"),
    ],
)
def test_a_request_that_makes_no_sense_is_its_users_fault_and_harms_nothing(
    ledger: Engine, payload: bytes, words: str
) -> None:
    ledger.create("m")
    ledger.backward("m", 1, 7)
    bad = ledger.run("m", 2, "forward_backward", payload)
    good = ledger.backward("m", 3, 8)
    outcome = ledger.done(bad).head
    assert outcome["category"] == "user"
    assert words in outcome["error"]
    assert ledger.done(good).head["error"] is None
    assert ledger.ledger("m", 4) == ([], [7, 8])


def test_an_error_of_the_engine_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"error": [13]}) as made:
        made.create("m")
        outcome = made.done(made.backward("m", 1, 13)).head
        assert outcome["category"] == "server"
        assert outcome["error"] == "The service failed during this forward_backward (RuntimeError); see its log."
        assert made.done(made.backward("m", 2, 1)).head["error"] is None
    assert "the ledger was told that 13 is an error" in made.log


@pytest.mark.full
@pytest.mark.parametrize("how", ["whole", "memory"])
def test_a_pass_that_cannot_be_done_is_done_in_halves(tmp_path: Path, how: str) -> None:
    with engine(tmp_path, extra={how: [13], "seconds_per_token": 0.05}) as made:
        queues = [f"m{n}" for n in range(7)]
        made.done(*[made.create(queue_id) for queue_id in queues])
        made.begun(made.backward(queues[0], 1, 1))
        ids = {
            queue_id: made.backward(queue_id, 2 if queue_id == queues[0] else 1, 13 if queue_id == "m3" else 2)
            for queue_id in queues
        }
        made.done(*ids.values())
        errors = {m.head["id"]: m.head["error"] for m in made.seen if m.type == messages.DONE}
        assert [queue_id for queue_id in queues if errors[ids[queue_id]]] == ["m3"]
        assert made.ledger("m6", 2) == ([], [2])
        assert made.ledger("m3", 2) == ([], [])


@pytest.mark.full
def test_no_memory_for_one_operation_is_told_with_its_size(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"tokens_in_memory": 3}) as made:
        made.create("m")
        outcome = made.done(made.backward("m", 1, 1, 2, 3, 4, tokens=4)).head
        assert outcome["category"] == "server"
        assert "memory" in outcome["error"]
        assert "4 tokens" in outcome["error"]


@pytest.mark.full
def test_fatal_ends_the_process_and_tells_what_was_under_way(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"fatal": [13]}) as made:
        made.create("m")
        bad = made.backward("m", 1, 13)
        with pytest.raises(AssertionError, match="ended"):
            made.done(bad)
        assert made.ended() == 70
        assert begun(made)[-1] == [bad]


def save(folder: str, kind: str = "weights") -> bytes:
    return Save(folder, kind).dump()


def test_checkpoints_are_published_and_read(ledger: Engine, tmp_path: Path) -> None:
    ledger.create("m")
    ledger.backward("m", 1, 5)
    ledger.step("m", 2)
    ledger.backward("m", 3, 6)
    outcome = ledger.done(ledger.run("m", 4, "save", save("checkpoints/one"))).head
    manifest = files.verify(tmp_path / "checkpoints" / "one", outcome["extra"]["digest"])
    assert outcome["extra"]["size_bytes"] == manifest.size
    assert outcome["extra"]["rank"] == 8
    assert manifest.facts == {"kind": "weights", "number": 4}
    ledger.step("m", 5)
    assert ledger.ledger("m", 6) == ([5, 6], [])
    ledger.run("m", 7, "load", Load("checkpoints/one", "tinker://x", optimizer=True).dump())
    assert ledger.ledger("m", 8) == ([5], [])
    ledger.create("other")
    made = ledger.run("copy", 0, "create", Create(8, 0, source="checkpoints/one").dump())
    assert ledger.done(made).head["error"] is None
    assert ledger.ledger("copy", 1) == ([5], [])


@pytest.mark.full
def test_a_checkpoint_that_is_not_what_was_saved_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create("m")
        made.done(made.run("m", 1, "save", save("checkpoints/one")))
    (tmp_path / "checkpoints" / "one" / "ledger.json").write_text('{"rank":8,"applied":[1]}')
    with engine(tmp_path) as made:
        made.create("m")
        for operation in (
            made.run("m", 1, "load", Load("checkpoints/one", "p").dump()),
            made.run("new", 0, "create", Create(8, 0, source="checkpoints/one").dump()),
            made.sample(Sample([1], source="checkpoints/one")),
        ):
            outcome = made.done(operation).head
            assert outcome["category"] == "server"
            assert "are damaged" in outcome["error"]
            assert str(tmp_path) not in outcome["error"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("folder", ["../outside", "/tmp/outside", "checkpoints/../../outside", ""])
def test_no_folder_outside_of_the_data_directory_is_written_or_read(
    ledger: Engine, tmp_path: Path, folder: str
) -> None:
    ledger.create("m")
    for operation in (
        ledger.run("m", 1, "save", save(folder)),
        ledger.run("m", 2, "load", Load(folder, "p").dump()),
        ledger.sample(Sample([1], source=folder)),
    ):
        assert ledger.done(operation).head["category"] == "server"
    assert not (tmp_path.parent / "outside").exists()


def test_a_save_that_the_disk_refuses_fails_alone_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "FAILPOINT": "files.before_rename:1:enospc"}
    with engine(tmp_path, environment=environment) as made:
        made.create("m")
        made.backward("m", 1, 5)
        outcome = made.done(made.run("m", 2, "save", save("checkpoints/one"))).head
        assert (outcome["category"], "disk" in outcome["error"]) == ("server", True)
        assert list((tmp_path / "checkpoints").iterdir()) == []
        assert made.done(made.run("m", 3, "save", save("checkpoints/two"))).head["error"] is None
        assert made.ledger("m", 4) == ([], [5])


def test_an_unloaded_model_is_gone(ledger: Engine) -> None:
    ledger.create("m")
    ledger.done(ledger.run("m", 1, "unload", Unload().dump()))
    outcome = ledger.done(ledger.backward("m", 2, 1)).head
    assert outcome["category"] == "user"
    assert ledger.done(ledger.create("m", 3)).head["error"] is None
    assert ledger.ledger("m", 4) == ([], [])


def test_samples_tell_the_version_that_they_were_drawn_from(ledger: Engine) -> None:
    ledger.create("m")
    ledger.backward("m", 1, 5, 6)
    ledger.step("m", 2)
    ledger.done(ledger.run("m", 3, "save", save("checkpoints/one", "sampler_weights")))
    ledger.backward("m", 4, 7)
    ledger.done(ledger.step("m", 5))
    assert sampled(ledger.done(ledger.sample(Sample([1], source="checkpoints/one")))) == [1, 2, 5, 6]
    assert sampled(ledger.done(ledger.sample(Sample([1])))) == [0, 0]
    assert sampled(ledger.done(ledger.sample(Sample([1], source="checkpoints/one", max_tokens=1)))) == [1]


def test_a_bad_sample_fails_alone(ledger: Engine) -> None:
    bad, good = ledger.sample(Sample([])), ledger.sample(Sample([1]))
    assert ledger.done(bad).head["category"] == "user"
    assert ledger.done(good).head["error"] is None


@pytest.mark.full
def test_samples_that_were_under_way_in_a_crash_are_alone(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"seconds_per_decode": 0.01}) as made:
        ids = [made.sample(Sample([1]), alone=alone) for alone in (False, True, False, True, False)]
        made.done(*ids)
        together = begun(made)
        assert all(operation not in turn or turn == [operation] for turn in together for operation in (ids[1], ids[3]))


@pytest.mark.full
@pytest.mark.parametrize("how", ["whole", "memory"])
def test_a_decode_step_that_fails_costs_only_the_request_that_made_it(tmp_path: Path, how: str) -> None:
    with engine(tmp_path, extra={how: [13], "seconds_per_decode": 0.01}) as made:
        ids = [made.sample(Sample([token])) for token in (1, 13, 2, 3)]
        made.done(*ids)
        errors = {m.head["id"]: m.head["error"] for m in made.seen if m.type == messages.DONE}
        assert [bool(errors[operation]) for operation in ids] == [False, True, False, False]


@pytest.mark.full
def test_a_sample_that_runs_is_dropped_when_it_is_cancelled(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"seconds_per_decode": 0.02}) as made:
        made.create("m")
        made.backward("m", 1, *range(3, 1003))
        made.step("m", 2)
        made.done(made.run("m", 3, "save", save("checkpoints/one", "sampler_weights")))
        long = made.sample(Sample([1], source="checkpoints/one"))  # 1,002 decode steps
        made.begun(long)
        made.send(messages.CANCEL, id=long)
        assert made.done(long).head["cancelled"]
        assert made.done(made.sample(Sample([1]))).head["error"] is None


def test_only_samples_are_cancelled(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"seconds_per_token": 0.1}) as made:
        made.create("m")
        running = made.backward("m", 1, 1)
        made.begun(running)
        waiting = made.backward("m", 2, 2)
        for operation in (waiting, running, 12345):
            made.send(messages.CANCEL, id=operation)
        assert all("cancelled" not in made.done(operation).head for operation in (running, waiting))
        assert made.ledger("m", 3) == ([], [1, 2])


@pytest.mark.full
def test_training_goes_on_while_sampling_has_work_and_the_other_way_round(tmp_path: Path) -> None:
    chaos = {"seconds_per_token": 0.001, "seconds_per_decode": 0.01}
    with engine(tmp_path, extra=chaos, max_pass_seconds=0.05, pass_tokens=10) as made:
        made.done(made.create("m"))
        made.backward("m", 1, *range(3, 53))
        made.step("m", 2)
        made.done(made.run("m", 3, "save", save("checkpoints/one", "sampler_weights")))
        sample = Sample([1], source="checkpoints/one")  # 52 decode steps
        samples = [made.sample(sample) for _ in range(3)]
        passes = [made.run("m", 4 + n, "forward_backward", request([7] * 40), tokens=40) for n in range(20)]
        made.done(*samples, *passes)
        kinds = [m.head["kind"] for m in made.seen if m.type == messages.PASSED][3:]
        order = [m.head["ids"][0] in samples for m in made.seen if m.type == messages.BEGIN][4:]
        assert "pass" in kinds
        changes = sum(before != after for before, after in pairwise(order))
        assert changes >= 6, "they took turns"


@pytest.mark.full
def test_decode_steps_are_taken_inside_a_long_pass(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"seconds_per_token": 0.00005}) as made:
        made.create("m")
        long = made.run("m", 1, "forward_backward", request([7] * 16_384), tokens=16_384)
        made.begun(long)
        short = made.sample(Sample([1]))
        made.done(short)
        assert not any(m.type == messages.DONE and m.head["id"] == long for m in made.seen)
        assert made.done(long).head["error"] is None
        assert begun(made)[-2:] == [[short], [long]], "the pass is told again, for it is what runs"


def test_the_process_ends_with_the_socket_even_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"hang": [13]}) as made:
        made.create("m")
        hanging = made.backward("m", 1, 13)
        made.begun(hanging)
    assert made.process.returncode == 0


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    parent = (
        "import os, socket, subprocess, sys\n"
        "from pathlib import Path\n"
        "from twinkle_server.settings import Settings\n"
        "ours, theirs = socket.socketpair()\n"
        "os.set_inheritable(ours.fileno(), True)\n"
        f"text = Settings(model={str(MODEL)!r}, data=Path(sys.argv[1]), backend={ENGINE!r}).dump()\n"
        "keeper = subprocess.Popen(['sleep', '60'], pass_fds=[ours.fileno()], stdout=2)\n"
        "child = subprocess.Popen([sys.executable, '-m', 'twinkle_server.engine', str(theirs.fileno()), text],\n"
        "                         pass_fds=[theirs.fileno()], stdout=2)\n"
        "ours.recv(1)\n"
        "print(child.pid, keeper.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )  # the keeper holds the socket open, so that the kernel's word alone ends the child
    done = subprocess.run(
        [sys.executable, "-c", parent, tmp_path], stdout=subprocess.PIPE, timeout=60, check=False, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    child, keeper = map(int, done.stdout.split())
    try:
        assert eventually(lambda: not alive(child))
    finally:
        os.kill(keeper, 9)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(said: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not said() and time.monotonic() < end:
        time.sleep(0.02)
    return said()


def test_signals_that_a_terminal_sends_do_not_end_it(ledger: Engine) -> None:
    for number in (2, 15):
        ledger.process.send_signal(number)
    assert ledger.done(ledger.create("m")).head["error"] is None


@pytest.mark.parametrize("extra", [{"nonsense": 1}])
def test_options_that_the_ledger_does_not_know_are_refused(tmp_path: Path, extra: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="knows no option nonsense"), engine(tmp_path, extra=extra):
        pass


@pytest.mark.full
def test_sums_of_a_large_pass_survive_the_socket(ledger: Engine) -> None:
    ledger.create("m")
    tokens = np.arange(300_000) % 1000
    outcome = ledger.done(ledger.run("m", 1, "forward_backward", request(tokens), tokens=300_000))
    [output], metrics = codec.read_forward_backward_output(outcome.body)
    assert output["logprobs"].shape == (300_000,)
    assert metrics["loss:sum"] == pytest.approx(float((1 + tokens % 7 / 7).sum()))


@pytest.mark.full
def test_payloads_that_cannot_be_read_fail_alone(ledger: Engine) -> None:
    ledger.create("m")
    bad = [
        ledger.run("m", 1, "forward_backward", b"\xff\xff\xff"),
        ledger.run("m", 2, "optim_step", b"[]"),
        ledger.run("m", 3, "save", b"{}"),
        ledger.run("m", 4, "nonsense", b""),
    ]
    good = ledger.run("m", 5, "optim_step", OptimStep().dump())
    assert [bool(ledger.done(operation).head["error"]) for operation in bad] == [True] * 4
    assert ledger.done(good).head["error"] is None


def test_operations_that_have_not_begun_are_taken_out_and_the_others_run_on(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"seconds_per_token": 0.0002}) as made:
        made.done(made.create("m"))
        long = made.run("m", 1, "forward_backward", request([7] * 8192), tokens=8192)
        made.begun(long)
        behind = [made.backward("m", number, 10 + number) for number in range(2, 6)]
        step = made.step("m", 6)
        made.send(messages.WITHDRAW, ids=[long, *behind[1:3], 999])
        answer = made.wait(messages.WITHDRAWN).head
        assert answer == {"ids": [long, *behind[1:3], 999], "out": behind[1:3]}
        assert not [m for m in made.seen if m.type == messages.DONE and m.head["id"] == long], "within the pass"
        made.done(long, behind[0], behind[3], step)
        assert made.ledger("m", 7) == ([7, 12, 15], [])
        assert not [m for m in made.seen if m.type == messages.DONE and m.head["id"] in behind[1:3]]


def test_a_long_operation_tells_its_passes_while_it_runs(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"seconds_per_token": 0.0002}) as made:
        made.done(made.create("m"))
        long = made.run("m", 1, "forward_backward", request([7] * 10_240), tokens=10_240)
        made.done(long)
        parts = [m.head for m in made.seen if m.type == messages.PROGRESS]
        head = made.wait(messages.PASSED).head
        assert 2 <= len(parts) <= 4, "2 s, reported every half second"
        reported = {name: sum(part[name] for part in parts) for name in ("seconds", "passes", "tokens")}
        assert head["reported"] == pytest.approx(reported)
        assert all(part["tenants"] == {"t": part["tokens"]} and part["tokens"] > 0 for part in parts)
        assert (head["tokens"], head["passes"]) == (10_240, 10), "the ledger takes 1,024 tokens at a time"
        assert reported["tokens"] <= head["tokens"]
        assert made.done(made.backward("m", 2, 5)).head["error"] is None
        short = made.wait(messages.PASSED).head
        assert (short["passes"], short["reported"]["passes"]) == (1, 0)
