"""What an engine must keep: independent operations, exact steps, state that comes back, samples of its own model."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from twinkle.data_format import LossOutput
from twinkle.engine import (
    AdapterRef,
    AdapterSpec,
    EngineInfo,
    Feature,
    Operation,
    OperationError,
    OperationResult,
    Step,
    StepResult,
)
from twinkle.errors import ArgumentError, CheckpointError, DataError, NonFiniteError, TrainingStateError, Unsupported
from twinkle_testing.contracts.case import Case, NotApplicable, Violation, refusal, require
from twinkle_testing.contracts.values import as_json, left_alone, shown

if TYPE_CHECKING:
    from torch import Tensor

_IGNORED = -100
_PRECISION = 1e-4
"""15 times the distance of the tiny model's log-probabilities in float32 from those in float64, which is 7e-6."""
_LARGE = 1e8
"""An eps of AdamW beside which gradients are small, so that updates are linear in the gradient."""
_PROMPT = (5, 11, 23, 41)
_LENGTHS = (9, 4, 13, 6)
_MODEL_CELLS = 2**20
"""Log-probabilities of all tokens that a check may ask for."""


@dataclass(kw_only=True)
class EngineCase(Case):
    """An engine. All checks share one, and each adds adapters of its own.

    Attributes:
        model_id: folder of the base model; by default that of its arguments, or else a tiny random Llama.
        precision: how far log-probabilities of the same row may be apart; updates likewise, relative to the largest.
        optimizer: name of an optimizer with the options `lr`, `betas`, `eps` and `weight_decay` of AdamW.
        lr: learning rate of its steps.
        loss_inputs: for each name of `EngineInfo.losses` the arguments of an operation on one row of 9 tokens.
    """

    kind = "engine"

    model_id: str | Path | None = None
    precision: float = _PRECISION
    optimizer: str = "AdamW"
    lr: float = 1e-2
    loss_inputs: Mapping[str, Mapping[str, Any]] | None = None

    @cached_property
    def tiny(self) -> Path:
        """The folder of the tiny model; its weights are large, so that its choices are clear."""
        from twinkle.hub.quiet import quiet_transformers
        from twinkle_testing.models import tiny_model

        with quiet_transformers():
            return tiny_model(self.folder / "tiny", initializer_range=0.3)

    @property
    def place(self) -> str | Path:
        """The folder of its model."""
        return self.model_id or self.kwargs.get("model_id") or self.tiny

    def build(self, **more: Any) -> Any:
        """Return an engine; the first one is that of all checks, since building one means to load a model."""
        if not self.is_class:
            return self.component
        built = super().build(**{"model_id": str(self.place), **more})
        if not more:
            self.__dict__.setdefault("engine", built)
        return built

    @cached_property
    def engine(self) -> Any:
        """The engine that all checks share."""
        return self.build()

    @cached_property
    def info(self) -> EngineInfo:
        """What it says that it supports."""
        info: EngineInfo = self.engine.describe()
        return info

    @cached_property
    def _names(self) -> Iterator[int]:
        return count(1)

    def new_folder(self) -> Path:
        """Return a new, empty folder."""
        folder = self.folder / f"files-{next(self._names)}"
        folder.mkdir()
        return folder

    def spec(self, seed: int = 1, **fields: Any) -> AdapterSpec:
        """Return the specification of a small adapter."""
        return AdapterSpec(
            **{"rank": 4, "seed": seed, "train_unembed": "train_unembed" in self.info.features, **fields}
        )

    def adapter(self, seed: int = 1, *, linear: bool = False, **fields: Any) -> AdapterRef:
        """Return a new adapter with an optimizer; with `linear`, its updates are linear in the gradient."""
        ref: AdapterRef = self.engine.add(f"kit-{next(self._names)}", self.spec(seed, **fields))
        scale = {"lr": self.lr * _LARGE, "eps": _LARGE} if linear else {"lr": self.lr, "eps": 1e-8}
        self.engine.set_optimizer(ref, self.optimizer, betas=(0.9, 0.99), weight_decay=0.0, **scale)
        return ref

    def trained(self, seed: int = 1, steps: int = 2, **fields: Any) -> AdapterRef:
        """Return an adapter that was trained, so that it differs from the base model."""
        ref = self.adapter(seed, **fields)
        for _ in range(steps):
            self.backward(ref, self.rows())
            self.step(ref)
        return ref

    def rows(self, *numbers: int) -> list[dict[str, Any]]:
        """Return encoded rows of uneven length with a target for each token but the last; by default all four."""
        size = min(self.info.vocabulary, 250)
        made = []
        for number in numbers or range(len(_LENGTHS)):
            ids = [(37 * number + 11 * place + 1) % size for place in range(_LENGTHS[number])]
            made.append({"input_ids": ids, "labels": [*ids[1:], _IGNORED]})
        return made

    def run(self, *operations: Operation) -> list[Any]:
        """Run operations, and check that each has a result of the right form at its index."""
        results = self.engine.run(list(operations))
        fine = isinstance(results, list) and len(results) == len(operations)
        require(fine, f"run() gave {shown(results)} for {len(operations)} operations")
        for index, result in enumerate(results):
            known = isinstance(result, OperationResult | OperationError)
            require(known, f"run() gave {shown(result)}; give an OperationResult or an OperationError")
            place = not isinstance(result, OperationError) or result.index == index
            require(place, f"the error of operation {index} says the index {getattr(result, 'index', None)}")
        return results

    def good(self, *operations: Operation) -> list[OperationResult]:
        """Run operations that must succeed."""
        results = self.run(*operations)
        for index, result in enumerate(results):
            if isinstance(result, OperationError):
                raise Violation(f"operation {index} failed: {type(result.error).__name__}: {result.error}")
        return results

    def backward(self, ref: AdapterRef, rows: Sequence[Any], loss: Any = None) -> OperationResult:
        """Add the gradients of rows."""
        return self.good(Operation(ref, "forward_backward", rows, loss or token_nll))[0]

    def step(self, ref: AdapterRef, **options: Any) -> StepResult:
        """Make a step that must succeed."""
        (result,) = self.steps(Step(ref, **options))
        if isinstance(result, OperationError):
            raise Violation(f"a step failed: {type(result.error).__name__}: {result.error}")
        norm = result.grad_norm
        require(isinstance(norm, float) and norm >= 0, f"grad_norm is {shown(norm)}; it must be a float of at least 0")
        return result

    def steps(self, *steps: Step) -> list[Any]:
        """Make steps, and check that each has a result."""
        results: list[Any] = self.engine.step(list(steps))
        known = [isinstance(result, StepResult | OperationError) for result in results]
        require(len(results) == len(steps) and all(known), f"step() gave {shown(results)} for {len(steps)} steps")
        return results

    def refused_step(self, step: Step, what: str) -> Exception:
        """Return the error of a step that must fail."""
        (result,) = self.steps(step)
        require(isinstance(result, OperationError), f"{what} gave {shown(result)}; give an OperationError")
        error: Exception = result.error
        return error

    def logps(self, adapter: AdapterRef | None, rows: Sequence[Any] | None = None) -> list["Tensor"]:
        """Return the log-probabilities of rows, in float64, each in the shape of its labels."""
        rows = self.rows() if rows is None else rows
        (result,) = self.good(Operation(adapter, "forward", rows))
        require(len(result.outputs) == len(rows), f"{len(result.outputs)} outputs for {len(rows)} rows")
        return [read_logps(output, row) for output, row in zip(result.outputs, rows, strict=True)]

    def table(self, adapter: AdapterRef | None, ids: Sequence[int]) -> "Tensor":
        """Return float64 `[T, V]`: the log-probability of every token after each, from rows with V targets a token."""
        vocabulary = self.info.vocabulary
        if vocabulary * len(ids) > _MODEL_CELLS:
            raise NotApplicable(f"its vocabulary of {vocabulary} tokens is too large for this check; give a tiny model")
        row = {"input_ids": list(ids), "labels": [list(range(vocabulary))] * len(ids)}
        return self.logps(adapter, [row])[0]

    def weights(self, ref: AdapterRef) -> dict[str, "Tensor"]:
        """Return the adapter's weights by name, from files in PEFT's format."""
        from safetensors.torch import load_file

        return load_file(self.exported(ref) / "adapter_model.safetensors")

    def exported(self, ref: AdapterRef) -> Path:
        """Return a folder with the adapter in PEFT's format."""
        folder = self.new_folder()
        self.engine.export(ref, "base-model").write(folder)
        return folder

    def saved(self, ref: AdapterRef, *, gradient: bool = True) -> Path:
        """Return a folder with a snapshot of the adapter."""
        folder = self.new_folder()
        self.engine.snapshot(ref, gradient=gradient).write(folder)
        return folder

    def restored(self, folder: Path) -> AdapterRef:
        """Return a new adapter in the state of a snapshot."""
        spec = self.engine.read_spec(folder)
        require(isinstance(spec, AdapterSpec), f"read_spec() of a snapshot gave {shown(spec)}")
        ref: AdapterRef = self.engine.add(f"kit-{next(self._names)}", spec)
        self.engine.restore(ref, folder)
        return ref

    def sample(self, version: Any = None, prompt: Sequence[int] = _PROMPT, **params: Any) -> Any:
        """Return the response to a prompt."""
        params = {"max_tokens": 6, "logprobs": 1, "stop": [], "seed": 1, **params}
        return self.engine.submit(list(prompt), params, version).result()

    def tokens(self, version: Any = None, prompt: Sequence[int] = _PROMPT, **params: Any) -> list[list[int]]:
        """Return the tokens of the samples of a prompt."""
        return [list(sequence.tokens) for sequence in self.sample(version, prompt, **params).sequences]

    def has(self, feature: Feature) -> bool:
        """Return whether the engine has an optional feature."""
        return feature in self.info.features

    def needs(self, feature: Feature) -> None:
        """Skip the check unless the engine has a feature."""
        if not self.has(feature):
            raise NotApplicable(f"its features do not include {feature!r}")


def token_nll(inputs: Any, outputs: Any) -> LossOutput:
    """Return the negative log-likelihood of the targets, each times its `loss_scale`."""
    terms = -outputs["logps"] * (inputs["labels"] != _IGNORED).to(outputs["logps"])
    if inputs.get("loss_scale") is not None:
        terms = terms * inputs["loss_scale"].to(terms)
    return LossOutput(terms.sum(), int((inputs["labels"] != _IGNORED).sum()))


class _Failed(Exception):
    """What the failing loss raises."""


def failing(inputs: Any, outputs: Any) -> LossOutput:
    """Raise an error, as a loss of a client may."""
    raise _Failed("this loss fails")


def nan_loss(inputs: Any, outputs: Any) -> LossOutput:
    """Return NaN."""
    return LossOutput(outputs["logps"].sum() * math.nan, 1)


def nan_gradient(inputs: Any, outputs: Any) -> LossOutput:
    """Return 0, with a gradient of NaN: the derivative of the root is infinite at 0, times 0."""
    return LossOutput((outputs["logps"] * 0.0).sum().sqrt(), 1)


def read_logps(output: Mapping[str, Any], row: Mapping[str, Any]) -> "Tensor":
    """Return the log-probabilities of a row in float64, after checking dtype, shape and graph."""
    import torch

    found = output.get("logps")
    require(found is not None, f"the outputs of a row with labels have no logps, only {sorted(output)}")
    logps = torch.as_tensor(found)
    require(logps.dtype == torch.float32, f"logps is {logps.dtype}; it must be float32")
    require(not logps.requires_grad, "logps has a graph; detach it")
    shape = list(torch.as_tensor(row["labels"]).shape)
    require(list(logps.shape) == shape, f"logps has the shape {list(logps.shape)}, and the labels {shape}")
    return logps.double().cpu()


def apart(one: Sequence["Tensor"], two: Sequence["Tensor"]) -> float:
    """Return the largest difference between two lists of tensors."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, two, strict=True))


def moved(before: Mapping[str, "Tensor"], after: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Return how far each weight has moved."""
    require(before.keys() == after.keys(), "export() gives other names than before")
    return {name: after[name].double() - before[name].double() for name in before}


def largest(update: Mapping[str, "Tensor"]) -> float:
    """Return the largest change of a weight."""
    return max(float(value.abs().max()) for value in update.values())


def near(
    case: EngineCase, one: Mapping[str, "Tensor"], two: Mapping[str, "Tensor"], what: str, of: float = 1.0
) -> None:
    """Require that an update is `of` times another one, within the precision."""
    far = max(float((one[name] - of * two[name]).abs().max()) for name in one)
    scale = abs(of) * largest(two)
    require(scale > 0, f"{what}: the weights did not move")
    require(far <= case.precision * scale, f"{what}: updates of {scale:.3g} differ by {far:.3g}")


def same_bits(one: Mapping[str, "Tensor"], two: Mapping[str, "Tensor"]) -> bool:
    """Return whether two sets of weights are equal."""
    import torch

    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@contextlib.contextmanager
def raises(action: str, *errors: type[Exception]) -> Iterator[None]:
    """Pass if the block raises one of these errors; another one, or none, is a violation."""
    try:
        yield
    except errors:
        return
    except Exception as error:
        raise Violation(f"{action} raised {type(error).__name__}: {error}; {errors[0].__name__} is due") from error
    raise Violation(f"{action} raised nothing; {errors[0].__name__} is due")


def description(case: EngineCase) -> None:
    """`describe` has sane values, and rows beyond its context or vocabulary are refused, those at its bounds taken."""
    info = case.info
    require(isinstance(info, EngineInfo), f"describe() gave {shown(info)}; return an EngineInfo")
    require(case.engine.describe() == info, "two calls of describe() differ")
    for name in ("architecture", "device", "dtype"):
        value = getattr(info, name)
        require(isinstance(value, str) and value, f"{name} is {value!r}; it must be a text")
    for name, value in (("context", info.context), ("vocabulary", info.vocabulary), ("pass_tokens", _budget(case))):
        require(type(value) is int and value >= 1, f"{name} is {value!r}; it must be an integer of at least 1")
    odd = sorted(info.features - set(get_args(Feature)))
    require(not odd, f"features has {odd}; there are {', '.join(get_args(Feature))}")
    require(
        info.tokenizer is None or Path(info.tokenizer).is_dir(), f"tokenizer is {info.tokenizer}, which is no folder"
    )
    as_json(list(map(dict, info.paths)), "paths")
    last = info.vocabulary - 1
    case.logps(None, [{"input_ids": [last, last], "labels": [last, _IGNORED]}])
    (result,) = case.run(Operation(None, "forward", [{"input_ids": [last + 1, 0], "labels": [0, _IGNORED]}]))
    require(isinstance(result, OperationError), f"a row with the token {last + 1} was accepted")
    if info.context <= 4096:
        ids = [1] * (info.context + 1)
        (result,) = case.run(Operation(None, "forward", [{"input_ids": ids, "labels": ids}]))
        require(isinstance(result, OperationError), f"a row of {len(ids)} tokens was accepted; the context is one less")


def adapters(case: EngineCase) -> None:
    """A name is taken once; a reference is refused after `remove`, also when the name is in use again."""
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
    """Weights follow from specification and seed; another seed gives others; rank 0 and no targets are refused."""
    one, two, other = (case.weights(case.adapter(seed)) for seed in (7, 7, 8))
    require(same_bits(one, two), "two adapters of the same specification and seed have different weights")
    require(not same_bits(one, other), "adapters of the seeds 7 and 8 have the same weights")
    none = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    for what, fields in (("rank 0", {"rank": 0}), ("rank -1", {"rank": -1}), ("no targets", none)):
        with raises(f"add() with {what}", ArgumentError):
            case.engine.add("kit-wrong", replace(case.spec(), **fields))


def base_model(case: EngineCase) -> None:
    """The base model's log-probabilities are those of its folder, as transformers computes them in float64."""
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
        expected.append(torch.where(labels == _IGNORED, 0.0, chosen))
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
    """A "forward" computes the loss and leaves no gradient; the base model has no "forward_backward"."""
    ref, rows = case.adapter(), case.rows()
    (result,) = case.good(Operation(ref, "forward", rows, token_nll))
    total = -sum(float(read_logps(out, row)[:-1].sum()) for out, row in zip(result.outputs, rows, strict=True))
    fine = isinstance(result.loss_sum, float) and math.isclose(result.loss_sum, total, rel_tol=case.precision)
    require(fine, f"loss_sum is {shown(result.loss_sum)}; the sum of the log-probabilities is {total:.6g}")
    trained = sum(_LENGTHS) - len(_LENGTHS)
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
    require(counts == [sum(_LENGTHS), _LENGTHS[0]], f"Usage.tokens is {counts}; rows have {sum(_LENGTHS)} and 9 tokens")
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
    """The numbers and the update of an operation do not depend on operations beside it."""
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
    """An operation whose loss raises fails alone, at its index, and its adapter's pending gradients stay."""
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
    require(error.adapter == hit.name, f"the error says the adapter {error.adapter!r}, not {hit.name!r}")
    causes = [error.error, error.error.__cause__]
    require(any(isinstance(cause, _Failed) for cause in causes), f"the error is {error.error!r}, not that of the loss")
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
    """The norm is that of the true gradient: doubled, divided by the denominators, and bounded where asked."""
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
    tokens = sum(_LENGTHS) - len(_LENGTHS)
    found = case.step(divided).grad_norm
    close = math.isclose(found, norm / tokens, rel_tol=case.precision)
    require(close, f"with divide=True the norm is {found:.6g}; {norm:.6g} / {tokens} is {norm / tokens:.6g}")
    near(case, moved(before, case.weights(divided)), update, "divide=True", 1 / tokens)
    found = case.step(clipped, divide=False, max_grad_norm=norm / 4).grad_norm
    close = math.isclose(found, norm, rel_tol=case.precision)
    require(close, f"with max_grad_norm the norm is {found:.6g}; before clipping it is {norm:.6g}")
    near(case, moved(before, case.weights(clipped)), update, "clipped to a quarter", 0.25)


def missing_gradients(case: EngineCase) -> None:
    """A step uses gradients up, and is refused without any, unless `zero_if_none`: then momentum goes on."""
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
    """`optim_params` hold for a step and later ones; an unknown one is refused, and the gradient stays pending."""
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
    """A loss or a gradient of NaN is a `NonFiniteError` of its operation or step, and the weights stay."""
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


def snapshots(case: EngineCase) -> None:
    """A restored snapshot continues bit for bit, with pending gradients; later training does not change the copy."""
    ref = case.trained()
    case.backward(ref, case.rows(0, 1))
    copied, bare, folder, empty = (
        case.engine.snapshot(ref),
        case.engine.snapshot(ref, gradient=False),
        case.new_folder(),
        case.new_folder(),
    )
    norms = []

    def go_on(adapter: AdapterRef) -> dict[str, "Tensor"]:
        case.backward(adapter, case.rows(2))
        norms.append(case.step(adapter).grad_norm)
        case.backward(adapter, case.rows(3))
        case.step(adapter)
        return case.weights(adapter)

    after = go_on(ref)
    copied.write(folder)
    bare.write(empty)
    require(case.engine.read_spec(folder) == case.spec(), f"read_spec() gave {shown(case.engine.read_spec(folder))}")
    again = case.restored(folder)
    require(same_bits(go_on(again), after), "training goes on otherwise from a restored snapshot")
    require(norms[0] == norms[1], f"the first step has the norm {norms[0]}, and {norms[1]} from the snapshot")
    case.refused_step(Step(case.restored(empty)), "a step from a snapshot with gradient=False")


def folders(case: EngineCase) -> None:
    """`read_spec` gives None for an empty folder and for an export."""
    for what, folder in (("an empty folder", case.new_folder()), ("an export", case.exported(case.adapter()))):
        found = case.engine.read_spec(folder)
        require(found is None, f"read_spec() of {what} gave {shown(found)}; it must be None")


def exports(case: EngineCase) -> None:
    """An export is in PEFT's format, and `load` of it gives the same log-probabilities."""
    ref, other = case.trained(), case.adapter(9)
    folder = case.exported(ref)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        require((folder / name).is_file(), f"an export has no {name}")
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    base = config.get("base_model_name_or_path")
    require(base == "base-model", f"base_model_name_or_path is {base!r}; export() was told 'base-model'")
    require(config.get("r") == case.spec().rank, f"r is {config.get('r')!r}; the rank is {case.spec().rank}")
    case.engine.load(other, folder)
    require(
        apart(case.logps(other), case.logps(ref)) <= case.precision, "a loaded export gives other log-probabilities"
    )
    case.backward(other, case.rows())
    case.step(other)


def damaged_files(case: EngineCase) -> None:
    """A file that is missing, cut or of another rank is a `CheckpointError`, and the adapter is as it was."""
    ref, engine = case.trained(), case.engine
    case.backward(ref, case.rows(0))
    before = case.weights(ref)
    wide = case.trained(rank=6)
    for what, write, read in (
        ("restore", case.saved, engine.restore),
        ("load", case.exported, engine.load),
        ("read_version", case.exported, lambda _, folder: engine.read_version(folder)),
    ):
        for name in sorted(path.name for path in write(ref).iterdir()):
            for damage in ("cut", "missing"):
                folder = write(ref)
                content = (folder / name).read_bytes()
                (folder / name).unlink()
                if damage == "cut":
                    (folder / name).write_bytes(content[: len(content) // 2])
                elif _is_optional(name):
                    continue
                with raises(f"{what}() where {name} is {damage}", CheckpointError):
                    read(ref, folder)
        if what != "read_version":
            with raises(f"{what}() of an adapter of another rank", CheckpointError):
                read(ref, write(wide))
    require(same_bits(before, case.weights(ref)), "a checkpoint that was refused changed the weights")
    case.step(ref)


def versions(case: EngineCase) -> None:
    """A version does not change while its adapter is trained or removed; without one the base model is sampled."""
    ref = case.trained()
    version = case.engine.version(ref)
    require(version.nbytes > 0, f"nbytes of a version is {version.nbytes}")
    before = case.sample(version, temperature=0)
    base = case.sample(None, temperature=0)
    for _ in range(3):
        case.backward(ref, case.rows())
        case.step(ref)
    after, present = case.sample(version, temperature=0), case.sample(case.engine.version(ref), temperature=0)
    require(_scores(after) == _scores(before), "a version samples otherwise after its adapter was trained")
    require(_scores(present) != _scores(before), "a new version samples like the old one")
    require(_scores(base) != _scores(before), "without a version the adapter is sampled")
    case.engine.remove(ref)
    require(_scores(case.sample(version, temperature=0)) == _scores(before), "a version changed with remove()")


def read_versions(case: EngineCase) -> None:
    """A version that was read from an export samples like the adapter's own."""
    ref = case.trained()
    own, again = case.engine.version(ref), case.engine.read_version(case.exported(ref))
    one, two = (case.tokens(version, temperature=0, max_tokens=8) for version in (own, again))
    require(one == two, f"the version of an adapter draws {one}, and the one read from its export {two}")
    require(again.nbytes > 0, f"nbytes of a version is {again.nbytes}")


def greedy(case: EngineCase) -> None:
    """Greedy samples are the most probable tokens of a forward, with its log-probabilities; so is `topk_logprobs`."""
    ref = case.trained()
    for adapter, version in ((None, None), (ref, case.engine.version(ref))):
        response = case.sample(version, temperature=0, max_tokens=8, topk_logprobs=2)
        (sequence,) = response.sequences
        require(response.prompt_token_ids in (None, list(_PROMPT)), "prompt_token_ids is not the prompt")
        require(sequence.logprobs is not None and sequence.topk_logprobs is not None, "there are no log-probabilities")
        ids = [*_PROMPT, *sequence.tokens]
        table = case.table(adapter, ids)[len(_PROMPT) - 1 : -1]
        for place, token in enumerate(sequence.tokens):
            first, logprob = sequence.logprobs[place][0]
            require(first == token, f"the drawn token {token} does not come first in logprobs")
            far = abs(logprob - float(table[place, token]))
            require(far <= case.precision, f"the log-probability of token {place} is {far:.3g} from that of a forward")
            gap = float(table[place].max()) - float(table[place, token])
            require(gap <= case.precision, f"token {place} is {token}; another one is more probable by {gap:.3g}")
            wanted = table[place].topk(2).values.tolist()
            found = [value for _, value in sequence.topk_logprobs[place]]
            fine = len(found) == 2 and all(abs(a - b) <= case.precision for a, b in zip(found, wanted, strict=True))
            require(fine, f"topk_logprobs of token {place} is {sequence.topk_logprobs[place]}, a forward's {wanted}")


def probabilities(case: EngineCase) -> None:
    """Tokens come as often as the model says at a temperature, and `top_k` and `top_p` cut the tail off."""
    draws, temperature = 200, 2.0
    chances = (case.table(None, _PROMPT)[-1] / temperature).softmax(-1)
    drawn = [tokens[0] for tokens in case.tokens(max_tokens=1, num_samples=draws, temperature=temperature, seed=3)]
    for token in chances.topk(3).indices.tolist():
        chance = float(chances[token])
        found, spread = drawn.count(token) / draws, math.sqrt(chance * (1 - chance) / draws)
        require(
            abs(found - chance) <= 5 * spread, f"token {token} has the probability {chance:.3f}, drawn were {found:.3f}"
        )
    best = chances.topk(2).indices.tolist()
    cut: Any
    for cut in ({"top_k": 2}, {"top_p": float(chances[best[0]]) + 1e-4}):
        found_ = {tokens[0] for tokens in case.tokens(max_tokens=1, num_samples=40, temperature=temperature, **cut)}
        require(found_ <= set(best), f"with {cut} it drew {sorted(found_ - set(best))}, which is not among {best}")


def lengths(case: EngineCase) -> None:
    """It draws `max_tokens` tokens at most, none for 0, and ends at a stop token, which is the last one."""
    for limit in (0, 1, 5):
        (sequence,) = case.sample(max_tokens=limit).sequences
        drawn, reason = len(sequence.tokens), sequence.stop_reason
        require(
            (drawn, reason) == (limit, "length"), f"max_tokens={limit} gave {drawn} tokens and the reason {reason!r}"
        )
    (free,) = case.tokens(temperature=0, max_tokens=6)
    stop = free[2]
    (sequence,) = case.sample(temperature=0, max_tokens=6, stop=[stop]).sequences
    wanted = free[: free.index(stop) + 1]
    require(list(sequence.tokens) == wanted, f"with stop=[{stop}] it drew {sequence.tokens}; without, {free}")
    require(sequence.stop_reason == "stop", f"at a stop token the reason is {sequence.stop_reason!r}")


def seeds(case: EngineCase) -> None:
    """A seed draws the same again beside any other request; another seed, and another sample, draw otherwise."""
    params = {"max_tokens": 8, "temperature": 1.5, "stop": [], "logprobs": None}
    alone = case.tokens(seed=5, **params)
    engine, submitted = case.engine, []
    for seed, prompt in ((7, (1, 2)), (5, _PROMPT), (8, (9, 8, 7, 6, 5, 4))):
        submitted.append(engine.submit(list(prompt), {**params, "seed": seed}))
        engine.decode()
    beside = [list(sequence.tokens) for sequence in submitted[1].result().sequences]
    for request in submitted:
        request.result()
    require(alone == beside, f"the seed 5 drew {alone} alone and {beside} beside others")
    require(case.tokens(seed=6, **params) != alone, "the seeds 5 and 6 draw the same")
    both = case.tokens(seed=[6, 5], num_samples=2, **params)
    require(both[1:] == alone, f"seed=[6, 5] drew {both[1:]} for the 5, and alone {alone}")
    many = case.tokens(seed=5, num_samples=3, **params)
    require(len({tuple(tokens) for tokens in many}) > 1, f"three samples of one seed are all {many[0]}")


def progress(case: EngineCase) -> None:
    """The pieces of `progress` join to the tokens of `result`, each with its log-probability."""
    params = {"max_tokens": 6, "logprobs": 1, "num_samples": 2, "seed": 2, "stop": []}
    request = case.engine.submit(list(_PROMPT), params)
    require(not request.done, "a request is done before anything was decoded")
    with raises("progress() of a sample that does not exist", ArgumentError):
        request.progress(2)
    pieces: list[list[int]] = [[], []]
    scores: list[list[float]] = [[], []]
    ended: list[Any] = [None, None]
    for _ in range(100):
        for sample in range(2):
            piece = request.progress(sample, len(pieces[sample]))
            pieces[sample] += piece.tokens
            scores[sample] += piece.logprobs
            ended[sample] = piece.stop_reason
        if request.done:
            break
        require(ended != ["length", "length"], "both samples have a stop reason, and the request is not done")
        case.engine.decode()
    response = request.result()
    for sample, sequence in enumerate(response.sequences):
        require(
            pieces[sample] == list(sequence.tokens), f"progress() gave {pieces[sample]}, result() {sequence.tokens}"
        )
        expected = [pairs[0][1] for pairs in sequence.logprobs]
        require(scores[sample] == expected, "progress() gave other log-probabilities than result()")
        require(ended[sample] == sequence.stop_reason, f"progress() ended with {ended[sample]!r}")
    plain = case.engine.submit(list(_PROMPT), {**params, "logprobs": None})
    plain.result()
    require(plain.progress().logprobs == [], "progress() has log-probabilities that were not asked for")


def cancellation(case: EngineCase) -> None:
    """`cancel` ends a request with the reason "abort" and the tokens that it has, and leaves the others alone."""
    params = {"max_tokens": 40, "seed": 2, "stop": []}
    request, other = (case.engine.submit(list(_PROMPT), {**params, "max_tokens": size}) for size in (40, 8))
    case.engine.decode()
    drawn = request.progress().tokens
    request.cancel()
    request.cancel()
    require(request.done, "a cancelled request is not done")
    (sequence,) = request.result().sequences
    require(sequence.stop_reason == "abort", f"a cancelled request has the stop reason {sequence.stop_reason!r}")
    require(list(sequence.tokens) == drawn, f"it had drawn {drawn} when it was cancelled, and has {sequence.tokens}")
    (expected,) = case.tokens(**{**params, "max_tokens": 8})
    (left,) = other.result().sequences
    require(list(left.tokens) == expected, "a request beside a cancelled one draws otherwise")
    other.cancel()
    require(left.stop_reason == "length", "cancel() changed a request that was done")
    for _ in range(100):
        if not case.engine.decode():
            return
    raise Violation("decode() goes on without a request")


def wrong_requests(case: EngineCase) -> None:
    """Prompts and parameters that make no sense are refused when they are submitted."""
    info, good = case.info, list(_PROMPT)
    prompts: dict[str, list[int]] = {"an empty prompt": [], "an id outside of the vocabulary": [1, info.vocabulary]}
    prompts |= {"a negative id": [1, -1]}
    if info.context <= 4096:
        prompts["a prompt longer than the context"] = [1] * (info.context + 1)
    for what, prompt in prompts.items():
        with raises(what, DataError):
            case.engine.submit(prompt, {"max_tokens": 1})
    for params in ({"no_such_parameter": 1}, {"top_p": 0.0}, {"temperature": -1.0}, {"num_samples": 0}):
        with raises(f"submit() with {params}", ArgumentError, ValueError):
            case.engine.submit(good, {"max_tokens": 1, **params})
    require(not case.engine.decode(), "decode() has something to do after all requests were refused")


def paging(case: EngineCase) -> None:
    """An adapter that was moved to host memory or disk trains on as if it had stayed; else `page` is `Unsupported`."""
    moved_, stayed = case.trained(), case.trained()
    if not case.has("page"):
        with raises("page() of an engine without the feature", Unsupported):
            case.engine.page(moved_, "host")
        raise NotApplicable("its features do not include 'page'")
    for to in ("host", "disk", "device"):
        for ref in (moved_, stayed):
            case.backward(ref, case.rows(0))
        case.engine.page(moved_, to, case.new_folder() if to == "disk" else None)
        held = case.engine.bytes_of(moved_)
        require(getattr(held, to) > 0, f"after page(..., {to!r}) bytes_of() is {held}")
        for ref in (moved_, stayed):
            case.backward(ref, case.rows(1))
            case.step(ref)
    require(same_bits(case.weights(moved_), case.weights(stayed)), "an adapter that was moved trains otherwise")


def composition(case: EngineCase) -> None:
    """An operation that is run again with its `composition`, without its neighbours, gives the same bits."""
    import torch

    case.needs("composition")
    first, again, other = case.trained(), case.trained(), case.trained(2)
    rows, kind = case.rows(1, 2), "forward_backward"
    beside = Operation(other, kind, case.rows(0, 3), token_nll)
    result = case.good(beside, Operation(first, kind, rows, token_nll))[1]
    recorded = json.loads(as_json(result.composition, "composition"))
    require(recorded, "composition is empty, though the features include it")
    (repeated,) = case.good(Operation(again, kind, rows, token_nll, composition=recorded))
    for one, two in zip(result.outputs, repeated.outputs, strict=True):
        same = torch.equal(torch.as_tensor(one["logps"]), torch.as_tensor(two["logps"]))
        require(same, "with the composition of an earlier run, log-probabilities have other bits")
    for ref in (first, again):
        case.step(ref)
    require(same_bits(case.weights(first), case.weights(again)), "with its composition, the gradient has other bits")


def interrupts(case: EngineCase) -> None:
    """`run` calls the function given to `interrupt` between passes; it may sample, and changes no number."""
    case.needs("interrupt")
    refs = [case.adapter(seed) for seed in range(3)]
    long = [{"input_ids": [7] * size, "labels": [7] * size} for size in [min(case.info.context, _budget(case))] * 2]
    operations = [Operation(ref, "forward", long, token_nll) for ref in refs]
    expected = _all_logps(case, operations)
    alone, drawn = case.tokens(seed=4), []
    requests: list[Any] = []

    def between() -> None:
        if not requests:
            params = {"max_tokens": 6, "logprobs": 1, "stop": [], "seed": 4}
            requests.append(case.engine.submit(list(_PROMPT), params))
        case.engine.decode()
        drawn.append(len(requests[0].progress().tokens))

    case.engine.interrupt(between)
    try:
        found = _all_logps(case, operations)
    finally:
        case.engine.interrupt(_nothing)
    require(drawn, f"run() of {len(refs)} operations, each of two full passes, did not call the function")
    require(drawn[0] > 0, "decode() between two passes drew nothing")
    require(apart(found, expected) <= case.precision, "sampling between passes changes log-probabilities")
    tokens = [list(sequence.tokens) for sequence in requests[0].result().sequences]
    require(tokens == alone, f"between passes it drew {tokens}, and alone {alone}")


def prompt_scores(case: EngineCase) -> None:
    """`prompt_logprobs` and `prompt_targets` are a forward's log-probabilities; without the feature: `Unsupported`."""
    size = len(_PROMPT)
    asked: dict[str, Any] = {"prompt_logprobs": 1, "prompt_targets": [[3, -1]] * size, "prompt_draws": 2}
    if not case.has("prompt_scores"):
        for name, value in asked.items():
            with raises(f"{name} without the feature prompt_scores", Unsupported):
                case.engine.submit(list(_PROMPT), {"max_tokens": 1, name: value})
        raise NotApplicable("its features do not include 'prompt_scores'")
    ref = case.trained()
    table = case.table(ref, _PROMPT)
    response = case.sample(case.engine.version(ref), max_tokens=1, prompt_temperature=1.0, **asked)
    scored, targets, draws = response.prompt_logprobs, response.prompt_target_logprobs, response.prompt_draws
    require(scored is not None and len(scored) == size and scored[0] is None, f"prompt_logprobs is {shown(scored)}")
    expected = [float(table[place, token]) for place, token in enumerate(_PROMPT[1:])]
    far = max(abs(found - wanted) for found, wanted in zip(scored[1:], expected, strict=True))
    require(far <= case.precision, f"prompt_logprobs is {far:.3g} from a forward's")
    require(targets is not None and len(targets) == size, f"prompt_target_logprobs is {shown(targets)}")
    for place, (first, second) in enumerate(targets):
        fine = second is None and abs(first - float(table[place, 3])) <= case.precision
        require(fine, f"prompt_target_logprobs {place} is {[first, second]}; a forward gives {float(table[place, 3])}")
    fine = draws is not None and len(draws) == size - 1 and all(len(pairs) == 2 for pairs in draws)
    require(fine, f"prompt_draws is {shown(draws)} for {size} tokens and 2 draws")


def stop_strings(case: EngineCase) -> None:
    """A text in `stop` ends a sample; without the feature it is `Unsupported`."""
    if not case.has("stop_strings"):
        with raises("a text in stop without the feature stop_strings", Unsupported):
            case.engine.submit(list(_PROMPT), {"max_tokens": 1, "stop": "a"})
        raise NotApplicable("its features do not include 'stop_strings'")
    for seed in range(8):
        (free,) = case.sample(seed=seed, max_tokens=8, temperature=1.5).sequences
        text = free.decoded or ""
        stop = next((letter for letter in text[1:] if letter.isascii() and letter.isalnum()), "")
        if not stop or stop in text[:1]:
            continue
        (ended,) = case.sample(seed=seed, max_tokens=8, temperature=1.5, stop=stop).sequences
        require(ended.stop_reason == "stop", f"with stop={stop!r} the reason is {ended.stop_reason!r} after {text!r}")
        same = list(free.tokens)[: len(ended.tokens)] == list(ended.tokens)
        require(same and len(ended.tokens) < 8, f"with stop={stop!r} it drew {ended.tokens}; without, {free.tokens}")
        return
    raise NotApplicable("in eight samples there was no text to stop at")


def output_projection(case: EngineCase) -> None:
    """An adapter of the output projection alone learns; without the feature it is `Unsupported`."""
    alone = {"train_attn": False, "train_mlp": False, "train_unembed": True}
    if not case.has("train_unembed"):
        with raises("an adapter of the output projection, without the feature,", Unsupported):
            case.engine.add("kit-unembed", replace(case.spec(), **alone))
        raise NotApplicable("its features do not include 'train_unembed'")
    ref = case.adapter(**alone)
    losses = []
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


CASE = EngineCase
CHECKS = (
    description,
    adapters,
    initial_weights,
    base_model,
    fresh_adapter,
    forward,
    usage,
    gradients_add,
    neighbours,
    failures,
    inputs_left_alone,
    norms,
    missing_gradients,
    optim_params,
    not_finite,
    snapshots,
    folders,
    exports,
    damaged_files,
    versions,
    read_versions,
    greedy,
    probabilities,
    lengths,
    seeds,
    progress,
    cancellation,
    wrong_requests,
    paging,
    composition,
    interrupts,
    prompt_scores,
    stop_strings,
    output_projection,
    native_losses,
)


def _all_logps(case: EngineCase, operations: Sequence[Operation]) -> list["Tensor"]:
    pairs = zip(operations, case.good(*operations), strict=True)
    return [read_logps(out, row) for op, result in pairs for out, row in zip(result.outputs, op.rows, strict=True)]


def _budget(case: EngineCase) -> Any:
    return case.engine.pass_tokens


def _nothing() -> None:
    """Do nothing."""


def _scores(response: Any) -> Any:
    return [sequence.logprobs for sequence in response.sequences]


def _is_optional(name: str) -> bool:
    """Return whether a file is one that people read, not the engine."""
    return name.lower().startswith("readme")
