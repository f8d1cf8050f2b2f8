"""Contract checks of engines whose adapters have components of their own: the feature `model`."""

from typing import Any

from twinkle.engine import Operation, Step
from twinkle.errors import TwinkleError, Unsupported
from twinkle_testing.contracts.case import NotApplicable, require
from twinkle_testing.contracts.engine_case import EngineCase, raises, same_bits

_ACCUMULATION = 2


def own_components(case: EngineCase) -> None:
    """`as_model` trains an adapter as `run` and `step` do; without the feature it is `Unsupported`."""
    if not case.has("model"):
        with raises("as_model() of an engine without the feature", Unsupported):
            case.engine.as_model()
        with raises("progress() of an engine without the feature", Unsupported):
            case.engine.progress(case.adapter())
        raise NotApplicable("its features do not include 'model'")
    model, one, two = case.engine.as_model(), case.adapter(), case.adapter()
    for ref in (one, two):
        model.set_loss("CrossEntropyLoss", adapter_name=ref.name)
    model.forward_backward(inputs=case.rows(0, 1), adapter_name=one.name)
    case.good(Operation(two, "forward_backward", case.rows(0, 1), metrics_of=two))
    for ref in (one, two):
        progress = case.engine.progress(ref)
        require((progress.cur_step, progress.pending, progress.updates) == (1, 1, 0), f"progress() gave {progress}")
        model.clip_grad_and_step(adapter_name=ref.name)
        require(case.engine.progress(ref).updates == 1, "clip_grad_and_step made no step")
    require(same_bits(case.weights(one), case.weights(two)), "forward_backward and run() gave other gradients")
    metrics = [model.calculate_metric(is_training=True, adapter_name=ref.name) for ref in (one, two)]
    require("loss" in metrics[0], f"the metrics of a step have no loss: {metrics[0]}")
    require(metrics[0]["loss"] == metrics[1]["loss"], "metrics did not see the operation of run() with metrics_of")


def evaluation(case: EngineCase) -> None:
    """`calculate_loss` scores the last forward with `metrics_of`, also one of the base model."""
    case.needs("model")
    model, ref = case.engine.as_model(), case.trained()
    model.set_loss("CrossEntropyLoss", adapter_name=ref.name)
    losses = []
    for adapter in (ref, None):
        (result,) = case.good(Operation(adapter, "forward", case.rows(1, 2), metrics_of=ref))
        count = sum(label != -100 for row in case.rows(1, 2) for label in row["labels"])
        mean = -sum(float(value) for output in result.outputs for value in output["logps"]) / count
        losses.append(float(model.calculate_loss(adapter_name=ref.name)))
        require(abs(losses[-1] - mean) < 1e-4 * abs(mean), f"calculate_loss gave {losses[-1]}, the forward's is {mean}")
    require(losses[0] != losses[1], "the losses of the adapter and of the base model are the same")


def components_in_snapshots(case: EngineCase) -> None:
    """A snapshot holds the scheduler and what metrics have seen; a restored adapter goes on with the same numbers."""
    case.needs("model")
    model, one = case.engine.as_model(), _scheduled(case)
    for row in range(_ACCUMULATION):
        _accumulate(case, one, row)
    model.clip_grad_and_step(adapter_name=one.name)
    folder = case.written(case.engine.snapshot(one))
    two = _scheduled(case)
    case.engine.restore(two, folder)
    seen: list[Any] = []
    for ref in (one, two):
        for row in range(_ACCUMULATION):
            _accumulate(case, ref, row + 1)
        model.clip_grad_and_step(adapter_name=ref.name)
        values = dict(model.calculate_metric(is_training=True, adapter_name=ref.name))
        seen.append((values.get("loss"), values.get("learning rate"), case.engine.progress(ref)))
    require(seen[0] == seen[1], f"the restored adapter gave {seen[1]}, the other {seen[0]}")
    require(same_bits(case.weights(one), case.weights(two)), "the restored adapter has other weights after a step")


def wrong_components(case: EngineCase) -> None:
    """A component that cannot be used is refused when it is set, and a failing scheduler fails its own step alone."""
    case.needs("model")
    model, one, other = case.engine.as_model(), case.adapter(), case.adapter(2)
    with raises("an optimizer that does not exist", TwinkleError):
        model.set_optimizer("NoSuchOptimizer", adapter_name=one.name)
    with raises("an optimizer that needs a closure", TwinkleError):
        model.set_optimizer("LBFGS", adapter_name=one.name)
    model.set_lr_scheduler("OneCycleLR", max_lr=0.1, total_steps=2, adapter_name=one.name)
    failed = 0
    for _ in range(4):
        for ref in (one, other):
            case.good(Operation(ref, "forward_backward", case.rows(0), "CrossEntropyLoss"))
        results = case.engine.step([Step(one), Step(other)])
        failed += hasattr(results[0], "error")
        require(not hasattr(results[1], "error"), "the scheduler of one adapter failed the step of another")
    require(failed > 0, "a scheduler of 2 steps was advanced 4 times without an error")


def _scheduled(case: EngineCase) -> Any:
    ref = case.adapter()
    model = case.engine.as_model()
    model.set_loss("CrossEntropyLoss", adapter_name=ref.name)
    model.set_lr_scheduler("StepLR", step_size=1, gamma=0.5, adapter_name=ref.name)
    model.lr_step(adapter_name=ref.name, gradient_accumulation_steps=_ACCUMULATION)
    return ref


def _accumulate(case: EngineCase, ref: Any, row: int) -> None:
    case.good(Operation(ref, "forward_backward", case.rows(row), metrics_of=ref))
