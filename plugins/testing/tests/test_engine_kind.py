"""Engines: each check catches what is broken in that way, and nothing else does."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import Broken, after, broken, changed

from twinkle.data_format import SampleResponse
from twinkle.engine import AdapterSpec, Operation, OperationError, StepResult, Usage
from twinkle.errors import CheckpointError, NonFiniteError, Unsupported
from twinkle.testing import tiny_model
from twinkle_testing.contracts import examine
from twinkle_transformers.engine import TransformersEngine
from twinkle_transformers.lowrank.layout import AdapterVersion

Engine = TransformersEngine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kwargs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of every engine: one tiny model for all tests."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    return {"model_id": str(tiny_model(place, num_hidden_layers=1, initializer_range=0.3))}


def with_operations(change: Callable[[int, Operation], Operation]) -> type:
    """Return an engine that runs other operations than it was given."""

    def run(self: Any, operations: Any) -> Any:
        return Engine.run(self, [change(index, operation) for index, operation in enumerate(operations)])

    return changed(Engine, run=run)


def each_result(change: Callable[[Any], Any]) -> type:
    """Return an engine that changes the result of each operation."""
    return after(Engine, lambda results: [change(result) for result in results], "run")


def with_step(**values: Any) -> type:
    """Return an engine whose steps have other options than they were given."""

    def step(self: Any, steps: Any) -> Any:
        return Engine.step(self, [replace(step, **values) for step in steps])

    return changed(Engine, step=step)


def submitting(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> type:
    """Return an engine that samples with other parameters than it was given."""

    def submit(self: Any, tokens: Any, params: Any, version: Any = None, **options: Any) -> Any:
        return Engine.submit(self, tokens, change(dict(params)), version, **options)

    return changed(Engine, submit=submit)


def unsalted(self: Any, tokens: Any, params: Any, version: Any = None, cache_salt: str | None = None) -> Any:
    """Share what was computed of a prompt with everybody."""
    return Engine.submit(self, tokens, params, version)


def requests(**methods: Callable[..., Any]) -> type:
    """Return an engine whose requests have other methods; each is called with the request first."""

    def submit(self: Any, tokens: Any, params: Any, version: Any = None, **options: Any) -> Any:
        request: Any = Engine.submit(self, tokens, params, version, **options)
        for name, method in methods.items():
            setattr(request, name, method.__get__(request))
        return request

    return changed(Engine, submit=submit)


def by_name(self: Any, adapter: Any) -> Any:
    """Take the adapter that has the name now."""
    return Engine.version(self, self._pool.ref(adapter.name))


def one_seed(self: Any, name: str, spec: AdapterSpec) -> Any:
    """Ignore the seed."""
    ref = Engine.add(self, name, replace(spec, seed=0))
    self._specs[ref] = spec
    return ref


def other_model(self: Any, model_id: str) -> None:
    """Change the base model."""
    Engine.__init__(self, model_id)
    self._model.model.model.norm.weight.data *= 1.01


def not_zero(self: Any, name: str, spec: AdapterSpec) -> Any:
    """Begin with a product that is not zero."""
    ref = Engine.add(self, name, spec)
    tensors = Engine.export(self, ref, "base")
    for key, tensor in tensors.tensors.items():
        if "lora_B" in key:
            tensor.fill_(0.1)
    with tempfile.TemporaryDirectory() as folder:
        tensors.write(Path(folder))
        Engine.load(self, ref, Path(folder))
    return ref


def always_backward(index: int, operation: Operation) -> Operation:
    """Add the gradients of forwards too."""
    keeps_none = operation.loss is None or operation.adapter is None
    return operation if keeps_none else replace(operation, kind="forward_backward")


def first_alone(self: Any, operations: Any) -> Any:
    """Take the gradients of an adapter's first operation alone."""
    seen: set[Any] = set()
    given = []
    for operation in operations:
        given.append(replace(operation, kind="forward") if operation.adapter in seen else operation)
        seen.add(operation.adapter)
    return Engine.run(self, given)


def crowded(self: Any, operations: Any) -> Any:
    """Compute something else where there are many operations."""
    results = Engine.run(self, operations)
    for result in results if len(operations) > 3 else ():
        for output in getattr(result, "outputs", ()):
            output["logps"] = output["logps"] + 0.01
    return results


def misplaced(result: Any) -> Any:
    """Say that the first operation failed."""
    return replace(result, index=0) if isinstance(result, OperationError) else result


def consuming(index: int, operation: Operation) -> Operation:
    """Take the arguments of the loss away."""
    copied = replace(operation, loss_inputs=dict(operation.loss_inputs))
    operation.loss_inputs.clear()  # type: ignore[attr-defined]  # which is what is broken
    return copied


def no_momentum(self: Any, steps: Any) -> Any:
    """Do nothing where there is no gradient."""
    results = Engine.step(self, [replace(step, zero_if_none=False) for step in steps])
    for place, (step, result) in enumerate(zip(steps, results, strict=True)):
        if step.zero_if_none and "no accumulated gradients" in str(getattr(result, "error", "")):
            results[place] = StepResult(0.0)
    return results


def ignoring_options(self: Any, steps: Any) -> Any:
    """Ignore unknown options."""
    known = ("lr", "betas", "eps", "weight_decay")
    given = [replace(s, optim_params={k: v for k, v in s.optim_params.items() if k in known}) for s in steps]
    return Engine.step(self, given)


def other_error(result: Any) -> Any:
    """Report NaN as an error that says nothing."""
    nan = isinstance(getattr(result, "error", None), NonFiniteError)
    return replace(result, error=RuntimeError("failed")) if nan else result


def no_gradient(self: Any, adapter: Any, *, gradient: bool = True) -> Any:
    """Leave pending gradients out."""
    return Engine.snapshot(self, adapter, gradient=False)


def any_spec(self: Any, folder: Path) -> Any:
    """Take an export for a snapshot."""
    return AdapterSpec(4) if (folder / "adapter_config.json").exists() else Engine.read_spec(self, folder)


def other_base(self: Any, adapter: Any, base: str) -> Any:
    """Write another name of the base model."""
    return Engine.export(self, adapter, "another")


def wrong_error(self: Any, adapter: Any, folder: Path) -> None:
    """Raise what json and safetensors raise."""
    try:
        Engine.load(self, adapter, folder)
    except CheckpointError as error:
        raise RuntimeError("cannot load") from error


def first_version(self: Any, adapter: Any) -> Any:
    """Return the first version for ever."""
    kept = self.__dict__.setdefault("kept", {})
    return kept.setdefault(adapter, Engine.version(self, adapter))


def zeros(version: AdapterVersion) -> AdapterVersion:
    """Lose the weights."""
    return AdapterVersion(version.layout, torch.zeros_like(version.flat), "zeros")


def no_output_projection(self: Any, name: str, spec: AdapterSpec) -> Any:
    """Refuse what the features include."""
    if spec.train_unembed and not spec.train_mlp:
        raise Unsupported("the output projection alone cannot be adapted")
    return Engine.add(self, name, spec)


def scored_with_none(self: Any) -> SampleResponse:
    """Give the prompt no scores."""
    response = type(self).result(self)
    if response.prompt_logprobs is not None:
        response.prompt_logprobs = [None] * len(response.prompt_logprobs)
    return response


def without(name: str, when: Callable[[Any], bool]) -> type:
    """Return an engine that ignores some values of a sampling parameter."""

    def change(params: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in params.items() if key != name or not when(value)}

    return submitting(change)


def unmeasured_forwards(index: int, operation: Operation) -> Operation:
    """Score every forward as one of the adapter's."""
    seen = operation.kind == "forward" and operation.metrics_of is not None
    return replace(operation, adapter=operation.metrics_of) if seen else operation


def silent_schedulers(self: Any, steps: Any) -> Any:
    """Report a step whose scheduler failed as if nothing had happened."""
    results = Engine.step(self, steps)
    failed = [isinstance(result, OperationError) and "scheduler failed" in str(result.error) for result in results]
    return [StepResult(0.0) if bad else result for bad, result in zip(failed, results, strict=True)]


def without_metrics(self: Any, adapter: Any, *, gradient: bool = True) -> Any:
    """Leave out what metrics have seen, and have not seen yet."""
    copied = Engine.snapshot(self, adapter, gradient=gradient)
    tensors = {name: tensor for name, tensor in copied.tensors.items() if not name.startswith("passes/")}
    return replace(copied, tensors=tensors, state={k: v for k, v in copied.state.items() if k != "metrics"})


ENGINES: dict[str, Broken] = {
    "description": broken(after(Engine, lambda info: replace(info, features=info.features | {"magic"}), "describe")),
    "adapters": broken(changed(Engine, version=by_name)),
    "initial_weights": broken(changed(Engine, add=one_seed)),
    "base_model": broken(changed(Engine, __init__=other_model)),
    "fresh_adapter": broken(changed(Engine, add=not_zero)),
    "forward": broken(with_operations(always_backward)),
    "usage": broken(after(Engine, lambda usage: Usage(), "usage")),
    "gradients_add": broken(changed(Engine, run=first_alone)),
    "neighbours": broken(changed(Engine, run=crowded)),
    "failures": broken(each_result(misplaced)),
    "inputs_left_alone": broken(with_operations(consuming)),
    "norms": broken(with_step(max_grad_norm=0.0)),
    "missing_gradients": broken(changed(Engine, step=no_momentum)),
    "optim_params": broken(changed(Engine, step=ignoring_options)),
    "not_finite": broken(each_result(other_error)),
    "snapshots": broken(changed(Engine, snapshot=no_gradient)),
    "folders": broken(changed(Engine, read_spec=any_spec)),
    "exports": broken(changed(Engine, export=other_base)),
    "damaged_files": broken(changed(Engine, load=wrong_error)),
    "versions": broken(changed(Engine, version=first_version)),
    "read_versions": broken(after(Engine, zeros, "read_version")),
    "greedy": broken(submitting(lambda params: {**params, "temperature": params.get("temperature") or 0.7})),
    "probabilities": broken(without("top_k", lambda value: True)),
    "lengths": broken(
        submitting(lambda params: {**params, "stop": [s for s in params.get("stop") or [] if type(s) is str]})
    ),
    "seeds": broken(submitting(lambda params: {**params, "seed": _first(params.get("seed"))})),
    "progress": broken(requests(progress=lambda self, sample=0, start=0: type(self).progress(self, sample, 0))),
    "cancellation": broken(requests(cancel=lambda self: type(self).result(self) and None)),
    "cache_salts": broken(changed(Engine, submit=unsalted)),
    "wrong_requests": broken(without("no_such_parameter", lambda value: True)),
    "paging": broken(changed(Engine, page=lambda self, adapter, to, folder=None: None)),
    "composition": broken(each_result(lambda r: r if isinstance(r, OperationError) else replace(r, composition=[]))),
    "early_results": broken(changed(Engine, report=lambda self, ended: None)),
    "own_components": broken(after(Engine, lambda progress: replace(progress, updates=0), "progress")),
    "evaluation": broken(with_operations(unmeasured_forwards)),
    "components_in_snapshots": broken(changed(Engine, snapshot=without_metrics)),
    "wrong_components": broken(changed(Engine, step=silent_schedulers)),
    "interrupts": broken(changed(Engine, interrupt=lambda self, between: None)),
    "prompt_scores": broken(requests(result=scored_with_none)),
    "stop_strings": broken(without("stop", lambda value: isinstance(value, str))),
    "min_p": broken(without("min_p", lambda value: True)),
    "logit_bias": broken(without("logit_bias", lambda value: True)),
    "penalties": broken(without("frequency_penalty", lambda value: True)),
    "structured_outputs": broken(without("structured_outputs", lambda value: value["json"]["type"] == "object")),
    "output_projection": broken(changed(Engine, add=no_output_projection)),
    "native_losses": broken(
        after(Engine, lambda info: replace(info, losses=frozenset({"made_up"})), "describe"),
        loss_inputs={"made_up": {}},
    ),
}


def _first(seed: Any) -> Any:
    return seed[0] if isinstance(seed, list) else seed


@pytest.mark.sample(12)
@pytest.mark.parametrize("check", ENGINES)
def test_a_broken_one_is_caught(check: str, catches: Any, kwargs: Any) -> None:
    component, example = ENGINES[check]
    catches("engine", check, component, **example, kwargs=kwargs)


@pytest.mark.soak
@pytest.mark.parametrize("check", ENGINES)
def test_a_broken_one_fails_one_check_alone(check: str, kwargs: Any) -> None:
    component, example = ENGINES[check]
    report = examine(component, "engine", **example, kwargs=kwargs)
    assert {result.name for result in report.results if result.outcome == "failed"} == {check}, report.text()


def test_a_loss_that_an_engine_names_is_run(kwargs: Any) -> None:
    named = after(Engine, lambda info: replace(info, losses=frozenset({"cross_entropy"})), "describe")
    report = examine(named, "engine", only=lambda name: name == "native_losses", kwargs=kwargs)
    assert report["native_losses"].outcome == "passed"


def test_every_check_has_an_engine_that_breaks_it(own_checks: Any) -> None:
    assert set(ENGINES) == own_checks("engine")
