"""An engine that is no member of the house, in plain torch, keeps the contract and serves the unmodified Tinker SDK."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import server_sdk as sdk
import torch
from handwritten import handwritten_engine
from serving import Served, commanded

from twinkle import registry
from twinkle.engine import AdapterSpec, Engine, Operation, OperationResult, Step, StepResult
from twinkle.testing import tiny_model
from twinkle_testing.contracts import examine
from twinkle_transformers.engine import TransformersEngine

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
TOKENS, OTHER = list(range(5, 25)), [200, 100, 50, 25, 12]
ABSENT = {
    "paging", "composition", "prompt_scores", "stop_strings", "native_losses", "min_p", "logit_bias", "penalties",
    "structured_outputs", "own_components", "evaluation", "components_in_snapshots", "wrong_components",
    "early_results",
}  # fmt: skip
"""Checks of features that the engine does not have; they check that it refuses them."""
ADAM = sdk.tinker.AdamParams(learning_rate=1e-2)
SECONDS = 60.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> str:
    return handwritten_engine(tmp_path_factory.mktemp("projects"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny" / "v1", initializer_range=0.1)


def test_it_is_written_without_transformers(backend: str) -> None:
    imports = list(ast.walk(ast.parse(Path(backend.rpartition(":")[0]).read_text("utf-8"))))
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    others = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert others == {"safetensors", "torch", "twinkle"}


def test_it_keeps_the_contract(backend: str) -> None:
    report = examine(backend, "engine")
    assert report.ok, report.text()
    assert {result.name for result in report.skipped} == ABSENT


@pytest.mark.full
def test_both_engines_compute_the_same_update_and_read_each_others_adapters(
    backend: str, tiny: Path, tmp_path: Path
) -> None:
    engines: list[Engine] = [registry().build(backend, "engine", model_id=str(tiny)), TransformersEngine(str(tiny))]
    rows = [{"input_ids": ids[:-1], "labels": ids[1:]} for ids in (TOKENS, OTHER)]
    start = engines[0].add("start", AdapterSpec(rank=4, seed=1))
    engines[0].export(start, "tiny").write(tmp_path)
    norms, found = [], []
    for engine in engines:
        ref = engine.add("a", AdapterSpec(rank=4))
        engine.load(ref, tmp_path)
        engine.set_optimizer(ref, "AdamW", lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            (done,) = engine.run([Operation(ref, "forward_backward", rows, "cross_entropy")])
            assert isinstance(done, OperationResult)
            (step,) = engine.step([Step(ref, max_grad_norm=1.0)])
            assert isinstance(step, StepResult)
            norms.append(step.grad_norm)
        folder = tmp_path / type(engine).__name__
        folder.mkdir()
        engine.export(ref, "tiny").write(folder)
        found.append((done.loss_sum, folder))
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-4)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    params = {"max_tokens": 8, "temperature": 0, "stop": []}
    for _, folder in found:
        one, two = (e.submit(TOKENS[:4], params, e.read_version(folder)).result().sequences[0].tokens for e in engines)
        assert one == two


@pytest.fixture(scope="module")
def service(backend: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("served") / "data"
    served = commanded(["twinkle", "serve", str(tiny), "--data", str(data), "--backend", backend]).start()
    yield served
    assert served.stop() == 0


def importance(tokens: list[int], logprobs: list[float], advantage: float) -> sdk.tinker.Datum:
    """Return a row for `importance_sampling`: all its targets were sampled."""
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": [advantage] * len(logprobs)}
    return sdk.tinker.Datum(model_input=sdk.prompt(tokens[:-1]), loss_fn_inputs=inputs)


def loss(training: sdk.tinker.TrainingClient, tokens: list[int]) -> float:
    """Make a step of cross entropy, and return the loss before it."""
    done = training.forward_backward([sdk.row(tokens)], "cross_entropy")
    training.optim_step(ADAM)
    return float(done.result(SECONDS).metrics["loss:sum"])


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_the_sdk_trains_saves_samples_and_goes_on_after_the_engine_was_killed(service: Served, tiny: Path) -> None:
    greedy = sdk.tinker.SamplingParams(max_tokens=6, temperature=0.0, stop=[0])
    with sdk.opened(service.url, service.key) as client:
        training = sdk.trainer(client, str(tiny), rank=4, seed=1)
        losses = [loss(training, TOKENS) for _ in range(4)]
        assert losses == sorted(losses, reverse=True), "the loss goes down"
        assert losses[-1] < 0.9 * losses[0]

        before = sdk.logprobs(training, OTHER)
        training.forward_backward([importance(OTHER, before, 1.0)], "importance_sampling").result(SECONDS)
        norm = training.optim_step(ADAM).result(SECONDS).metrics["grad_norm"]
        assert norm > 0
        assert sum(sdk.logprobs(training, OTHER)) > sum(before), "what has an advantage becomes more probable"

        path = training.save_state("middle").result(SECONDS).path
        kept = sdk.logprobs(training, OTHER)
        loss(training, OTHER)
        changed = sdk.logprobs(training, OTHER)
        assert changed != kept
        training.load_state(path).result(SECONDS)
        assert sdk.logprobs(training, OTHER) == kept

        sampler = training.save_weights_and_get_sampling_client().result(SECONDS)
        drawn = sampler.sample(sdk.prompt(TOKENS[:5]), 1, greedy).result(SECONDS).sequences[0]
        assert len(drawn.tokens) == len(drawn.logprobs) == 6
        scored = sdk.logprobs(training, TOKENS[:5] + drawn.tokens)[4:]
        assert drawn.logprobs == pytest.approx(scored, abs=1e-4), "samples come from the trained weights"
        varied = sdk.tinker.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
        several = sampler.sample(sdk.prompt(TOKENS[:5]), 3, varied).result(SECONDS).sequences
        assert len({tuple(sequence.tokens) for sequence in several}) > 1

        training.forward_backward([sdk.row(TOKENS)], "cross_entropy").result(SECONDS)  # waits for its step
        first = service.engine()
        assert service.kill_engine()
        training.optim_step(ADAM).result(SECONDS)
        assert service.engine() not in (None, first), "another process serves"
        recovered = sdk.logprobs(training, OTHER)
        again = client.create_training_client_from_state(path).result(SECONDS)
        loss(again, TOKENS)
        assert recovered == sdk.logprobs(again, OTHER), "the gradient was not lost with its process"
        repeated = sampler.sample(sdk.prompt(TOKENS[:5]), 1, greedy).result(SECONDS).sequences[0]
        assert (repeated.tokens, repeated.logprobs) == (drawn.tokens, drawn.logprobs)


@pytest.mark.full
def test_two_tenants_train_at_once_as_if_each_were_alone(service: Served, tiny: Path) -> None:
    keys = [service.new_key(name) for name in ("ada", "bob")]
    with sdk.opened(service.url, keys[0]) as ada, sdk.opened(service.url, keys[1]) as bob:
        alone = sdk.trainer(ada, str(tiny), rank=4, seed=5)
        expected = [loss(alone, TOKENS) for _ in range(3)]
        clients = [sdk.trainer(ada, str(tiny), rank=4, seed=5), sdk.trainer(bob, str(tiny), rank=8, seed=6)]
        promises = []
        for _ in range(3):
            for training, tokens in zip(clients, (TOKENS, OTHER), strict=True):
                promises.append(training.forward_backward([sdk.row(tokens)], "cross_entropy"))
                training.optim_step(ADAM)
        found = [float(promise.result(SECONDS).metrics["loss:sum"]) for promise in promises]
        assert found[::2] == expected
        assert found[1::2] == sorted(found[1::2], reverse=True)
        path = clients[1].save_state("own").result(SECONDS).path
        with pytest.raises(sdk.tinker.RequestFailedError, match=r"checkpoint .* does not exist"):
            ada.create_training_client_from_state(path).result(SECONDS)


def test_what_the_engine_cannot_do_is_an_error_of_the_request(service: Served, tiny: Path) -> None:
    with sdk.opened(service.url, service.key) as client:
        sampler = client.create_sampling_client(base_model=str(tiny)).result(SECONDS)
        with pytest.raises(sdk.tinker.TinkerError, match="prompt_logprobs"):
            sampler.compute_logprobs(sdk.prompt(TOKENS)).result(SECONDS)
        training = sdk.trainer(client, str(tiny), rank=2)
        assert len(sdk.logprobs(training, TOKENS)) == len(TOKENS) - 1, "the service goes on"
