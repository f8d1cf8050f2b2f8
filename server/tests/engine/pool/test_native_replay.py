"""Native models in snapshots: cut anywhere, the rest of the calls gives the same bits."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from server_pool import Bench

from twinkle_client import wire
from twinkle_server.engine.executor import Pass
from twinkle_server.engine.native.calls import payload_of
from twinkle_server.engine.native.models import Noted
from twinkle_server.engine.queues import Composition
from twinkle_server.operations import Create, Load, OptimStep, Save

QUEUE = "m"
Step = tuple[str, str, dict[str, Any]]
TIMES = ("speed", "total time elapse")


def rows(seed: int, *lengths: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    made = []
    for length in lengths:
        tokens = draw.integers(5, 200, length)
        made.append({"input_ids": tokens, "labels": np.append(tokens[1:], -100)})
    return made


def component(method: str, name: str, **options: Any) -> Step:
    return "native", method, {"name": name, "options": options}


SCRIPT: list[Step] = [
    component("set_optimizer", "AdamW", lr=1e-2),
    component("set_lr_scheduler", "CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=6),
    component("set_loss", "CrossEntropyLoss"),
    component("set_processor", "InputProcessor", padding_side="left"),
    ("native_pass", "forward_backward", {"inputs": rows(1, 6, 9)}),
    ("native_step", "clip_grad_and_step", {}),
    ("native_pass", "forward_backward", {"inputs": rows(2, 7)}),
    ("native_step", "clip_grad_and_step", {}),
    ("native", "calculate_metric", {"is_training": True}),
    ("native_pass", "forward_only", {"inputs": rows(3, 5, 5)}),
    ("native", "calculate_loss", {}),
    ("native_pass", "forward_only", {"inputs": rows(4, 4)}),
    ("native", "calculate_loss", {}),
    ("native", "calculate_metric", {"is_training": False}),
    ("native", "forward", {"inputs": rows(5, 8, 3)}),
    ("native", "calculate_loss", {}),
    ("native", "backward", {}),
    ("native", "backward", {}),  # an error, which changes nothing
    ("native_pass", "forward_backward", {"inputs": rows(6, 8, 3)}),
    ("native", "clip_grad_norm", {"max_grad_norm": 0.1}),
    ("native", "step", {"optim_params": {"lr": 0.03}}),
    ("native", "zero_grad", {}),
    ("native", "lr_step", {}),
    ("native", "add_metric", {"name": "DPOMetric", "options": {}, "is_training": True}),
    ("native_pass", "forward_backward", {"inputs": rows(7, 6, 6)}),
    ("native_pass", "forward_backward", {"inputs": rows(8, 6, 6)}),
    ("native_step", "clip_grad_and_step", {"max_grad_norm": 0.5}),
    ("native", "calculate_metric", {"is_training": True}),
    ("native", "get_state_dict", {}),
    ("native", "get_progress", {}),
]


class Session:
    """An executor with one native model.

    Args:
        base: the base model.
        data: for files.
    """

    def __init__(self, base: Path, data: Path) -> None:
        self.bench = Bench(base, data)
        self.executor = self.bench.executor

    def create(self) -> None:
        create = Create(4, 3, alpha=16.0, dropout=0.1, targets=["all-linear"], native=True, accumulation=2)
        self.executor.create(QUEUE, create, None)

    def do(self, step: Step, number: int, composition: Composition | None = None) -> tuple[Any, Composition | None]:
        """Make a call and return what is answered, and how it was computed."""
        kind, method, arguments = step
        payload = payload_of(method, wire.pack(arguments))
        used = None
        if kind == "native_pass":
            [found], cost = self.executor.run([Pass(QUEUE, payload, number, composition, native=True)])
            used = cost.compositions.get(0)
        elif kind == "native_step":
            [found] = self.executor.step([(QUEUE, payload)])
        else:
            found = self.executor.call(QUEUE, payload)
        found = found.frame if isinstance(found, Noted) else found
        assert isinstance(found, bytes), found
        return wire.unpack(found), used

    def snapshot(self) -> Path:
        folder = Path(mkdtemp(dir=self.bench.data))
        self.executor.snapshot(QUEUE).write(folder)
        return folder


def bits(answer: Any) -> Any:
    """Return an answer in a form that compares bit for bit, without times."""
    if isinstance(answer, dict):
        return {name: bits(value) for name, value in answer.items() if name not in TIMES}
    return (answer.dtype.str, answer.shape, answer.tobytes()) if isinstance(answer, np.ndarray) else answer


def values(answers: Sequence[Any]) -> list[Any]:
    return [bits(answer) for answer in answers]


@pytest.fixture(scope="module")
def undisturbed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], list[Path]]:
    """What the script answers, how passes were computed, and a snapshot before each call and after the last."""
    session = Session(base, tmp_path_factory.mktemp("undisturbed"))
    session.create()
    answers, compositions, folders = [], [], [session.snapshot()]
    for number, step in enumerate(SCRIPT):
        answer, composition = session.do(step, number + 1)
        answers.append(answer)
        compositions.append(composition)
        folders.append(session.snapshot())
    return answers, compositions, folders


def test_the_script_does_what_it_says(undisturbed: Any) -> None:
    answers, _, _ = undisturbed
    failed = [SCRIPT[index][1] for index, answer in enumerate(answers) if "error" in answer]
    assert failed == ["backward"]
    assert answers[-1]["value"] == {"cur_step": 6, "consumed_train_samples": 0, "gradient_accumulation_steps": 2}
    assert answers[8]["value"]["loss"] > 0
    assert answers[13]["value"]["total_tokens"] == 4 + 4 + 3


@pytest.mark.sample(5)
@pytest.mark.parametrize("cut", [5, 7, 9, 10, 11, 13, 15, 16, 17, 20, 21, 25, 26, 28])
def test_a_restored_model_goes_on_with_the_same_bits(base: Path, tmp_path: Path, undisturbed: Any, cut: int) -> None:
    answers, _, folders = undisturbed
    session = Session(base, tmp_path)
    session.executor.restore(QUEUE, folders[cut])
    rest = [session.do(step, cut + index + 1)[0] for index, step in enumerate(SCRIPT[cut:])]
    assert values(rest) == values(answers[cut:])


def test_a_replay_from_the_first_call_gives_the_same_bits(base: Path, tmp_path: Path, undisturbed: Any) -> None:
    answers, compositions, _ = undisturbed
    session = Session(base, tmp_path)
    session.create()
    again = [
        session.do(step, number + 1, None if used is None else Composition.parse(used.dump()))[0]
        for number, (step, used) in enumerate(zip(SCRIPT, compositions, strict=True))
    ]
    assert values(again) == values(answers)


def test_a_snapshot_of_a_restored_model_is_the_snapshot(base: Path, tmp_path: Path, undisturbed: Any) -> None:
    _, _, folders = undisturbed
    session = Session(base, tmp_path)
    session.executor.restore(QUEUE, folders[16])
    again = session.snapshot()
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in folders[16].iterdir())
    for path in folders[16].glob("native*"):
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_a_patch_of_a_model_is_part_of_its_snapshot(base: Path, tmp_path: Path) -> None:
    train: Step = ("native_pass", "forward_backward", {"inputs": rows(1, 6, 9)})
    session = Session(base, tmp_path)
    session.create()
    plain = session.snapshot()
    session.do(component("apply_patch", "NEFTunePatch", noise_alpha=1.0), 1)
    session.do(component("apply_patch", "NEFTunePatch", noise_alpha=20.0), 2)
    patched = session.snapshot()
    losses = [session.do(train, 3)[0]["value"]["loss"]]
    for folder in (patched, plain):
        session.executor.restore(QUEUE, folder)
        losses.append(session.do(train, 3)[0]["value"]["loss"])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_continues_a_run(base: Path, tmp_path: Path, optimizer: bool) -> None:
    session = Session(base, tmp_path)
    session.create()
    for number, step in enumerate(SCRIPT[:8]):
        session.do(step, number + 1)
    folder = Path(mkdtemp(dir=tmp_path))
    before = session.do(("native", "get_progress", {}), 9)[0]
    saved, row = session.executor.save(QUEUE, Save("x", "weights", native=True, optimizer=optimizer, consumed=5))
    saved.write(folder)
    assert session.do(("native", "get_progress", {}), 9)[0] == before, "a save changes nothing: replays leave it out"
    assert row["rank"] == 4
    continued = [session.do(step, number + 9)[0] for number, step in enumerate(SCRIPT[24:29])]
    other = Session(base, tmp_path)
    other.create()
    for number, step in enumerate(SCRIPT[:4]):
        other.do(step, number + 1)
    progress = other.executor.load(QUEUE, Load("x", "p", optimizer, native=True), folder)
    assert progress["consumed_train_samples"] == 5
    assert progress["cur_step"] == (2 if optimizer else 0)
    rest = [other.do(step, number + 9)[0] for number, step in enumerate(SCRIPT[24:29])]
    same = values(rest[:1]) == values(continued[:1])
    assert same is optimizer or rest[0]["value"]["loss"] == continued[0]["value"]["loss"]
    if optimizer:
        assert values(rest[:3]) == values(continued[:3])
    fresh = Session(base, tmp_path)
    fresh.executor.create(QUEUE, Create(4, 99, source="x", optimizer=optimizer, native=True), folder)
    [spec] = fresh.bench.engine._specs.values()
    assert (spec.alpha, spec.dropout, spec.targets) == (16.0, 0.1, ("all-linear",))


@pytest.mark.parametrize(
    ("method", "name", "options", "message"),
    [
        ("set_loss", "./evil.py:Loss", {}, "unknown loss_fn"),
        ("set_loss", "hf://me/loss", {}, "unknown loss_fn"),
        ("set_optimizer", "torch.optim:AdamW", {}, "must be the name of a component"),
        ("set_optimizer", "hf://me/repo", {}, "must be the name of a component"),
        ("set_optimizer", "AdmW", {}, "did you mean 'AdamW'"),
        ("set_optimizer", "LBFGS", {}, "evaluates the loss inside its step"),
        ("set_optimizer", "AdamW", {"capturable": True, "fused": False}, "cannot make a step"),
        ("set_optimizer", "AdamW", {"params": [{"match": "(a+)+b"}]}, "params cannot be set on a service"),
        ("set_lr_scheduler", "SequentialLR", {"schedulers": [{"scheduler": "os:system"}]}, "must be the name of"),
        ("set_lr_scheduler", "CosineWarmupScheduler", {"num_warmup": 1}, "num_warmup"),
        ("set_template", "Template", {"model_id": "/etc"}, "model_id cannot be set on a service"),
        ("set_template", "Template", {"loss_scale": "os:system"}, "loss_scale cannot be set on a service"),
        ("set_processor", "InputProcessor", {"padding_side": "up"}, "padding_side"),
        ("add_metric", "GRPOMetric", {"top_k_kl": 10**9}, "at most 1000"),
        ("add_metric", "CompletionRewardMetric", {}, "can be used on this service"),
        ("apply_patch", "NoSplitModulesPatch", {}, "can be used on this service: it changes the base model"),
    ],
)
def test_what_a_client_may_not_name_is_refused(
    base: Path, undisturbed: Any, tmp_path: Path, method: str, name: str, options: Any, message: str, shared: Session
) -> None:
    answer, _ = shared.do(component(method, name, **options), 1)
    assert message in answer["error"]["message"]
    answer, _ = shared.do(("native_pass", "forward_backward", {"inputs": rows(1, 6, 9)}), 2)
    assert answer["value"]["loss"] > 0
    assert "value" in shared.do(("native_step", "clip_grad_and_step", {"flush": True}), 3)[0]


@pytest.fixture(scope="module")
def shared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    session = Session(base, tmp_path_factory.mktemp("shared"))
    session.create()
    return session


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name",
    ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"],
)
def test_every_optimizer_that_may_be_named_trains(shared: Session, name: str) -> None:
    assert "value" in shared.do(component("set_optimizer", name, lr=1e-3), 1)[0]
    before = shared.do(("native", "get_state_dict", {}), 2)[0]["value"]
    shared.do(("native_pass", "forward_backward", {"inputs": rows(1, 6, 9)}), 3)
    assert shared.do(("native_step", "clip_grad_and_step", {"flush": True}), 4)[0]["value"] > 0
    after = shared.do(("native", "get_state_dict", {}), 5)[0]["value"]
    assert any(not np.array_equal(before[key], after[key]) for key in before)


def test_native_and_tinker_passes_and_steps_share_turns(base: Path, tmp_path: Path) -> None:
    """One call of the engine computes both; each gets what it gets alone."""
    from server_pool import answer, datum, request

    together, alone = Session(base, tmp_path), Session(base, tmp_path)
    tinker = request([datum(9, 3)])
    native = payload_of("forward_backward", wire.pack({"inputs": rows(1, 6, 9)}))
    step = payload_of("clip_grad_and_step", wire.pack({"flush": False}))
    for session in (together, alone):
        session.create()
        session.do(("native", "clip_grad_norm", {"gradient_accumulation_steps": 1}), 1)
        session.bench.create("t", seed=1)
    runs, steps = spied(together)
    (mine, theirs), _ = together.executor.run([Pass(QUEUE, native, 2, native=True), Pass("t", tinker, 1)])
    together.executor.step([(QUEUE, step), ("t", OptimStep(1e-2))])
    assert (runs, steps) == ([2], [2])
    expected = alone.do(("native_pass", "forward_backward", {"inputs": rows(1, 6, 9)}), 2)[0]["value"]
    [other], _ = alone.executor.run([Pass("t", tinker, 1)])
    alone.do(("native_step", "clip_grad_and_step", {}), 3)
    alone.executor.step([("t", OptimStep(1e-2))])
    assert wire.unpack(mine)["value"]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    np.testing.assert_allclose(answer(theirs)[0][0], answer(other)[0][0], atol=1e-5)
    for name in (QUEUE, "t"):
        for key, value in alone.bench.weights(name).items():
            np.testing.assert_allclose(together.bench.weights(name)[key].numpy(), value.numpy(), atol=1e-5)


def spied(session: Session) -> tuple[list[int], list[int]]:
    """Return lists that the sizes of later calls of the engine are added to."""
    runs, steps = [], []
    run, step = session.bench.engine.run, session.bench.engine.step
    session.bench.engine.run = lambda operations: (runs.append(len(operations)), run(operations))[1]
    session.bench.engine.step = lambda made: (steps.append(len(made)), step(made))[1]
    return runs, steps


def test_a_scheduler_that_ends_too_early_fails_its_own_step_and_nothing_else(shared: Session) -> None:
    shared.do(component("set_optimizer", "SGD", lr=1e-3), 1)
    shared.do(component("set_lr_scheduler", "OneCycleLR", max_lr=0.1, total_steps=2), 2)
    answers = []
    for _ in range(4):
        shared.do(("native_pass", "forward_backward", {"inputs": rows(1, 6)}), 3)
        answers.append(shared.do(("native_step", "clip_grad_and_step", {"flush": True}), 4)[0])
    assert "error" in answers[-1]
    assert answers[-1]["error"]["type"] in ("ValueError", "TrainingStateError")
    assert "value" in shared.do(component("set_optimizer", "SGD", lr=1e-3), 5)[0]


def test_a_loss_that_is_not_finite_changes_nothing(shared: Session) -> None:
    shared.do(component("set_optimizer", "SGD", lr=1e-3), 1)
    row = rows(1, 6)[0] | {"loss_scale": np.full(6, np.nan, np.float32)}
    payload = payload_of("forward_backward", wire.pack({"inputs": [row]}))
    [found], _ = shared.executor.run([Pass(QUEUE, payload, 1, native=True)])
    assert isinstance(found, Exception)
    assert "error" in shared.do(("native_step", "clip_grad_and_step", {}), 2)[0], "nothing is pending"
