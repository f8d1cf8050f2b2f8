"""Contract checks of models: updates independent of micro-batches, saved state, no ignored arguments."""

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.data_format import LossOutput
from twinkle.metric import Metric
from twinkle_testing.contracts.case import Case, Violation, refusal, require
from twinkle_testing.contracts.values import is_plain_number, left_alone, same, shown

if TYPE_CHECKING:
    from torch import Tensor

_IGNORED = -100
_TOLERANCE = 1e-6  # for float32 sums in different order


def token_nll(inputs: Any, outputs: Any) -> LossOutput:
    """Return the negative log-likelihood of the trained tokens."""
    chosen = outputs["logps"][inputs["labels"].to(outputs["logps"].device) != _IGNORED]
    return LossOutput(-chosen.sum(), chosen.numel())


class Tokens(Metric):
    """Counts trained tokens."""

    total = 0

    def accumulate(self, inputs: Any, outputs: Any, **kwargs: Any) -> None:
        """Add the labels of a call."""
        self.total += int((inputs["labels"] != _IGNORED).sum())

    def calculate(self) -> dict[str, float]:
        """Return the count, and reset it."""
        total = self.total
        self.reset()
        return {"trained_tokens": total}

    def reset(self) -> None:
        """Reset the count."""
        self.total = 0


@dataclass(kw_only=True)
class ModelCase(Case):
    """A model backend; without `model_id` among its arguments it gets a tiny random Llama.

    Attributes:
        prepare: called with each new model, for example to add an adapter.
        adapter: the adapter that every call names, for a model whose methods require one.
        lr: the learning rate of the updates that are compared.
        precision: tolerance for updates, relative and absolute.
    """

    kind = "model"

    prepare: Callable[[Any], None] | None = None
    adapter: str = ""
    lr: float = 1.0
    precision: float = _TOLERANCE

    @cached_property
    def tiny(self) -> Path:
        """The folder of the tiny model."""
        from twinkle.hub.quiet import quiet_transformers
        from twinkle_testing.models import tiny_model

        with quiet_transformers():
            return tiny_model(self.folder / "tiny")

    def build(self, **more: Any) -> Any:
        """Return the model."""
        if self.is_class and "model_id" not in self.kwargs and "model_id" in _parameters(self.component):
            plain = {"mixed_precision": "no"} if "mixed_precision" in _parameters(self.component) else {}
            return super().build(**{"model_id": str(self.tiny), **plain, **more})
        return super().build(**more)

    def ready(self, **options: Any) -> Any:
        """Return a model that can train: loss, plain SGD."""
        import torch

        model = self.build()
        if self.prepare is not None:
            self.prepare(model)
        if self.adapter:
            model = _OneAdapter(model, self.adapter)
        model.set_loss(token_nll)
        model.set_optimizer(torch.optim.SGD, **{"lr": self.lr, "weight_decay": 0.0, **options})
        return model


class _OneAdapter:
    """A model whose methods are called with `adapter_name` everywhere."""

    def __init__(self, model: Any, adapter: str) -> None:
        self._model, self._adapter = model, adapter

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        taken = "adapter_name" in _parameters(found) if callable(found) else False
        return partial(found, adapter_name=self._adapter) if taken else found


def rows() -> list[dict[str, Any]]:
    """Return four encoded rows of uneven length, with labels on a part of each."""
    made = []
    for number, length in enumerate((9, 4, 13, 6)):
        ids = [(37 * number + 11 * place) % 250 for place in range(length)]
        labels = [_IGNORED if place < number else ids[place + 1] for place in range(length - 1)]
        made.append({"input_ids": ids, "labels": [*labels, _IGNORED]})
    return made


def update(
    case: ModelCase, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]], *, clip: bool = False
) -> dict[str, Any]:
    """Return the parameters after one step over the given backward calls."""
    model, options = case.ready(), {"gradient_accumulation_steps": len(calls)}
    for given, extra in calls:
        model.forward_backward(inputs=[dict(row) for row in given], **extra)
        if clip:
            model.clip_grad_norm(max_grad_norm=1e9, **options)
        model.step(**options)
        model.zero_grad(**options)
    return parameters(model)


def parameters(model: Any) -> dict[str, "Tensor"]:
    """Return copies of the trainable parameters."""
    found = model.get_state_dict()
    require(
        isinstance(found, Mapping) and found, f"get_state_dict() gave {shown(found)}; return the trainable parameters"
    )
    return {name: value.detach().clone() for name, value in found.items()}


def differs(one: Mapping[str, Any], two: Mapping[str, Any]) -> float:
    """Return the largest distance between two sets of parameters."""
    require(one.keys() == two.keys(), "get_state_dict() returned different names than before")
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def forward_form(case: ModelCase) -> None:
    """`forward_only` returns float32 `logps` `[B, T]` of the labels without a graph, 0 at untrained positions."""
    import torch

    model = case.ready()
    outputs = model.forward_only(inputs=rows())
    logps, longest = outputs.get("logps"), max(len(row["input_ids"]) for row in rows())
    fine = isinstance(logps, torch.Tensor) and logps.shape[0] == len(rows()) and logps.shape[1] >= longest
    require(fine, f"logps is {shown(getattr(logps, 'shape', logps))}; it must be [{len(rows())}, {longest}]")
    require(logps.dtype == torch.float32 and not logps.requires_grad, f"logps is {logps.dtype}, or has a graph")
    for number, row in enumerate(rows()):
        for place, label in enumerate(row["labels"]):
            value = float(logps[number, place])
            trained = label != _IGNORED
            require(value < 0 if trained else value == 0, f"logps[{number}, {place}] is {value} at the label {label}")


def forward_repeats(case: ModelCase) -> None:
    """Two evaluations are equal, and the result of a row does not depend on other rows."""
    model = case.ready()
    whole, again = (model.forward_only(inputs=rows())["logps"] for _ in range(2))
    require(same(whole, again), "two calls of forward_only() differ")
    for number, row in enumerate(rows()):
        alone = model.forward_only(inputs=[row])["logps"][0, : len(row["labels"])]
        beside = whole[number, : len(row["labels"])]
        require(same(alone, beside, tolerance=1e-4), f"row {number} alone has other logps than among others")


def steps_by_hand(case: ModelCase) -> None:
    """`forward`, `calculate_loss` and `backward` produce the loss and the update of `forward_backward`."""
    expected = update(case, [(rows(), {})])
    model = case.ready()
    model.forward(inputs=rows())
    loss = model.calculate_loss()
    model.backward()
    model.step()
    require(isinstance(loss, float) and math.isfinite(loss), f"calculate_loss() gave {shown(loss)}; return a float")
    far = differs(parameters(model), expected)
    require(far <= case.precision, f"by hand the update differs by {far:.3g} from forward_backward()'s")


def micro_batches(case: ModelCase) -> None:
    """The update of a step does not depend on `micro_batch_size`, with rows of uneven length."""
    expected = update(case, [(rows(), {})])
    for size in (1, 3):
        far = differs(update(case, [(rows(), {"micro_batch_size": size})]), expected)
        require(far <= case.precision, f"with micro_batch_size={size} the update differs by {far:.3g}")


def accumulation(case: ModelCase) -> None:
    """Two accumulated backward passes with uneven parts equal the update of all rows at once."""
    expected = update(case, [(rows(), {})])
    for cut in (1, 2):
        far = differs(update(case, [(rows()[:cut], {}), (rows()[cut:], {})]), expected)
        require(
            far <= case.precision, f"over parts of {cut} and {len(rows()) - cut} rows the update differs by {far:.3g}"
        )


def acts_at_k(case: ModelCase) -> None:
    """With `gradient_accumulation_steps=2` updates occur at backward 2 and 4, not 1 and 3; `flush` makes the last."""
    model, options = case.ready(), {"gradient_accumulation_steps": 2}
    before = parameters(model)
    for number in range(1, 5):
        model.forward_backward(inputs=rows()[:2])
        model.clip_grad_and_step(max_grad_norm=1e9, **options)
        after = parameters(model)
        moved = differs(before, after) > 0
        require(
            moved == (number % 2 == 0),
            f"at backward {number} the parameters {'changed' if moved else 'did not change'}",
        )
        before = after
    model.forward_backward(inputs=rows()[:2])
    model.clip_grad_and_step(max_grad_norm=1e9, flush=True, **options)
    require(differs(before, parameters(model)) > 0, "flush=True did not make the step of an unfinished tail")


def clipping(case: ModelCase) -> None:
    """`clip_grad_norm` returns the norm before clipping, for any split; an unreached bound changes nothing."""
    free, bounded = (update(case, [(rows(), {})], clip=clip) for clip in (False, True))
    far = differs(free, bounded)
    require(
        far <= case.precision, f"clipping at 1e9 changes the update by {far:.3g}; divide whether or not it is clipped"
    )
    norms = []
    for options in ({}, {"micro_batch_size": 1}):
        model = case.ready()
        before = parameters(model)
        model.forward_backward(inputs=rows(), **options)
        norms.append(model.clip_grad_norm(max_grad_norm=1e-3))
        model.step()
        moved = math.sqrt(
            sum(float((value - before[name]).double().square().sum()) for name, value in parameters(model).items())
        )
        wanted = case.lr * min(1e-3, norms[-1])
        close = math.isclose(moved, wanted, rel_tol=0.05, abs_tol=1e-6)
        require(
            close,
            f"clipped at 0.001 the parameters moved by {moved:.6g}; with a rate of {case.lr} that is {wanted:.6g}",
        )
    require(isinstance(norms[0], float), f"clip_grad_norm() gave {shown(norms[0])}; return a float")
    close = math.isclose(norms[0], norms[1], rel_tol=1e-4)
    require(close, f"the norm is {norms[0]:.6g} at once and {norms[1]:.6g} in micro-batches")


def zero_grad(case: ModelCase) -> None:
    """`zero_grad` clears the gradients and their denominators."""
    expected = update(case, [(rows()[:2], {})])
    model = case.ready()
    model.forward_backward(inputs=rows()[2:])
    model.zero_grad()
    model.forward_backward(inputs=rows()[:2])
    model.step()
    far = differs(parameters(model), expected)
    require(far <= case.precision, f"after zero_grad() the update differs by {far:.3g} from that of the new rows alone")


def metrics(case: ModelCase) -> None:
    """`calculate_metric` returns plain numbers for the calls since its last call, and resets."""
    model = case.ready()
    model.add_metric(Tokens, is_training=True)
    counts = [sum(label != _IGNORED for label in row["labels"]) for row in rows()]
    for part in (slice(0, 4), slice(1, 3)):
        model.forward_backward(inputs=rows()[part], micro_batch_size=1)
        model.clip_grad_and_step()
        found = model.calculate_metric(is_training=True)
        numbers = all(is_plain_number(value) for value in found.values())
        require(numbers, f"calculate_metric() gave {shown(found)}; its values must be plain numbers")
        require(
            found.get("trained_tokens") == sum(counts[part]), f"{shown(found)} for {sum(counts[part])} trained tokens"
        )


def save_and_load(case: ModelCase) -> None:
    """`load` restores exactly what `save` wrote, in this model and in a new one."""
    model = case.ready()
    _train(model, 1)
    place = model.save("saved", output_dir=str(case.folder / "one"))
    require(place is not None and Path(place).is_dir(), f"save() gave {shown(place)}; return the directory")
    kept = parameters(model)
    _train(model, 1)
    fresh = case.ready()
    for target, what in ((model, "the trained model"), (fresh, "a fresh one")):
        target.load("saved", output_dir=str(case.folder / "one"))
        far = differs(parameters(target), kept)
        require(far == 0, f"loaded into {what} the parameters differ by {far:.3g} from those saved")


def resume(case: ModelCase) -> None:
    """Training resumed with its optimizer and scheduler continues as if it had not been interrupted."""
    import torch

    def made() -> Any:
        model = case.ready(momentum=0.9)
        model.set_lr_scheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        return model

    model = made()
    _train(model, 2)
    place = model.save("resume", output_dir=str(case.folder / "two"), save_optimizer=True)
    _train(model, 2)
    again = made()
    counters = again.resume_from_checkpoint(place)
    require(isinstance(counters, Mapping), f"resume_from_checkpoint() gave {shown(counters)}; return the counters")
    _train(again, 2)
    far = differs(parameters(again), parameters(model))
    require(far == 0, f"two steps, a resume and two steps differ by {far:.3g} from four steps")


def unknown_arguments(case: ModelCase) -> None:
    """An unknown keyword raises an ArgumentError that names it, in every method of the loop."""
    from twinkle.errors import ArgumentError

    model = case.ready()
    calls: dict[str, Mapping[str, Any]] = {
        "forward": {"inputs": rows()},
        "forward_only": {"inputs": rows()},
        "forward_backward": {"inputs": rows()},
        "step": {},
        "zero_grad": {},
        "lr_step": {},
        "clip_grad_norm": {},
        "save": {"name": "no", "output_dir": str(case.folder)},
    }
    for name, given in calls.items():
        try:
            getattr(model, name)(**given, no_such_argument=1)
        except (ArgumentError, TypeError) as error:
            require("no_such_argument" in str(error), f"{name}(no_such_argument=1) says: {error}; it must name it")
            continue
        raise Violation(f"{name}(no_such_argument=1) was accepted; an unknown argument must be an error")


def impossible_orders(case: ModelCase) -> None:
    """Calls in an invalid order are errors and leave the parameters unchanged."""
    model = case.ready()
    before = parameters(model)
    with refusal("backward() without a forward"):
        model.backward()
    with refusal("calculate_loss() without a forward"):
        model.calculate_loss()
    with refusal("loading a checkpoint that does not exist"):
        model.load("no-such-checkpoint", output_dir=str(case.folder))
    with refusal("forward_backward(inputs=[])"):
        model.forward_backward(inputs=[])
    require(differs(before, parameters(model)) == 0, "these errors changed the parameters")


def inputs_left_alone(case: ModelCase) -> None:
    """It does not change the rows."""
    model = case.ready()
    left_alone(lambda given: model.forward_backward(inputs=given, micro_batch_size=2), rows(), "the rows")


def summary(case: ModelCase) -> None:
    """`get_train_configs` is readable text."""
    text = case.ready().get_train_configs()
    require(isinstance(text, str) and text.strip(), f"get_train_configs() gave {shown(text)}; return text")


CASE = ModelCase
CHECKS = (
    forward_form,
    forward_repeats,
    steps_by_hand,
    micro_batches,
    accumulation,
    acts_at_k,
    clipping,
    zero_grad,
    metrics,
    save_and_load,
    resume,
    unknown_arguments,
    impossible_orders,
    inputs_left_alone,
    summary,
)


def _train(model: Any, steps: int) -> None:
    for _ in range(steps):
        model.forward_backward(inputs=rows())
        model.clip_grad_and_step(max_grad_norm=0.1)


def _parameters(component: Any) -> Mapping[str, Any]:
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(component).parameters
    return {}
