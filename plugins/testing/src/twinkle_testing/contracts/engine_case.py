"""How the checks of an engine build it, train adapters, and compare numbers."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from twinkle_testing.contracts.case import Case, NotApplicable, Violation, require
from twinkle_testing.contracts.values import shown

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
_PRECISION = 1e-4
"""15 times the distance of the tiny model's log-probabilities in float32 from those in float64, which is 7e-6."""
_LARGE = 1e8
"""An eps of AdamW beside which gradients are small, so that updates are linear in the gradient."""
PROMPT = (5, 11, 23, 41)
LENGTHS = (9, 4, 13, 6)
MANIFEST = "manifest.json"
_MODEL_CELLS = 2**20
"""Log-probabilities of all tokens that a check may ask for."""


@dataclass(kw_only=True)
class EngineCase(Case):
    """An engine. All checks share one, and each adds adapters of its own.

    Attributes:
        model_id: folder of the base model; by default that of its arguments, or else a tiny random Llama.
        precision: tolerance for log-probabilities of the same row, and for updates relative to the largest.
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
        """The folder of the tiny model; its weights are large, so that the most probable tokens are unambiguous."""
        from twinkle.hub.quiet import quiet_transformers
        from twinkle_testing.models import tiny_model

        with quiet_transformers():
            return tiny_model(self.folder / "tiny", initializer_range=0.3)

    @property
    def place(self) -> str | Path:
        """The folder of its model."""
        return self.model_id or self.kwargs.get("model_id") or self.tiny

    def build(self, **more: Any) -> Any:
        """Return an engine; the first one is shared by all checks, because building one loads a model."""
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
        """The features that the engine declares."""
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

    def written(self, copied: Any) -> Path:
        """Return a new folder with a copy of an adapter, and a file beside it such as the server adds."""
        folder = self.new_folder()
        copied.write(folder)
        names = {path.name: path.is_file() for path in folder.iterdir()}
        require(all(names.values()), f"write() made {sorted(names)}; regular files are due, and no folders")
        require(MANIFEST not in names, f"write() made {MANIFEST}, which is the caller's")
        (folder / MANIFEST).write_text("{}", "utf-8")
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

    def rows(self, *numbers: int) -> list[Any]:
        """Return encoded rows of uneven length with a target for each token but the last; by default all four."""
        size = min(self.info.vocabulary, 250)
        made = []
        for number in numbers or range(len(LENGTHS)):
            ids = [(37 * number + 11 * place + 1) % size for place in range(LENGTHS[number])]
            made.append({"input_ids": ids, "labels": [*ids[1:], IGNORED]})
        return made

    def run(self, *operations: Operation) -> list[Any]:
        """Run operations, and check that each has a result of the right form at its index."""
        results: list[Any] = self.engine.run(list(operations))
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
        result: StepResult | OperationError = self.steps(Step(ref, **options))[0]
        if isinstance(result, OperationError):
            raise Violation(f"a step failed: {type(result.error).__name__}: {result.error}")
        norm: Any = result.grad_norm
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
        (result,) = self.good(Operation(adapter, "forward", list(rows)))
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

        named: dict[str, Tensor] = load_file(self.exported(ref) / "adapter_model.safetensors")
        return named

    def exported(self, ref: AdapterRef) -> Path:
        """Return a folder with the adapter in PEFT's format."""
        return self.written(self.engine.export(ref, "base-model"))

    def saved(self, ref: AdapterRef, *, gradient: bool = True) -> Path:
        """Return a folder with a snapshot of the adapter."""
        return self.written(self.engine.snapshot(ref, gradient=gradient))

    def restored(self, folder: Path) -> AdapterRef:
        """Return a new adapter in the state of a snapshot."""
        spec = self.engine.read_spec(folder)
        require(isinstance(spec, AdapterSpec), f"read_spec() of a snapshot gave {shown(spec)}")
        ref: AdapterRef = self.engine.add(f"kit-{next(self._names)}", spec)
        self.engine.restore(ref, folder)
        return ref

    def sample(self, version: Any = None, prompt: Sequence[int] = PROMPT, **params: Any) -> Any:
        """Return the response to a prompt."""
        params = {"max_tokens": 6, "logprobs": 1, "stop": [], "seed": 1, **params}
        return self.engine.submit(list(prompt), params, version).result()

    def tokens(self, version: Any = None, prompt: Sequence[int] = PROMPT, **params: Any) -> list[list[int]]:
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
    terms = -outputs["logps"] * (inputs["labels"] != IGNORED).to(outputs["logps"])
    if inputs.get("loss_scale") is not None:
        terms = terms * inputs["loss_scale"].to(terms)
    return LossOutput(terms.sum(), int((inputs["labels"] != IGNORED).sum()))


class LossFailed(Exception):
    """The error of the failing loss."""


def failing(inputs: Any, outputs: Any) -> LossOutput:
    """Raise an error, like a faulty loss."""
    raise LossFailed("this loss fails")


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
    """Return the change of each weight."""
    require(before.keys() == after.keys(), "export() gives other names than before")
    return {name: after[name].double() - before[name].double() for name in before}


def largest(update: Mapping[str, "Tensor"]) -> float:
    """Return the largest change of a weight."""
    return max(float(value.abs().max()) for value in update.values())


def near(
    case: EngineCase, one: Mapping[str, "Tensor"], two: Mapping[str, "Tensor"], what: str, of: float = 1.0
) -> None:
    """Require that an update is a multiple of another one, within the precision."""
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


def all_logps(case: EngineCase, operations: Sequence[Operation]) -> list["Tensor"]:
    """Return the log-probabilities of the rows of all operations, in order."""
    pairs = zip(operations, case.good(*operations), strict=True)
    return [read_logps(out, row) for op, result in pairs for out, row in zip(result.outputs, op.rows, strict=True)]
