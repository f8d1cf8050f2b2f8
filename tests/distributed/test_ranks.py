"""What several ranks do together: clipping, metrics, options, checkpoints, and what happens when they part."""

import json
import os
import runpy
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import command, torchrun
from safetensors.torch import load_file

from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

WORKER = Path(__file__).with_name("two_ranks_worker.py")
COMPARISONS = runpy.run_path(str(Path(__file__).with_name("comparisons.py")))
WAYS = ("DDP", "FSDP2")
KINDS = ("LoRA", "full")
CLIP = 0.05
_CLOCKS = ("total time elapse", "speed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model")
    return folder


def run(folder: Path, names: str, ranks: int) -> dict[str, list[Any]]:
    """Run scenarios and return what each rank saw."""
    done = torchrun(WORKER, names, folder, ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: [json.loads((folder / f"{name}-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
        for name in names.split(",")
    }


class Two(dict[str, list[Any]]):
    """What two ranks saw, by scenario; scenarios of one line run when the first of them is asked for."""

    TOGETHER = (
        "norms,comparison",
        "unfinished,no_rows,nonfinite,apart,losses,parts,options,precision,checkpoints,dropout,fast_paths",
    )

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> list[Any]:
        (names,) = (names for names in self.TOGETHER if name in names.split(","))
        self.update(run(self._folder, names, 2))
        return self[name]


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[Any]]:
    return Two(folder)


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, list[Any]]:
    return run(folder, "norms", 4)


def flat(weights: dict[str, list[float]]) -> torch.Tensor:
    return torch.cat([torch.tensor(weights[name], dtype=torch.float64) for name in sorted(weights)])


def distance(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    """Return the norm of the difference over the norm."""
    return float((flat(ours) - flat(theirs)).norm() / flat(theirs).norm())


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, tuple[float, dict[str, list[float]], float]]:
    """The true norm, the clipped update of SGD with lr 8, and the loss: plain torch in float64, all rows."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("grid_worker", WORKER.with_name("grid_worker.py"))
    assert spec is not None
    assert spec.loader is not None
    grid = module_from_spec(spec)
    spec.loader.exec_module(grid)
    found = {}
    for kind in KINDS:
        grads, loss = grid.reference_with_loss(str(folder / "model"), kind == "LoRA", by_row=False)
        norm = sum(float(grad.square().sum()) for grad in grads.values()) ** 0.5
        scale = 8.0 * min(1.0, CLIP / norm)
        found[kind] = norm, {name: (grad * scale).flatten().tolist() for name, grad in grads.items()}, loss
    return found


@pytest.mark.full
def test_an_optimizer_over_some_parameters_finds_their_shards(folder: Path, two: dict[str, list[Any]]) -> None:
    plain, sharded = (two["parts"][0][way] for way in WAYS)
    assert plain["left"] == sharded["left"] == []
    assert distance(sharded["weights"], plain["weights"]) < 1e-6
    before = {
        name: value.double().flatten().tolist() for name, value in load_file(folder / "model/model.safetensors").items()
    }
    changed = {name for name, value in before.items() if value != sharded["weights"][name]}
    assert changed == {"model.embed_tokens.weight"}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "way"), [(2, "DDP"), (2, "FSDP2"), (4, "DDP"), (4, "FSDP2"), (4, "HSDP")])
def test_clipping_uses_the_true_global_norm(
    ranks: int, way: str, kind: str, two: dict[str, Any], four: dict[str, Any], alone: dict[str, Any]
) -> None:
    norm, update, loss = alone[kind]
    for seen in (two if ranks == 2 else four)["norms"]:
        mine = seen[f"{way} {kind}"]
        assert mine["norm"] == pytest.approx(norm, rel=1e-5)
        renamed = {name.replace(".default", ""): values for name, values in mine["update"].items()}
        assert distance(renamed, update) < 5e-6
        assert mine["metrics"]["grad_norm"] == mine["norm"]
        assert mine["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_metrics_are_the_same_numbers_on_every_rank(two: dict[str, list[Any]]) -> None:
    first, second = two["norms"]
    for cell, seen in first.items():
        for name in ("loss", "accuracy", "correct_tokens", "total_tokens", "learning rate"):
            assert seen["metrics"][name] == second[cell]["metrics"][name], (cell, name)
        assert seen["metrics"]["total_tokens"] == 83


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "option",
    ["loaded by the first rank", "cpu_offload", "kept after the forward", "other blocks", "recomputed", "native_fsdp"],
)
def test_options_of_fsdp_change_no_number(option: str, kind: str, two: dict[str, list[Any]]) -> None:
    for seen in two["options"]:
        assert seen[f"{option}, {kind}"] == seen[f"plain, {kind}"]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_learns_alike_on_both_ways(dtype: str, two: dict[str, list[Any]]) -> None:
    for seen in two["precision"]:
        for way in WAYS:
            losses = seen[f"{way} {dtype}"]
            assert losses[0] >= losses[1] >= losses[2]
            assert losses[0] > losses[2]
        assert seen[f"DDP {dtype}"][0] == pytest.approx(seen[f"FSDP2 {dtype}"][0], rel=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_model_goes_on_bit_for_bit(way: str, kind: str, two: dict[str, list[Any]]) -> None:
    for seen in two["checkpoints"]:
        assert seen[f"{way} {kind}"]["resumed"] == seen[f"{way} {kind}"]["went on"]
        assert seen[f"{way} {kind}"]["cur_step"] == 2


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_two_ranks_is_the_same_on_one(
    way: str, kind: str, folder: Path, two: dict[str, list[Any]], one_again: dict[str, Any]
) -> None:
    saved, again = folder / "saved" / f"{way}-{kind}", folder / "saved" / f"again-{way}-{kind}"
    assert one_again[f"{way} {kind}"] == two["checkpoints"][0][f"{way} {kind} at the checkpoint"]
    before, after = load_file(saved / "optimizer.safetensors"), load_file(again / "optimizer.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def one_again(folder: Path, two: dict[str, list[Any]]) -> dict[str, Any]:
    """The checkpoints of two ranks, resumed on one and saved again."""
    assert two["checkpoints"]  # writes them
    seen: dict[str, Any] = run(folder, "resumed", 1)["resumed"][0]
    return seen


@pytest.mark.full
@pytest.mark.soak
def test_every_optimizer_trains_and_resumes_alike_on_both_ways(folder: Path) -> None:
    first, second = run(folder, "optimizers", 2)["optimizers"]
    assert first == second
    refused = {name: seen.pop("refused") for name, seen in list(first.items()) if "refused" in seen}
    assert list(refused) == ["Adafactor FSDP2", "Rprop FSDP2"]
    assert all("Unsupported: set_optimizer('" in text for text in refused.values())
    for name, seen in first.items():
        if name in refused:
            continue
        assert seen["resumed"] == seen["went on"], name
        if not name.startswith("Muon"):  # its iteration runs in bfloat16 on each shard
            whole = first[name.replace("FSDP2", "DDP")]
            assert distance(seen["went on"], whole["went on"]) < 1e-6, name


@pytest.mark.full
def test_a_sharded_checkpoint_is_a_folder_that_transformers_reads(folder: Path, two: dict[str, list[Any]]) -> None:
    from transformers import AutoModelForCausalLM

    wanted = two["checkpoints"][0]["FSDP2 full at the checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(folder / "saved" / "FSDP2-full", dtype=torch.float32)
    found = dict(model.named_parameters())
    assert {name: found[name].double().flatten().tolist() for name in wanted} == wanted


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_a_step_saved_half_way_goes_on(way: str, two: dict[str, list[Any]]) -> None:
    for seen in two["unfinished"]:
        went_on, resumed = seen[way]
        assert distance(resumed, went_on) < 1e-5  # AdamW's first step magnifies the rounding of sums in another order


@pytest.mark.full
def test_a_rank_without_rows_leaves_the_step_to_the_others(folder: Path, two: dict[str, list[Any]]) -> None:
    first, second = two["no_rows"]
    for way in WAYS:
        assert first[way]["weights"] == second[way]["weights"]
        assert first[way]["eval"]["loss"] == second[way]["eval"]["loss"] > 0
    assert distance(first["DDP"]["weights"], first["FSDP2"]["weights"]) < 1e-6


@pytest.mark.full
def test_a_loss_that_is_nan_on_one_rank_is_left_out_and_counted_once(two: dict[str, list[Any]]) -> None:
    for seen in two["nonfinite"]:
        for way in WAYS:
            assert seen[way]["nonfinite_skipped"] == 1
            assert seen[way]["loss"] == pytest.approx(5.6, abs=0.1)


@pytest.mark.full
def test_a_step_of_each_loss_is_that_of_one_process_with_all_rows(
    folder: Path, two: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(WORKER.parent))
    from loss_steps import CASES, LOSSES, loss_step

    alone = {loss: loss_step(folder, None, slice(None), loss) for loss in LOSSES}
    for way, loss in CASES:
        whole, cell = alone[loss], f"{way} {loss}"
        for seen in two["losses"]:
            assert distance(seen[cell]["update"], whole["update"]) < 5e-6, cell
            wanted = {name: value for name, value in whole["metrics"].items() if name not in _CLOCKS}
            found = {name: seen[cell]["metrics"][name] for name in wanted}
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7), cell


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_dropout_differs_between_ranks_and_between_passes(way: str, two: dict[str, list[Any]]) -> None:
    first, second = (seen[way] for seen in two["dropout"])
    assert len({tuple(passed) for passed in (*first, *second)}) == 4


@pytest.mark.full
def test_ranks_that_share_a_model_share_prefixes_and_what_was_measured_before(two: dict[str, list[Any]]) -> None:
    first, second = two["fast_paths"]
    assert first["paths"] == first["same"] == second["same"] == {"packing": True, "prefixes": True}
    assert first["shared"] == second["shared"] == [False, True]
    assert first["norms"] == second["norms"]
    # Float32 sums in another order; prefixes that were computed wrongly would change the norm by a tenth and more.
    assert first["norms"][1] == pytest.approx(first["norms"][0], rel=1e-5)


@pytest.mark.full
def test_ranks_at_different_calls_are_told_who_is_where(two: dict[str, list[Any]]) -> None:
    for seen in two["apart"]:
        assert "the ranks are not at the same call: rank 0 at 'save to" in seen["message"]
        assert "rank 1 at \"step 1 of adapter 'default'\"" in seen["message"]


@pytest.mark.full
def test_unequal_numbers_of_steps_end_with_a_message(folder: Path, two: dict[str, list[Any]]) -> None:
    done = torchrun(WORKER, "unequal", folder, ranks=2)
    assert done.returncode != 0
    assert "RankError: step 2 of adapter 'default': another rank has left or failed" in done.stderr
    assert "the ranks made unequal numbers of calls, for example of steps" in done.stderr


@pytest.mark.full
def test_a_rank_that_is_killed_stops_the_others(folder: Path) -> None:
    with subprocess.Popen(
        command(WORKER, "killed", folder, ranks=2),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 400  # a busy machine needs minutes to start two ranks
            while not (folder / "pid-1").exists():
                assert time.monotonic() < deadline, "the ranks did not start"
                time.sleep(0.05)
            os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
            _, text = process.communicate(timeout=120)
        finally:
            process.terminate()  # torchrun ends its ranks
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in text


@pytest.mark.full
def test_several_processes_without_initialize_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle.errors import MeshError

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match="2 processes run, but they do not know of each other"):
        TransformersModel(model_id=str(folder / "model"))


def test_a_contrastive_loss_and_its_gradients_are_those_of_one_process(two: dict[str, list[Any]]) -> None:
    whole = COMPARISONS["contrast"](slice(0, len(COMPARISONS["LABELS"])))
    ours = [rank["contrast"] for rank in two["comparison"]]
    assert sum(rank["loss"] for rank in ours) == pytest.approx(whole["loss"], rel=1e-12)
    assert [rank["anchors"] for rank in ours] == [1, 2]
    grad = torch.tensor(ours[0]["grad"] + ours[1]["grad"], dtype=torch.float64)
    torch.testing.assert_close(grad, torch.tensor(whole["grad"], dtype=torch.float64))


def test_metrics_are_sums_over_sums_on_every_rank(two: dict[str, list[Any]]) -> None:
    whole = COMPARISONS["measure"](list(COMPARISONS["SHARES"]))
    assert whole["loss"] == (3 + 9) / (3 + 6)
    assert whole["accuracy"] == 5 / 7
    for rank in two["comparison"]:
        assert rank["metrics"] == pytest.approx(whole)


def test_a_rank_that_saw_nothing_gets_the_others_numbers(two: dict[str, list[Any]]) -> None:
    alone = COMPARISONS["measure"]([COMPARISONS["SHARES"][1]])
    for rank in two["comparison"]:
        assert rank["one rank saw rows"] == pytest.approx(alone)
