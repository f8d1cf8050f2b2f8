"""Models, samplers and checkpoint engines: each check catches what is broken in that way."""

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import Broken, after, broken, changed

from twinkle.checkpoint_engine import CheckpointEngine
from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.errors import DataError
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.sampler import TorchSampler

Model, Sampler = TransformersModel, TorchSampler


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
    return {"model": tiny_model(place / "trained", num_hidden_layers=1), "sampler": sampled}


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


BROKEN: dict[tuple[str, str], Broken] = {
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
    ("sampler", "empty_input"): broken(changed(Sampler, sample=fussy)),
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


@pytest.mark.sample(12)
@pytest.mark.parametrize(("kind", "check"), BROKEN)
def test_a_broken_one_is_caught(kind: str, check: str, catches: Any, models: Any, tmp_path: Path) -> None:
    component, example = BROKEN[kind, check]
    files = {"kwargs": {"folder": str(tmp_path)}, "start": "fork", "seconds": 10.0}
    more = files if kind == "checkpoint_engine" else built(kind, models)
    catches(kind, check, component, **example, **more)


@pytest.mark.full
def test_a_good_engine_passes(passes: Any, tmp_path: Path) -> None:
    passes("checkpoint_engine", Files, kwargs={"folder": str(tmp_path)}, start="fork")


@pytest.mark.parametrize("kind", ["model", "sampler", "checkpoint_engine"])
def test_every_check_has_a_component_that_breaks_it(kind: str, own_checks: Any) -> None:
    assert {check for of, check in BROKEN if of == kind} == own_checks(kind)
