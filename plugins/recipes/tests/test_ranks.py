"""The recipe on one and two ranks: the same numbers, stops at the same step, and runs that are killed and go on.

The ranks are forks of one process that has imported everything, with the environment that torchrun would give them.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full
KILLED, STOPPED = -9, 130
LOSS = '''
"""Cross-entropy, and what shall happen during a run: it is read from `event.json`, `[what, number]`."""
import json, os, signal
from pathlib import Path
from twinkle import paths
from twinkle.loss import CrossEntropyLoss

WHAT, NUMBER = json.loads(Path("event.json").read_text())
swap, sync_tree = paths._swap, paths._sync_tree


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def sync_and_kill(folder):
    if WHAT == "save" and f"step-{NUMBER}." in folder.name:
        kill()
    sync_tree(folder)


def swap_and_kill(work, target):
    swap(work, target)
    if WHAT == "pointer" and target.name == f"step-{NUMBER}":
        kill()


paths._sync_tree, paths._swap = sync_and_kill, swap_and_kill

if WHAT == "resave":
    from twinkle.model import TransformersModel
    resume = TransformersModel.resume_from_checkpoint

    def resume_and_save(self, folder, **options):
        progress = resume(self, folder, **options)
        self.save("resaved", output_dir=".", save_optimizer=True)
        return progress

    TransformersModel.resume_from_checkpoint = resume_and_save


class Eventful(CrossEntropyLoss):
    calls = 0

    def __call__(self, inputs, outputs, **kwargs):
        self.calls += 1
        if self.calls == NUMBER and WHAT == "step":
            kill()
        if self.calls == NUMBER and WHAT == "stop" and os.environ.get("RANK", "0") != "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.calls == NUMBER and WHAT == "full":
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        return super().__call__(inputs, outputs, **kwargs)
'''
ZYGOTE = '''
"""Starts ranks by fork: reads `[arguments, ranks]` a line, writes the exit codes of the ranks."""
import json, os, socket, sys
import torch, transformers, peft, datasets, matplotlib.figure, matplotlib.backends.backend_agg, PIL.PngImagePlugin
import twinkle.model, twinkle.dataset, twinkle.dataloader, twinkle_recipes.sft
from twinkle import registry
from twinkle.cli import main

twinkle.model.TransformersModel, twinkle.dataset.Dataset, twinkle.dataloader.DataLoader
torch.set_num_threads(1)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def child(arguments, rank, ranks, port):
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    folder, arguments, ranks = json.loads(line)
    os.chdir(folder)
    port = free_port()
    children = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            child(arguments, rank, ranks, port)
        children.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]), flush=True)
'''


class Zygote:
    """The process that forks ranks."""

    def __init__(self, folder: Path) -> None:
        script = folder / "zygote.py"
        script.write_text(ZYGOTE)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, arguments: list[str], ranks: int) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), arguments, ranks]) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    made = Zygote(tmp_path_factory.mktemp("zygote"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tiny_model(folder / "model")
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(23):
            turns = [("user", f"say {number}"), ("assistant", "ab" * (number % 5 + 1))]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return folder


class House:
    """A folder to run the recipe in."""

    def __init__(self, folder: Path, source: Path, zygote: Zygote) -> None:
        self.folder, self._zygote = folder, zygote
        values = {
            "model": {"id": str(source / "model"), "mixed_precision": "no"},
            "data": {"id": str(source / "rows.jsonl"), "eval_fraction": 0.1},
            "lora": {"rank": 2, "dropout": 0.1},
            "optimizer": {"lr": 0.01},
            "loss": {"name": "./loss.py:Eventful"},
            "batch_size": 4,
            "eval_every": 3,
            "save_every": 2,
            "trackers": ["JsonlTracker"],
        }
        (folder / "sft.yaml").write_text(yaml.safe_dump(values))
        (folder / "loss.py").write_text(LOSS)

    def run(self, *arguments: str, ranks: int = 1, event: tuple[str, int] = ("", 0)) -> list[int]:
        """Run `twinkle run sft` on that many ranks; return their exit codes."""
        (self.folder / "event.json").write_text(json.dumps(event))
        (self.folder / "out.txt").unlink(missing_ok=True)
        return self._zygote.run(self.folder, ["run", "sft", *arguments], ranks)

    def begin(self, name: str, *arguments: str, ranks: int = 1, event: tuple[str, int] = ("", 0)) -> list[int]:
        """Begin a run of this name."""
        return self.run("--config", "sft.yaml", "--name", name, *arguments, ranks=ranks, event=event)

    def found(self, name: str) -> Path:
        """Return the folder of a run; the ranks have made one in all."""
        (folder,) = (self.folder / "runs").glob(f"{name}-*")
        return folder

    @property
    def output(self) -> str:
        return (self.folder / "out.txt").read_text()


@pytest.fixture
def house(tmp_path: Path, source: Path, zygote: Zygote) -> House:
    return House(tmp_path, source, zygote)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines(folder)]


def tensors(folder: Path) -> Mapping[str, Any]:
    from safetensors.numpy import load_file

    found: dict[str, Any] = {}
    for file in ("adapter_model.safetensors", "model.safetensors", "optimizer.safetensors"):
        if (folder / file).is_file():
            found |= {f"{file}/{name}": value for name, value in load_file(folder / file).items()}
    return found


MESHES = {"alone": (1, ()), "dp": (2, ()), "fsdp": (2, ("--mesh.fsdp", "2"))}
TRAINED = {"lora": (), "full": ("--lora", "null")}
# What kills, at which call of the loss (each rank scores its part of each batch, and an evaluation after step 3) or at
# which step's checkpoint: while its files are synced, or when it stands and no pointer names it yet.
KILLS = {"step": ("step", 5), "save": ("save", 4), "pointer": ("pointer", 4)}


@pytest.mark.parametrize(
    ("mesh", "trained", "kills"),
    [
        ("alone", "lora", ("step", "save", "pointer")),
        ("dp", "lora", ("step",)),
        ("fsdp", "full", ("save",)),
        pytest.param("alone", "full", ("step", "save", "pointer"), marks=pytest.mark.soak),
        pytest.param("dp", "lora", ("save", "pointer"), marks=pytest.mark.soak),
        pytest.param("dp", "full", ("step", "save", "pointer"), marks=pytest.mark.soak),
        pytest.param("fsdp", "lora", ("step", "save", "pointer"), marks=pytest.mark.soak),
        pytest.param("fsdp", "full", ("step", "pointer"), marks=pytest.mark.soak),
    ],
)
def test_a_killed_run_goes_on_in_the_same_numbers(house: House, mesh: str, trained: str, kills: tuple[str]) -> None:
    ranks, options = MESHES[mesh]
    options = (*options, *TRAINED[trained])
    assert house.begin("whole", *options, ranks=ranks) == [0] * ranks, house.output
    whole = house.found("whole")
    assert [line["step"] for line in lines(whole)] == [1, 2, 3, 4, 5, 6]
    for name in kills:
        codes = house.begin(name, *options, ranks=ranks, event=KILLS[name])
        assert codes[0] == KILLED, house.output
        folder = house.found(name)
        assert (folder / "checkpoints" / "last").read_text() == "step-3\n"
        assert (folder / "checkpoints" / "step-3" / "trainer_state.json").is_file()
        assert house.run("--resume_from", f"runs/{folder.name}", ranks=ranks) == [0] * ranks, house.output
        assert timeless(folder) == timeless(whole)
        assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
        result = "model" if trained == "full" else "adapter"
        assert_equal(tensors(whole / result), tensors(folder / result))


def assert_equal(ones: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    assert ones.keys() == others.keys()
    assert all((ones[name] == others[name]).all() for name in ones)


def test_two_ranks_make_the_numbers_of_one(house: House) -> None:
    plain = ("--lora.dropout", "0")
    assert house.begin("one", *plain) == [0], house.output
    assert house.begin("two", *plain, "--questions", "say 1", ranks=2) == [0, 0], house.output
    assert house.output.count("step 6/6") == 1
    assert house.output.count("question: say 1") == 1
    for one, two in zip(lines(house.found("one")), lines(house.found("two")), strict=True):
        assert {name: two[name] for name in ("step", "tokens", "total_tokens")} == {
            name: one[name] for name in ("step", "tokens", "total_tokens")
        }
        for name in ("loss", "grad_norm", *(name for name in one if name == "eval/loss")):
            assert two[name] == pytest.approx(one[name], rel=1e-4)


def test_a_run_goes_on_with_another_number_of_ranks_from_the_same_state(house: House) -> None:
    for name, first, second in (("up", 1, 2), ("down", 2, 1)):
        assert house.begin(name, "--save_every", "3", ranks=first, event=("step", 5))[0] == KILLED
        folder = house.found(name)
        kept = folder / "checkpoints" / "step-3"
        before = tensors(kept)
        # Saved again before any step, by that other number of ranks: the same weights and moments.
        fsdp = ("--mesh.fsdp", "2") if second == 2 else ()
        place = f"runs/{folder.name}"
        assert house.run("--resume_from", place, *fsdp, ranks=second, event=("resave", 3)) == [0] * second, house.output
        assert_equal(before, tensors(house.folder / "resaved"))
        assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4, 5, 6]
        shutil.rmtree(house.folder / "resaved")


def test_a_stop_asked_of_one_rank_stops_all_at_the_same_step(house: House) -> None:
    assert house.begin("stopped", ranks=2, event=("stop", 2)) == [STOPPED, STOPPED], house.output
    folder = house.found("stopped")
    assert [line["step"] for line in lines(folder)] == [1, 2]
    assert (folder / "checkpoints" / "last").read_text() == "step-2\n"
    assert f"--nproc 2 --resume_from runs/{folder.name}\n" in house.output
    assert house.run("--resume_from", f"runs/{folder.name}", ranks=2) == [0, 0], house.output
    assert len(lines(folder)) == 6


def test_a_full_disk_stops_the_run_and_costs_no_checkpoint(house: House) -> None:
    for name, ranks in (("one", 1), ("two", 2)):
        codes = house.begin(name, ranks=ranks, event=("full", 3))
        assert codes == [2] * ranks, house.output
        assert "File too large; nothing of it is left, and what stood there before still stands" in house.output
        folder = house.found(name)
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["last", "step-2"]
        assert not list(folder.glob(".*"))
        assert house.run("--resume_from", f"runs/{folder.name}", ranks=ranks) == [0] * ranks, house.output


def test_a_run_that_is_refused_on_ranks_leaves_no_folder(house: House) -> None:
    codes = house.begin("wrong", "--loss.name", "CrossEntropyLos", ranks=2)
    assert codes == [2, 2]
    assert "Error [rank 1]: loss 'CrossEntropyLos'" in house.output
    assert list((house.folder / "runs").iterdir()) == []
    assert house.begin("wrong", "--mesh.dp", "3", ranks=2) == [2, 2]
    assert "torchrun has started 2 processes" in house.output


def test_torchrun_itself_starts_the_ranks(house: House) -> None:
    (house.folder / "event.json").write_text('["", 0]')
    command = [sys.executable, "-m", "twinkle.cli", "run", "sft", "--config", "sft.yaml", "--nproc", "2"]
    done = subprocess.run(
        [*command, "--name", "real", "--max_steps", "2"],
        cwd=house.folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines(house.found("real"))] == [1, 2]
