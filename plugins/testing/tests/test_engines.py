"""Models, engines, samplers and checkpoint engines: each check catches what is broken in that way."""

import asyncio
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import Broken, after, broken, changed

from twinkle.checkpoint_engine import CheckpointEngine
from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.engine import AdapterSpec, Operation, OperationError, StepResult, Usage
from twinkle.errors import CheckpointError, DataError, NonFiniteError, Unsupported
from twinkle.testing import tiny_model
from twinkle_testing.contracts import examine
from twinkle_transformers.engine import TransformersEngine
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.sampler import TorchSampler
from twinkle_transformers.versions import AdapterVersion

Model, Sampler, Engine = TransformersModel, TorchSampler, TransformersEngine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model for each kind, so that no test makes its own."""
    place = tmp_path_factory.mktemp("models")
    sampled = tiny_model(place / "sampled", num_hidden_layers=1, initializer_range=0.3)
    return {"model": tiny_model(place / "trained", num_hidden_layers=1), "sampler": sampled, "engine": sampled}


def built(kind: str, models: dict[str, Path]) -> dict[str, Any]:
    """Return the example that builds a component of this kind."""
    plain = {"mixed_precision": "no"} if kind == "model" else {}
    return {"kwargs": {"model_id": str(models[kind]), **plain}} if kind in models else {}


class Files(CheckpointEngine):
    """Weights as files in a folder, each renamed when it is whole, and a last one that says how many there are."""

    def __init__(self, folder: str = "") -> None:
        self.folder, self.round = Path(folder), 0

    def prepare(self) -> dict[str, Any]:
        self.round = 0
        return {}

    @classmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: Any) -> Any:
        name = f"{time.time_ns()}"
        return {"name": [name] * trainer_world_size}, {"name": [name] * rollout_world_size}

    def init_process_group(self, **kwargs: Any) -> None:
        self.place = self.folder / kwargs["name"]
        self.place.mkdir(exist_ok=True)

    def finalize(self) -> None:
        self.round = 0

    async def send_weights(self, weights: Any) -> None:
        self.round += 1
        count = 0
        for name, tensor in weights:
            self.write(str(count), (name, tensor.clone()))
            count += 1
        self.write("end", count)

    def write(self, name: str, value: Any) -> None:
        path = self.place / f"{self.round}-{name}"
        path.with_suffix(".part").write_bytes(pickle.dumps(value))
        path.with_suffix(".part").rename(path)

    async def receive_weights(self) -> AsyncIterator[Any]:
        self.round += 1
        count = await self.read("end")
        for number in range(count):
            yield await self.read(str(number))

    async def read(self, name: str) -> Any:
        for _ in range(50):
            if (path := self.place / f"{self.round}-{name}").exists():
                return pickle.loads(path.read_bytes())
            await asyncio.sleep(0.02)
        raise ConnectionError("the trainer is silent")


class Reversed(Files):
    """Gives names to the wrong weights."""

    def write(self, name: str, value: Any) -> None:
        super().write(name, value if name == "end" else (value[0], value[1] + 1))


class Stale(Files):
    """Gives the first weights each time."""

    async def read(self, name: str) -> Any:
        self.round = 1
        return await super().read(name)


class Once(Files):
    """Cannot be used again."""

    def finalize(self) -> None:
        del self.round


class Hopeful(Files):
    """Takes silence for the end."""

    async def receive_weights(self) -> AsyncIterator[Any]:
        self.round += 1
        for number in range(8):
            try:
                yield await self.read(str(number))
            except ConnectionError:
                return


def forgets_size(self: Any, *, inputs: Any, micro_batch_size: Any = None, **kwargs: Any) -> Any:
    """Average micro-batches, whatever their size."""
    found = None
    for row in inputs if micro_batch_size == 1 else [inputs]:
        found = Model.forward_backward(self, inputs=row, **kwargs)
    if micro_batch_size == 1:
        for parameter in self.model.parameters():
            parameter.grad *= 1.5
    return found


def always_steps(self: Any, **kwargs: Any) -> None:
    """Step at each backward."""
    Model.step(self, **{**kwargs, "flush": True})


def steps_wrongly(self: Any, gradient_accumulation_steps: int = 1, **kwargs: Any) -> None:
    """Scale the gradients by the number of backwards."""
    for parameter in self.model.parameters():
        if parameter.grad is not None:
            parameter.grad *= gradient_accumulation_steps
    Model.step(self, gradient_accumulation_steps=gradient_accumulation_steps, **kwargs)


def no_clip(self: Any, max_grad_norm: float = 1.0, norm_type: float = 2, **kwargs: Any) -> float:
    """Clip at infinity."""
    return Model.clip_grad_norm(self, 1e30, norm_type, **kwargs)


def keeps(self: Any, **kwargs: Any) -> None:
    """Keep the gradients."""


def text_metric(self: Any, is_training: bool, **kwargs: Any) -> Any:
    """Format the numbers."""
    return {k: f"{v}" for k, v in Model.calculate_metric(self, is_training, **kwargs).items()}


def loads_nothing(self: Any, name: str, output_dir: Any = None, **kwargs: Any) -> None:
    """Load nothing."""


def resumes_weights(self: Any, checkpoint_dir: str, **kwargs: Any) -> Any:
    """Leave the optimizer as it is."""
    return Model.resume_from_checkpoint(self, checkpoint_dir, resume_only_model=True)


def takes_all(self: Any, *, inputs: Any, **kwargs: Any) -> Any:
    """Ignore keywords."""
    return Model.forward_backward(self, inputs=inputs)


def patient(self: Any, **kwargs: Any) -> None:
    """Do nothing where there was no forward."""


def empties(self: Any, *, inputs: Any, **kwargs: Any) -> Any:
    """Empty the rows."""
    found = Model.forward_backward(self, inputs=[dict(row) for row in inputs], **kwargs)
    for row in inputs:
        row.clear()
    return found


def dropping(self: Any, *, inputs: Any, **kwargs: Any) -> Any:
    """Add noise, as dropout does."""
    found = Model.forward_only(self, inputs=inputs, **kwargs)
    return {**found, "logps": found["logps"] * torch.rand(())}


def loss_text(found: float) -> Any:
    return f"{found:.3f}"


def each(change: Any) -> type:
    """Return a sampler whose sequences are changed."""

    def call(responses: list[SampleResponse]) -> list[SampleResponse]:
        for response in responses:
            response.sequences = [change(sequence) for sequence in response.sequences]
        return responses

    return after(Sampler, call, "sample")


def drops(sequence: SampledSequence) -> SampledSequence:
    """Leave the last token out."""
    sequence.stop_reason = "finished"  # type: ignore[assignment]
    return sequence


def with_params(**values: Any) -> type:
    """Return a sampler that samples with other parameters than it was given."""

    def call(self: Any, inputs: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        return Sampler.sample(self, inputs, {**sampling_params, **values}, **kwargs)

    return changed(Sampler, sample=call)


def warmer(self: Any, inputs: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
    """Draw at another temperature, and score at the one given."""
    params = {"temperature": 1.0, **sampling_params}
    return Sampler.sample(self, inputs, {**params, "temperature": max(0.05, params["temperature"] / 4)}, **kwargs)


def unseeded(self: Any, inputs: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
    """Use torch's generator for the seed."""
    return Sampler.sample(self, inputs, {**sampling_params, "seed": int(torch.randint(0, 10**6, ()))}, **kwargs)


def longer(self: Any, inputs: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
    """Draw one token more."""
    more = sampling_params.get("max_tokens", 1) + 1
    return Sampler.sample(self, inputs, {**sampling_params, "max_tokens": more}, **kwargs)


def empty_row(sequence: SampledSequence) -> SampledSequence:
    """Give no row to train on."""
    sequence.new_input_feature = None
    return sequence


def fussy(self: Any, inputs: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
    """Refuse an empty call."""
    if not inputs:
        raise DataError("nothing to sample")
    return Sampler.sample(self, inputs, sampling_params, **kwargs)


def taking(self: Any, inputs: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
    """Take the parameters away."""
    found = Sampler.sample(self, inputs, dict(sampling_params))
    sampling_params.clear()
    return found


def ignoring(self: Any, inputs: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
    """Ignore keywords."""
    return Sampler.sample(self, inputs, sampling_params)


def off(sequence: SampledSequence) -> SampledSequence:
    """Shift the log-probabilities."""
    sequence.logprobs = [[(token, value - 0.01) for token, value in entry] for entry in sequence.logprobs or []]
    return sequence


def unscored(response: list[SampleResponse]) -> list[SampleResponse]:
    """Give the prompt no scores."""
    for each_one in response:
        each_one.prompt_logprobs = None
    return response


def breaks(self: Any) -> None:
    """Lose the weights."""
    for parameter in self.model.parameters():
        parameter.data.zero_()


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

    def submit(self: Any, tokens: Any, params: Any, version: Any = None) -> Any:
        return Engine.submit(self, tokens, change(dict(params)), version)

    return changed(Engine, submit=submit)


def requests(**methods: Callable[..., Any]) -> type:
    """Return an engine whose requests have other methods; each is called with the request first."""

    def submit(self: Any, tokens: Any, params: Any, version: Any = None) -> Any:
        request: Any = Engine.submit(self, tokens, params, version)
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
        submitting(lambda params: {**params, "stop": [s for s in params.get("stop", []) if type(s) is str]})
    ),
    "seeds": broken(submitting(lambda params: {**params, "seed": _first(params.get("seed"))})),
    "progress": broken(requests(progress=lambda self, sample=0, start=0: type(self).progress(self, sample, 0))),
    "cancellation": broken(requests(cancel=lambda self: type(self).result(self) and None)),
    "wrong_requests": broken(without("no_such_parameter", lambda value: True)),
    "paging": broken(changed(Engine, page=lambda self, adapter, to, folder=None: None)),
    "composition": broken(each_result(lambda r: r if isinstance(r, OperationError) else replace(r, composition=[]))),
    "interrupts": broken(changed(Engine, interrupt=lambda self, between: None)),
    "prompt_scores": broken(requests(result=scored_with_none)),
    "stop_strings": broken(without("stop", lambda value: isinstance(value, str))),
    "output_projection": broken(changed(Engine, add=no_output_projection)),
    "native_losses": broken(
        after(Engine, lambda info: replace(info, losses=frozenset({"made_up"})), "describe"),
        loss_inputs={"made_up": {}},
    ),
}


def _first(seed: Any) -> Any:
    return seed[0] if isinstance(seed, list) else seed


BROKEN: dict[tuple[str, str], Broken] = {
    **{("engine", check): example for check, example in ENGINES.items()},
    ("model", "forward_form"): broken(
        after(Model, lambda out: {**out, "logps": out["logps"].double()}, "forward_only")
    ),
    ("model", "forward_repeats"): broken(changed(Model, forward_only=dropping)),
    ("model", "steps_by_hand"): broken(after(Model, loss_text, "calculate_loss")),
    ("model", "micro_batches"): broken(changed(Model, forward_backward=forgets_size)),
    ("model", "accumulation"): broken(changed(Model, step=steps_wrongly)),
    ("model", "acts_at_k"): broken(changed(Model, step=always_steps)),
    ("model", "clipping"): broken(changed(Model, clip_grad_norm=no_clip)),
    ("model", "zero_grad"): broken(changed(Model, zero_grad=keeps)),
    ("model", "metrics"): broken(changed(Model, calculate_metric=text_metric)),
    ("model", "save_and_load"): broken(changed(Model, load=loads_nothing)),
    ("model", "resume"): broken(changed(Model, resume_from_checkpoint=resumes_weights)),
    ("model", "unknown_arguments"): broken(changed(Model, forward_backward=takes_all)),
    ("model", "impossible_orders"): broken(changed(Model, backward=patient)),
    ("model", "inputs_left_alone"): broken(changed(Model, forward_backward=empties)),
    ("model", "summary"): broken(changed(Model, get_train_configs=lambda self: "")),
    ("sampler", "responses"): broken(each(drops)),
    ("sampler", "nothing_asked"): broken(changed(Sampler, sample=fussy)),
    ("sampler", "greedy"): broken(with_params(temperature=1.0, seed=1)),
    ("sampler", "logprobs"): broken(each(off)),
    ("sampler", "prompt_logprobs"): broken(after(Sampler, unscored, "sample")),
    ("sampler", "seeds"): broken(with_params(seed=1)),
    ("sampler", "generators_left_alone"): broken(changed(Sampler, sample=unseeded)),
    ("sampler", "max_tokens"): broken(changed(Sampler, sample=longer)),
    ("sampler", "stop_tokens"): broken(with_params(stop=None)),
    ("sampler", "stop_strings"): broken(with_params(stop=None)),
    ("sampler", "trains"): broken(each(empty_row)),
    ("sampler", "inputs_left_alone"): broken(changed(Sampler, sample=taking)),
    ("sampler", "bad_arguments"): broken(changed(Sampler, sample=ignoring)),
    ("sampler", "probabilities"): broken(changed(Sampler, sample=warmer)),
    ("sampler", "prefixes"): broken(changed(Sampler, reset_prefix_cache=breaks)),
    ("checkpoint_engine", "round_trip"): broken(Reversed),
    ("checkpoint_engine", "repeated"): broken(Stale),
    ("checkpoint_engine", "finalized"): broken(Once),
    ("checkpoint_engine", "killed_in_the_middle"): broken(Hopeful),
}


@pytest.mark.parametrize(("kind", "check"), BROKEN)
def test_a_broken_one_is_caught(kind: str, check: str, catches: Any, models: Any, tmp_path: Path) -> None:
    component, example = BROKEN[kind, check]
    files = {"kwargs": {"folder": str(tmp_path)}, "start": "fork", "seconds": 10.0}
    more = files if kind == "checkpoint_engine" else built(kind, models)
    catches(kind, check, component, **example, **more)


def test_a_good_engine_passes(passes: Any, tmp_path: Path) -> None:
    passes("checkpoint_engine", Files, kwargs={"folder": str(tmp_path)}, start="fork")


@pytest.mark.soak
@pytest.mark.parametrize("check", ENGINES)
def test_a_broken_engine_fails_one_check_alone(check: str, models: Any) -> None:
    component, example = ENGINES[check]
    report = examine(component, "engine", **example, **built("engine", models))
    assert {result.name for result in report.results if result.outcome == "failed"} == {check}, report.text()


@pytest.mark.parametrize("kind", ["model", "engine", "sampler", "checkpoint_engine"])
def test_every_check_has_a_component_that_breaks_it(kind: str, own_checks: Any) -> None:
    assert {check for of, check in BROKEN if of == kind} == own_checks(kind)
