"""Templates, data sets, loaders, hubs and runtimes: each check catches what is broken in that way."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from broken import Broken, after, broken, changed

from twinkle.dataloader import DataLoader
from twinkle.dataset import IterableDataset
from twinkle.errors import DataError
from twinkle.hub import Hub
from twinkle.runtime.process import LocalRuntime
from twinkle.template import Template

ROWS = [{"number": number} for number in range(5)]
counter = itertools.count()


class Listed:
    """Rows of a list."""

    def __getitem__(self, idx: Any) -> Any:
        return ROWS[idx]

    def __len__(self) -> int:
        return len(ROWS)


class Shelf(Hub):
    """One model and one data set."""

    def download_model(self, reference: str, **kwargs: Any) -> Path:
        if not reference.endswith("/this"):
            raise DataError(f"there is no {reference}")
        return Path(__file__)

    def load_dataset(self, reference: str, subset_name: str = "default", split: str = "train", **kwargs: Any) -> Any:
        if not reference.endswith("/this"):
            raise DataError(f"there is no {reference}")
        if set(kwargs) - {"only"}:
            raise TypeError(f"unknown {', '.join(kwargs)}")
        return [dict(row) for row in ROWS]


def beyond(self: Any, idx: int) -> Any:
    """Begin again at the end."""
    return ROWS[idx % len(ROWS)]


def other_each_time(self: Any, idx: int) -> Any:
    """Number the calls."""
    return {**ROWS[idx], "call": next(counter)}


def other_stream(self: Any, worker: int = 0, workers: int = 1) -> Any:
    """Give rows that depend on the time of reading."""
    yield [{"number": next(counter)}]


def all_for_each(self: Any, worker: int = 0, workers: int = 1) -> Any:
    """Give every worker all rows."""
    yield from IterableDataset.chunks(self, 0, 1)


def cut_off(self: Any) -> Any:
    """Leave the last row out."""
    for batch in DataLoader.__iter__(self):
        yield batch[:-1] if len(batch) < 4 else batch


def drawn(self: Any) -> Any:
    """Draw the order from torch's generator."""
    import torch

    batches = list(DataLoader.__iter__(self))
    return iter([batches[at] for at in torch.randperm(len(batches)).tolist()])


def rounded(self: Any) -> dict[str, int]:
    """Count whole batches."""
    found: int = DataLoader.get_state(self)["consumed_train_samples"]
    return {"consumed_train_samples": -(-found // 4) * 4}


def shifted(row: Any) -> Any:
    return {**row, "labels": [-100, *row["labels"][:-1]]}


def everything(row: Any) -> Any:
    return {**row, "labels": [*row["input_ids"][1:], -100]}


def emptying(self: Any, trajectory: Any, **kwargs: Any) -> Any:
    """Empty the conversation."""
    row = Template.encode(self, {**trajectory, "messages": list(trajectory["messages"])}, **kwargs)
    trajectory["messages"].clear()
    return row


def lenient(self: Any, trajectory: Any, **kwargs: Any) -> Any:
    """Encode anything."""
    try:
        return Template.encode(self, trajectory, **kwargs)
    except ValueError:
        return {"input_ids": [], "labels": []}


def deaf(self: Any, trajectory: Any, **kwargs: Any) -> Any:
    """Do not hear of `loss`."""
    kept = [{k: v for k, v in message.items() if k != "loss"} for message in trajectory["messages"]]
    return Template.encode(self, {**trajectory, "messages": kept}, **kwargs)


def trained_prompt(self: Any, trajectory: Any, **kwargs: Any) -> Any:
    """Train prompts too."""
    row = Template.encode(self, trajectory, **kwargs)
    return everything(row) if kwargs.get("add_generation_prompt") else row


def untrained(self: Any, prompt_input_feature: Any, new_tokens: Any) -> Any:
    """Train none of the new tokens."""
    row = Template.concat_input_feature(self, prompt_input_feature, new_tokens)
    return {**row, "labels": [-100] * len(row["labels"])}


def any_mesh(self: Any, options: Any) -> None:
    """Take any mesh."""
    self.options, self.mesh = options, options.global_device_mesh


def only_once(self: Any) -> None:
    """Forget what was never there."""
    del self.mesh


def without_options(self: Any, options: Any) -> None:
    """Forget the options."""
    LocalRuntime.initialize(self, options)
    self.options = None


def unseeded(self: Any, options: Any) -> None:
    """Seed with the time."""
    LocalRuntime.initialize(self, options)
    random.seed(next(counter))


class Other:
    """Not what was asked for."""

    number, name = 0, ""


def eats(self: Any, reference: str, only: Any = None, **kwargs: Any) -> Any:
    """Change the options."""
    only.clear()
    return [dict(row) for row in ROWS]


def changing_set(self: Any, reference: str, **kwargs: Any) -> Any:
    """Give other rows each time."""
    return [{"number": next(counter)}]


def unnamed(self: Any, reference: str, **kwargs: Any) -> Any:
    """Say nothing of what was asked."""
    raise DataError("not found")


def dataset(**members: Any) -> Broken:
    made = changed(Listed, **members)
    return broken(made, make=made)


def stream(**members: Any) -> Broken:
    from twinkle.dataset import DatasetMeta

    made = changed(IterableDataset, **members)
    return broken(made, make=lambda: made(DatasetMeta(data=ROWS)), rows=ROWS)


def template(change: Any) -> Broken:
    return broken(after(Template, change, "encode"))


KNOWN = {"model": "shelf://my/this", "dataset": "shelf://my/this"}
unpicklable = {"__getstate__": lambda self: {"held": lambda: 1}}
GOOD: dict[str, tuple[Broken, set[str]]] = {
    "template": (broken(Template), set()),
    "dataset": (broken(Listed, rows=ROWS), {"stream_repeats", "stream_divides"}),
    "dataloader": (broken(DataLoader), set()),
    "hub": (broken(Shelf, **KNOWN), set()),
    "runtime": (broken(LocalRuntime), set()),
}
BROKEN: dict[tuple[str, str], Broken] = {
    ("template", "row_form"): template(lambda row: {**row, "attention_mask": row["attention_mask"][1:]}),
    ("template", "labels_are_next_tokens"): template(shifted),
    ("template", "only_assistant_trained"): template(everything),
    ("template", "text_comes_back"): broken(after(Template, lambda text: text[:20], "decode")),
    ("template", "prompt"): broken(changed(Template, encode=trained_prompt)),
    ("template", "untrained_turns"): broken(changed(Template, encode=deaf)),
    ("template", "batches"): broken(
        after(Template, lambda rows: rows[::-1] if isinstance(rows, list) else rows, "batch_encode")
    ),
    ("template", "rides_along"): template(lambda row: {k: v for k, v in row.items() if k != "user_data"}),
    ("template", "joined"): broken(changed(Template, concat_input_feature=untrained)),
    ("template", "trajectory_left_alone"): broken(changed(Template, encode=emptying)),
    ("template", "bad_rows_refused"): broken(changed(Template, encode=lenient)),
    ("template", "pickle"): broken(changed(Template, **unpicklable)),
    ("dataset", "rows_by_number"): broken(changed(Listed, __len__=lambda self: 4), rows=ROWS),
    ("dataset", "ends"): dataset(__getitem__=beyond),
    ("dataset", "same_again"): dataset(__getitem__=other_each_time),
    ("dataset", "iterates"): dataset(__iter__=lambda self: iter(ROWS[1:])),
    ("dataset", "stream_repeats"): stream(chunks=other_stream),
    ("dataset", "stream_divides"): stream(chunks=all_for_each),
    ("dataloader", "every_row_once"): broken(changed(DataLoader, __iter__=cut_off)),
    ("dataloader", "length"): broken(changed(DataLoader, __len__=lambda self: 2)),
    ("dataloader", "repeatable"): broken(changed(DataLoader, __iter__=drawn)),
    ("dataloader", "resumed"): broken(changed(DataLoader, get_state=rounded)),
    ("dataloader", "counts_rows"): broken(changed(DataLoader, get_state=rounded)),
    ("hub", "dataset_rows"): broken(changed(Shelf, load_dataset=changing_set), **KNOWN),
    ("hub", "model_files"): broken(changed(Shelf, download_model=lambda self, reference: "nowhere"), **KNOWN),
    ("hub", "unknown_reference"): broken(changed(Shelf, load_dataset=unnamed), **KNOWN),
    ("hub", "unknown_keyword"): broken(changed(Shelf, load_dataset=changing_set), **KNOWN),
    ("hub", "options_left_alone"): broken(changed(Shelf, load_dataset=eats), **KNOWN, options={"only": [1]}),
    ("runtime", "begins_and_ends"): broken(changed(LocalRuntime, shutdown=only_once)),
    ("runtime", "keeps_options"): broken(changed(LocalRuntime, initialize=without_options)),
    ("runtime", "mesh_checked"): broken(changed(LocalRuntime, initialize=any_mesh)),
    ("runtime", "builds"): broken(changed(LocalRuntime, construct=lambda self, cls, args, kwargs: Other())),
    ("runtime", "placement"): broken(changed(LocalRuntime, placement=lambda self, groups=(): "")),
    ("runtime", "seeds"): broken(changed(LocalRuntime, initialize=unseeded)),
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_one_passes(kind: str, passes: Any) -> None:
    (component, example), skipped = GOOD[kind]
    passes(kind, component, skipped, **example)


@pytest.mark.parametrize(("kind", "check"), BROKEN)
def test_a_broken_one_is_caught(kind: str, check: str, catches: Any) -> None:
    component, example = BROKEN[kind, check]
    catches(kind, check, component, **example)


@pytest.mark.parametrize("kind", GOOD)
def test_every_check_has_a_component_that_breaks_it(kind: str, own_checks: Any) -> None:
    assert {check for of, check in BROKEN if of == kind} == own_checks(kind)
