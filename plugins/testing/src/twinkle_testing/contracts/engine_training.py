"""Contract checks of engines, training: independent operations, exact steps, isolated failures."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from twinkle.data_format import LossOutput
from twinkle.engine import (
    AdapterRef,
    EngineInfo,
    Feature,
    Operation,
    OperationError,
    OperationResult,
    Step,
)
from twinkle.errors import ArgumentError, NonFiniteError, TrainingStateError, Unsupported
from twinkle_testing.contracts.case import NotApplicable, refusal, require
from twinkle_testing.contracts.engine_case import (
    IGNORED,
    LENGTHS,
    PROMPT,
    EngineCase,
    LossFailed,
    all_logps,
    apart,
    failing,
    largest,
    moved,
    nan_gradient,
    nan_loss,
    near,
    raises,
    read_logps,
    same_bits,
    token_nll,
)
from twinkle_testing.contracts.values import as_json, left_alone, shown

if TYPE_CHECKING:
    pass


def description(case: EngineCase) -> None:
    """`describe` returns valid values; rows beyond its context or vocabulary are refused, rows at the limit pass."""
    info = case.info
    require(isinstance(info, EngineInfo), f"describe() gave {shown(info)}; return an EngineInfo")
    require(case.engine.describe() == info, "two calls of describe() differ")
    for name in ("architecture", "device", "dtype"):
        value = getattr(info, name)
        require(isinstance(value, str) and value, f"{name} is {value!r}; it must be a text")
    sizes = {"context": info.context, "vocabulary": info.vocabulary, "pass_tokens": case.engine.pass_tokens}
    for name, value in sizes.items():
        require(type(value) is int and value >= 1, f"{name} is {value!r}; it must be an integer of at least 1")
    odd = sorted(info.features - set(get_args(Feature)))
    require(not odd, f"features has {odd}; there are {', '.join(get_args(Feature))}")
    require(
        info.tokenizer is None or Path(info.tokenizer).is_dir(), f"tokenizer is {info.tokenizer}, which is not a folder"
    )
    as_json(list(map(dict, info.paths)), "paths")
    last = info.vocabulary - 1
    case.logps(None, [{"input_ids": [last, last], "labels": [last, IGNORED]}])
    (result,) = case.run(Operation(None, "forward", [{"input_ids": [last + 1, 0], "labels": [0, IGNORED]}]))
    require(isinstance(result, OperationError), f"a row with the token {last + 1} was accepted")
    if info.context <= 4096:
        ids = [1] * (info.context + 1)
        (result,) = case.run(Operation(None, "forward", [{"input_ids": ids, "labels": ids}]))
        require(isinstance(result, OperationError), f"a row of {len(ids)} tokens was accepted; the context is one less")


def adapters(case: EngineCase) -> None:
    """A name can be used once; a reference is refused after `remove`, also if the name is used again."""
    engine, spec = case.engine, case.spec()
    first = engine.add("kit-name", spec)
    fine = isinstance(first, AdapterRef) and first.name == "kit-name"
    require(fine, f"add('kit-name') gave {shown(first)}; return its AdapterRef")
    with raises("adding an adapter of a taken name", ArgumentError):
        engine.add("kit-name", spec)
    engine.remove(first)
    second = engine.add("kit-name", spec)
    require(second.generation > first.generation, "a later adapter of the same name has no higher generation")
    calls: dict[str, Callable[[], Any]] = {
        "version": lambda: engine.version(first),
        "snapshot": lambda: engine.snapshot(first),
        "export": lambda: engine.export(first, "base"),
        "usage": lambda: engine.usage(first),
        "remove": lambda: engine.remove(first),
        "set_optimizer": lambda: engine.set_optimizer(first, case.optimizer, lr=case.lr),
    }
    for name, call in calls.items():
        with raises(f"{name}() of a removed adapter", TrainingStateError):
            call()
    (result,) = case.run(Operation(first, "forward", case.rows(0)))
    require(isinstance(result, OperationError), "run() took a reference to a removed adapter")
    case.refused_step(Step(first, zero_if_none=True), "a step of a removed adapter")
    case.logps(second)
    engine.remove(second)


def initial_weights(case: EngineCase) -> None:
    """Weights depend on specification and seed; another seed gives others; wrong ranks and no targets are refused."""
    one, two, other = (case.weights(case.adapter(seed)) for seed in (7, 7, 8))
    require(same_bits(one, two), "two adapters of the same specification and seed have different weights")
    require(not same_bits(one, other), "adapters of the seeds 7 and 8 have the same weights")
    none = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    for what, fields in (("rank 0", {"rank": 0}), ("rank -1", {"rank": -1}), ("no targets", none)):
        if fields == {"rank": 0} and "full_parameters" in case.info.features:
            continue
        with raises(f"add() with {what}", ArgumentError):
            case.engine.add("kit-wrong", replace(case.spec(), **fields))


def base_model(case: EngineCase) -> None:
    """The log-probabilities of the base model equal those of transformers in float64."""
    try:
        import torch
        from transformers import AutoModelForCausalLM

        from twinkle.hub.quiet import quiet_transformers

        with quiet_transformers():
            module = AutoModelForCausalLM.from_pretrained(case.place, dtype=torch.float64).eval()
    except (ImportError, OSError, ValueError) as error:
        raise NotApplicable(f"transformers cannot load {case.place}: {error}") from error
    found, expected = case.logps(None), []
    for row in case.rows():
        with torch.no_grad():
            table = module(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        labels = torch.tensor(row["labels"])
        chosen = table.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        expected.append(torch.where(labels == IGNORED, 0.0, chosen))
    far = apart(found, expected)
    require(far <= case.precision, f"log-probabilities are up to {far:.3g} from those of transformers in float64")


def fresh_adapter(case: EngineCase) -> None:
    """A fresh adapter computes what the base model does, and a trained one does not."""
    base = case.logps(None)
    far = apart(case.logps(case.adapter()), base)
    require(far <= case.precision, f"log-probabilities of a fresh adapter are up to {far:.3g} from the base model's")
    far = apart(case.logps(case.trained()), base)
    require(far > 10 * case.precision, f"after two steps log-probabilities are only {far:.3g} from the base model's")


def forward(case: EngineCase) -> None:
    """A "forward" computes the loss without a gradient; the base model refuses "forward_backward"."""
    ref, rows = case.adapter(), case.rows()
    (result,) = case.good(Operation(ref, "forward", rows, token_nll))
    total = -sum(float(read_logps(out, row)[:-1].sum()) for out, row in zip(result.outputs, rows, strict=True))
    fine = isinstance(result.loss_sum, float) and math.isclose(result.loss_sum, total, rel_tol=case.precision)
    require(fine, f"loss_sum is {shown(result.loss_sum)}; the sum of the log-probabilities is {total:.6g}")
    trained = sum(LENGTHS) - len(LENGTHS)
    require(result.denominator == trained, f"denominator is {result.denominator}; the loss gave {trained}")
    (plain,) = case.good(Operation(ref, "forward", rows))
    require(plain.loss_sum is None, f"without a loss, loss_sum is {shown(plain.loss_sum)}; it must be None")
    case.refused_step(Step(ref), "a step after forwards alone")
    (refused,) = case.run(Operation(None, "forward_backward", rows, token_nll))
    require(isinstance(refused, OperationError), 'a "forward_backward" of the base model was accepted')


def usage(case: EngineCase) -> None:
    """`Usage.tokens` counts tokens of rows, `usage` adds up the operations that succeeded, `bytes_of` is not 0."""
    ref = case.adapter()
    results = case.good(
        Operation(ref, "forward", case.rows()), Operation(ref, "forward_backward", case.rows(0), token_nll)
    )
    case.run(Operation(ref, "forward", case.rows(0), failing))
    counts = [result.usage.tokens for result in results]
    require(counts == [sum(LENGTHS), LENGTHS[0]], f"Usage.tokens is {counts}; rows have {sum(LENGTHS)} and 9 tokens")
    require(all(result.usage.flops > 0 for result in results), "Usage.flops is 0")
    total = case.engine.usage(ref)
    expected = results[0].usage + results[1].usage
    same = total.tokens == expected.tokens and math.isclose(total.flops, expected.flops, rel_tol=1e-6)
    require(same, f"usage() is {total}; the successful operations cost {expected}")
    held = case.engine.bytes_of(ref)
    require(held.device + held.host + held.disk > 0, f"bytes_of() an adapter in use is {held}")


def gradients_add(case: EngineCase) -> None:
    """Gradients of several operations, in one call or in several, add up to that of all rows at once."""
    rows = case.rows()
    parts = [rows[:1], rows[1:]]
    whole, together, apart_ = (case.adapter(linear=True) for _ in range(3))
    before = case.weights(whole)
    case.backward(whole, rows)
    case.good(*(Operation(together, "forward_backward", part, token_nll) for part in parts))
    for part in parts:
        case.backward(apart_, part)
    for ref in (whole, together, apart_):
        case.step(ref, divide=False)
    expected = moved(before, case.weights(whole))
    near(case, moved(before, case.weights(together)), expected, "two operations of one call")
    near(case, moved(before, case.weights(apart_)), expected, "operations of two calls")


def neighbours(case: EngineCase) -> None:
    """The numbers and the update of an operation do not depend on other operations of the call."""
    alone, beside, other = case.adapter(3, linear=True), case.adapter(3, linear=True), case.adapter(4, rank=8)
    before = case.weights(alone)
    one = case.backward(alone, case.rows(0, 1))
    operations = [
        Operation(other, "forward_backward", case.rows(2, 3), token_nll),
        Operation(None, "forward", case.rows(1)),
        Operation(beside, "forward_backward", case.rows(0, 1), token_nll),
        Operation(other, "forward", case.rows(3)),
    ]
    two = case.good(*operations)[2]
    pairs = [[read_logps(out, row) for out, row in zip(r.outputs, case.rows(0, 1), strict=True)] for r in (one, two)]
    far = apart(*pairs)
    require(far <= case.precision, f"log-probabilities differ by {far:.3g} with other operations in the call")
    alone_norm = case.step(alone).grad_norm
    case.steps(Step(other), Step(beside))
    near(case, moved(before, case.weights(beside)), moved(before, case.weights(alone)), "beside other operations")
    require(alone_norm > 0, "grad_norm is 0")


def failures(case: EngineCase) -> None:
    """An operation whose loss raises fails at its own index, and the pending gradients of its adapter stay."""
    hit, clean, other = case.adapter(), case.adapter(), case.adapter(2)
    for ref in (hit, clean):
        case.backward(ref, case.rows(0))
    results = case.run(
        Operation(other, "forward_backward", case.rows(1), token_nll),
        Operation(hit, "forward_backward", case.rows(2), failing),
        Operation(other, "forward_backward", case.rows(3), token_nll),
    )
    failed = [isinstance(result, OperationError) for result in results]
    require(failed == [False, True, False], f"with a failing loss at index 1, the failures are {failed}")
    error = results[1]
    require(error.adapter == hit.name, f"the error names the adapter {error.adapter!r}, not {hit.name!r}")
    causes = [error.error, error.error.__cause__]
    require(
        any(isinstance(cause, LossFailed) for cause in causes), f"the error is {error.error!r}, not that of the loss"
    )
    case.steps(Step(hit), Step(clean))
    same = same_bits(case.weights(hit), case.weights(clean))
    require(same, "after a failed operation the step of its adapter is another one")


def inputs_left_alone(case: EngineCase) -> None:
    """It does not change rows or loss inputs."""
    ref = case.adapter()
    given = [case.rows(), {"extra": [1.0, 2.0, 3.0, 4.0]}]

    def loss(inputs: Any, outputs: Any, extra: Any = None) -> LossOutput:
        return token_nll(inputs, outputs)

    def call(values: Any) -> None:
        case.good(Operation(ref, "forward_backward", values[0], loss, loss_inputs=values[1]))

    left_alone(call, given, "the rows or loss inputs")


def norms(case: EngineCase) -> None:
    """The norm is that of the gradient: it scales with it, and follows `divide` and `max_grad_norm`."""
    rows = case.rows()
    single, double, divided, clipped = (case.adapter(linear=True) for _ in range(4))
    before = case.weights(single)
    for ref in (single, double, double, divided, clipped):
        case.backward(ref, rows)
    norm = case.step(single, divide=False).grad_norm
    update = moved(before, case.weights(single))
    found = case.step(double, divide=False).grad_norm
    require(math.isclose(found, 2 * norm, rel_tol=case.precision), f"the norm is {norm:.6g}, twice that is {found:.6g}")
    near(case, moved(before, case.weights(double)), update, "twice the gradient", 2.0)
    tokens = sum(LENGTHS) - len(LENGTHS)
    found = case.step(divided).grad_norm
    close = math.isclose(found, norm / tokens, rel_tol=case.precision)
    require(close, f"with divide=True the norm is {found:.6g}; {norm:.6g} / {tokens} is {norm / tokens:.6g}")
    near(case, moved(before, case.weights(divided)), update, "divide=True", 1 / tokens)
    found = case.step(clipped, divide=False, max_grad_norm=norm / 4).grad_norm
    close = math.isclose(found, norm, rel_tol=case.precision)
    require(close, f"with max_grad_norm the norm is {found:.6g}; before clipping it is {norm:.6g}")
    near(case, moved(before, case.weights(clipped)), update, "clipped to a quarter", 0.25)


def missing_gradients(case: EngineCase) -> None:
    """A step consumes gradients and is refused without any; with `zero_if_none`, momentum continues."""
    ref = case.adapter()
    case.refused_step(Step(ref), "a step without gradients")
    case.backward(ref, case.rows())
    case.step(ref)
    before = case.weights(ref)
    case.refused_step(Step(ref), "a second step of the same gradients")
    require(same_bits(before, case.weights(ref)), "a refused step changed the weights")
    norm = case.step(ref, zero_if_none=True).grad_norm
    require(norm == 0, f"the norm of a gradient of zero is {norm}")
    require(largest(moved(before, case.weights(ref))) > 0, "a step with a gradient of zero ignores momentum")


def optim_params(case: EngineCase) -> None:
    """`optim_params` apply to a step and later ones; an unknown one is refused, and the gradient stays pending."""
    ref = case.adapter()
    before = case.weights(ref)
    case.backward(ref, case.rows())
    case.refused_step(Step(ref, optim_params={"no_such_option": 1.0}), "a step with an unknown option")
    for options in ({"lr": 0.0}, {}):
        case.step(ref, optim_params=options)
        require(
            same_bits(before, case.weights(ref)), f"after lr=0, a step with optim_params={options} moved the weights"
        )
        case.backward(ref, case.rows())
    case.step(ref, optim_params={"lr": case.lr})
    require(not same_bits(before, case.weights(ref)), f"a step with lr={case.lr} did not move the weights")
    with refusal("set_optimizer() with an unknown option"):
        case.engine.set_optimizer(ref, case.optimizer, no_such_option=1)
    case.backward(ref, case.rows())
    case.engine.set_optimizer(ref, case.optimizer, lr=case.lr)
    case.refused_step(Step(ref), "a step after set_optimizer(), which drops gradients,")


def not_finite(case: EngineCase) -> None:
    """A NaN loss or gradient is a `NonFiniteError` of its operation or step, and the weights stay unchanged."""
    ref, other = case.adapter(), case.adapter(2)
    before = case.weights(ref)
    results = case.run(
        Operation(ref, "forward_backward", case.rows(0), nan_loss),
        Operation(other, "forward_backward", case.rows(1), token_nll),
    )
    require(isinstance(results[1], OperationResult), "a loss of NaN fails the operation beside it")
    for result in (results[0], case.run(Operation(ref, "forward_backward", case.rows(0), nan_gradient))[0]):
        if isinstance(result, OperationResult):
            error = case.refused_step(Step(ref), "a step from a gradient of NaN")
        else:
            error = result.error
        require(isinstance(error, NonFiniteError), f"NaN is a {type(error).__name__}; it must be a NonFiniteError")
    require(same_bits(before, case.weights(ref)), "NaN changed the weights")
    case.backward(ref, case.rows())
    norm = case.step(ref).grad_norm
    require(math.isfinite(norm), f"after NaN the norm of the next step is {norm}")


def composition(case: EngineCase) -> None:
    """An operation that is repeated with its `composition`, without its neighbours, gives the same bits."""
    import torch

    case.needs("composition")
    first, again, other = case.trained(), case.trained(), case.trained(2)
    operation = Operation(first, "forward_backward", case.rows(1, 2), token_nll)
    beside = Operation(other, "forward_backward", case.rows(0, 3), token_nll)
    result = case.good(beside, operation)[1]
    recorded = json.loads(as_json(result.composition, "composition"))
    require(recorded, "composition is empty, though the features include it")
    (repeated,) = case.good(replace(operation, adapter=again, composition=recorded))
    for one, two in zip(result.outputs, repeated.outputs, strict=True):
        same = torch.equal(torch.as_tensor(one["logps"]), torch.as_tensor(two["logps"]))
        require(same, "with the composition of an earlier run, log-probabilities have other bits")
    for ref in (first, again):
        case.step(ref)
    require(same_bits(case.weights(first), case.weights(again)), "with its composition, the gradient has other bits")


def early_results(case: EngineCase) -> None:
    """`run` reports an operation before the passes of others, once, with the result that it returns."""
    case.needs("early_results")
    first, second = case.adapter(seed=1), case.adapter(seed=2)
    size = min(case.info.context, case.engine.pass_tokens)
    long: list[Any] = [{"input_ids": [7] * size, "labels": [7] * size}] * 2
    scored: list[int] = []
    reported: dict[int, Any] = {}
    scored_at_first: list[int] = []

    def numbered(index: int) -> Callable[[Any, Any], LossOutput]:
        def loss(inputs: Any, outputs: Any) -> LossOutput:
            scored.append(index)
            return token_nll(inputs, outputs)

        return loss

    def ended(index: int, result: Any) -> None:
        require(index not in reported, f"operation {index} was reported twice")
        scored_at_first.extend([] if reported else scored)
        reported[index] = result

    adapters: list[AdapterRef | str] = ["kit-missing", first, second, first]
    operations = [Operation(ref, "forward_backward", long, numbered(index)) for index, ref in enumerate(adapters)]
    case.engine.report(ended)
    try:
        results = case.run(*operations)
    finally:
        case.engine.report(_ignored)
    require(set(reported) == set(range(len(operations))), f"of 4 operations, {sorted(reported)} were reported")
    for index, result in enumerate(results):
        same = type(reported[index]) is type(result) and _loss_of(reported[index]) == _loss_of(result)
        require(same, f"operation {index} was reported with another result than run() returned")
    order = [index for index in reported if adapters[index] is first]
    require(order == sorted(order), f"operations of one adapter were reported in the order {order}")
    require(isinstance(results[0], OperationError), "run() took the name of an adapter that does not exist")
    for index in range(1, 4):
        require(isinstance(results[index], OperationResult), f"operation {index} failed: {shown(results[index])}")
    reported.clear()
    scored_at_first.clear()
    scored.clear()
    case.engine.report(ended)
    try:
        case.run(*operations[1:])
    finally:
        case.engine.report(_ignored)
    late = "operations of two full passes each were reported only after the loss of the last one was computed"
    require(set(scored_at_first) != {1, 2, 3}, late)


def _loss_of(result: Any) -> Any:
    return getattr(result, "loss_sum", None)


def _ignored(index: int, result: Any) -> None:
    """Do nothing."""


def interrupts(case: EngineCase) -> None:
    """`run` calls the function of `interrupt` between passes; it may sample, and does not change results."""
    case.needs("interrupt")
    refs = [case.adapter(seed) for seed in range(3)]
    size = min(case.info.context, case.engine.pass_tokens)
    long: list[Any] = [{"input_ids": [7] * size, "labels": [7] * size}] * 2
    operations = [Operation(ref, "forward", long, token_nll) for ref in refs]
    expected = all_logps(case, operations)
    alone, drawn = case.tokens(seed=4), []
    requests: list[Any] = []

    def between() -> None:
        if not requests:
            params = {"max_tokens": 6, "logprobs": 1, "stop": [], "seed": 4}
            requests.append(case.engine.submit(list(PROMPT), params))
        case.engine.decode()
        drawn.append(len(requests[0].progress().tokens))

    case.engine.interrupt(between)
    try:
        found = all_logps(case, operations)
    finally:
        case.engine.interrupt(_nothing)
    require(drawn, f"run() of {len(refs)} operations, each of two full passes, did not call the function")
    require(drawn[0] > 0, "decode() between two passes drew nothing")
    require(apart(found, expected) <= case.precision, "sampling between passes changes log-probabilities")
    tokens = [list(sequence.tokens) for sequence in requests[0].result().sequences]
    require(tokens == alone, f"between passes it drew {tokens}, and alone {alone}")


def output_projection(case: EngineCase) -> None:
    """An adapter of only the output projection learns; without the feature it is `Unsupported`."""
    alone: dict[str, Any] = {"train_attn": False, "train_mlp": False, "train_unembed": True}
    if not case.has("train_unembed"):
        with raises("an adapter of the output projection, without the feature,", Unsupported):
            case.engine.add("kit-unembed", case.spec(**alone))
        raise NotApplicable("its features do not include 'train_unembed'")
    ref = case.adapter(**alone)
    losses: list[Any] = []
    for _ in range(4):
        losses.append(case.backward(ref, case.rows()).loss_sum)
        case.step(ref)
    falls = all(later < earlier for earlier, later in pairwise(losses))
    require(falls, f"with the output projection alone the loss goes {losses}")
    far = apart(case.logps(ref), case.logps(None))
    require(far > 10 * case.precision, "an adapter of the output projection computes what the base model does")


def native_losses(case: EngineCase) -> None:
    """A loss of `EngineInfo.losses` runs by its name."""
    if not case.info.losses:
        raise NotApplicable("it computes no losses by name")
    given = case.loss_inputs or {}
    names = sorted(name for name in case.info.losses if name == "cross_entropy" or name in given)
    if not names:
        raise NotApplicable("give the arguments of its losses: loss_inputs= of its example")
    for name in names:
        ref = case.adapter()
        inputs = dict(given.get(name, {}))
        (result,) = case.good(Operation(ref, "forward_backward", case.rows(0), name, loss_inputs=inputs))
        fine = isinstance(result.loss_sum, float) and math.isfinite(result.loss_sum)
        require(fine, f"loss_sum of {name!r} is {shown(result.loss_sum)}")
        case.step(ref)


def _nothing() -> None:
    """Do nothing."""
