"""The unmodified SDK works against the face by its address alone."""

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from twinkle_server.wire.codec import parse_request

tinker = pytest.importorskip("tinker")
np = pytest.importorskip("numpy")

BASE = "/models/of/tiny/v1"
SECONDS = 30
# The SDK leaves sockets of its first request to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::FutureWarning"
)


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_PROJECT_ID", "TINKER_TAGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def client(served) -> "Iterator[tinker.ServiceClient]":
    with tinker.ServiceClient(base_url=f"{served.url}/", api_key=served.key()) as made:
        yield made


def datum(rows: int = 3) -> "tinker.Datum":
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(1, rows + 1))),
        loss_fn_inputs={"target_tokens": list(range(2, rows + 2)), "weights": [1.0] * rows},
    )


@pytest.mark.full
def test_it_trains_and_finishes_its_session(served):
    with tinker.ServiceClient(base_url=served.url, api_key=served.key()) as client:
        training = client.create_lora_training_client(base_model=BASE, rank=8).result(SECONDS)
        result = training.forward_backward([datum(), datum(5)], "cross_entropy").result(SECONDS)
        assert [output["logprobs"].tolist() for output in result.loss_fn_outputs] == [[-1.0] * 3, [-1.0] * 5]
        assert result.metrics["loss:sum"] == 8.0
        assert training.optim_step(tinker.AdamParams()).result(SECONDS).metrics == {"grad_norm": 1.0}
        assert training.forward([datum()], "cross_entropy").result(SECONDS).metrics["loss:sum"] == 3.0
        assert training.get_info().model_data.model_name == BASE
    assert [made.kind for made in served.service.submissions] == [
        "create",
        "forward_backward",
        "optim_step",
        "forward",
    ]
    assert [made.number for made in served.service.submissions] == [0, 1, 2, 3]
    assert len(served.service.finished) == 1


def test_its_chunks_are_put_together_in_order(served, client):
    training = client.create_lora_training_client(base_model=BASE, rank=8).result(SECONDS)
    result = training.forward_backward([datum(1 + n % 7) for n in range(150)], "cross_entropy").result(SECONDS)
    assert [len(output["logprobs"].tolist()) for output in result.loss_fn_outputs] == [1 + n % 7 for n in range(150)]
    assert sorted(made.number for made in served.service.submissions) == [0, 1, 2, 3]


def test_its_custom_losses_are_computed_by_itself(served, client):
    training = client.create_lora_training_client(base_model=BASE, rank=8).result(SECONDS)

    def loss(_data, logprobs):  # type: ignore[no-untyped-def]
        return -sum(row.sum() for row in logprobs), {"mine": 1.0}

    result = training.forward_backward_custom([datum()], loss).result(SECONDS)
    assert result.metrics["loss:sum"] == 3.0
    assert [made.kind for made in served.service.submissions] == ["create", "forward", "forward_backward"]


def test_its_custom_losses_are_sent_where_that_is_switched_on(served):
    served.state.settings = replace(served.state.settings, custom_losses=True)

    def loss(logprobs, weights):  # type: ignore[no-untyped-def]
        return -(logprobs * weights).sum(), {"custom/mean:mean": logprobs.mean()}

    with tinker.ServiceClient(base_url=served.url, api_key=served.key()) as client:
        handle = client.create_custom_loss(loss, {"logprobs": 1, "weights": 1}).result(SECONDS)
        training = client.create_lora_training_client(base_model=BASE, rank=8).result(SECONDS)
        training.forward_backward_custom([datum()], handle).result(SECONDS)
    sent = parse_request(served.service.submissions[-1].payload)
    assert (sent.loss_fn, sent.loss_fn_config_v2["loss_id"].text) == ("custom", handle.loss_id)


def test_it_saves_and_goes_on_from_what_was_saved(served, client):
    training = client.create_lora_training_client(base_model=BASE, rank=8).result(SECONDS)
    path = training.save_state("first").result(SECONDS).path
    assert path.endswith("/weights/first")
    again = client.create_training_client_from_state_with_optimizer(path).result(SECONDS)
    assert again.get_info().lora_rank == 8
    again.load_state(path).result(SECONDS)
    again.forward_backward([datum()], "cross_entropy").result(SECONDS)
    kinds = [(made.kind, made.number) for made in served.service.submissions]
    assert kinds == [("create", 0), ("save", 1), ("create", 0), ("load", 1), ("forward_backward", 2)]


def test_it_samples_from_the_base_from_a_checkpoint_and_from_what_it_just_trained(served, client):
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    params = tinker.SamplingParams(max_tokens=4, temperature=0.5, stop=["x"])
    base = client.create_sampling_client(base_model=BASE).result(SECONDS)
    result = base.sample(prompt, num_samples=2, sampling_params=params).result(SECONDS)
    assert [sequence.tokens for sequence in result.sequences] == [[7, 8], [7, 8]]
    assert result.sequences[0].logprobs == [-0.5, -0.25]
    assert base.compute_logprobs(prompt).result(SECONDS) == [None, -1.0, -1.0]
    training = client.create_lora_training_client(base_model=BASE, rank=8).result(SECONDS)
    path = training.save_weights_for_sampler("named").result(SECONDS).path
    named = client.create_sampling_client(model_path=path).result(SECONDS)
    assert named.get_base_model() == BASE
    latest = training.save_weights_and_get_sampling_client().result(SECONDS)
    for one in (named, latest):
        assert len(one.sample(prompt, num_samples=1, sampling_params=params).result(SECONDS).sequences) == 1
    sources = [made for made in served.service.submissions if made.kind == "sample"]
    assert [b'"source":null' in made.payload for made in sources] == [True, True, False, False]


def test_its_samplers_hear_of_results_together_where_they_are_told_to(served, client):
    holder = client.holder
    flags = {"sample_use_retrieve_futures": True, "sample_join_sampling_session": True}
    holder._client_config = holder._client_config.model_copy(update=flags)
    sampling = client.create_sampling_client(base_model=BASE).result(SECONDS)
    prompt, params = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=4)
    clone = copy.copy(sampling)
    futures = [one.sample(prompt, num_samples=1, sampling_params=params) for one in (sampling, clone) for _ in range(3)]
    assert all(len(future.result(SECONDS).sequences) == 1 for future in futures)
    numbers = sorted(made.number // 1_000_000_000 for made in served.service.submissions)
    assert numbers == [0, 0, 0, 1, 1, 1]


def test_what_is_the_users_fault_is_told_in_seconds(client):
    with pytest.raises(tinker.RequestFailedError, match="got 'other'"):
        client.create_lora_training_client(base_model="other", rank=8).result(SECONDS)
    training = client.create_lora_training_client(base_model=BASE, rank=8).result(SECONDS)
    training.save_state("twice").result(SECONDS)
    with pytest.raises(tinker.RequestFailedError, match="already exists"):
        training.save_state("twice").result(SECONDS)
    with pytest.raises(tinker.RequestFailedError, match="a checkpoint name must be"):
        training.save_state("a..b/c").result(SECONDS)
    training.forward_backward([datum()], "cross_entropy").result(SECONDS)
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(model_path="tinker://nobody/sampler_weights/none").result(SECONDS)


def test_it_looks_after_its_checkpoints(served, client):
    training = client.create_lora_training_client(
        base_model=BASE, rank=8, user_metadata={"renderer_name": "role_colon"}
    ).result(SECONDS)
    path = training.save_state("kept", ttl_seconds=7200).result(SECONDS).path
    rest = tinker.RestClient(base_url=served.url, api_key=served.key())
    run = path.removeprefix("tinker://").partition("/")[0]
    [found] = rest.list_checkpoints(run).result(SECONDS).checkpoints
    assert (found.tinker_path, found.checkpoint_type, found.size_bytes) == (path, "training", 7)
    assert found.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(SECONDS)
    rest.publish_checkpoint_from_tinker_path(path).result(SECONDS)
    [found] = rest.list_user_checkpoints().result(SECONDS).checkpoints
    assert (found.public, found.expires_at) == (True, None)
    info = rest.get_weights_info_by_tinker_path(path).result(SECONDS)
    assert (info.base_model, info.lora_rank, info.train_mlp) == (BASE, 8, True)
    run_info = rest.get_training_run(run).result(SECONDS)
    assert run_info.user_metadata == {"renderer_name": "role_colon"}
    assert run_info.last_checkpoint.tinker_path == path
    assert [one.training_run_id for one in rest.list_training_runs().result(SECONDS).training_runs] == [run]
    copy = rest.copy_weights(path, destination_project_id="mine").result(SECONDS)
    assert copy != path
    stored = {project: in_store(served, project) for project in (None, "mine", "yours")}
    assert stored == {None: (2, 14), "mine": (1, 7), "yours": (0, 0)}
    rest.delete_checkpoint_from_tinker_path(path).result(SECONDS)
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result(SECONDS)
    assert rest.get_weights_info_by_tinker_path(copy).result(SECONDS).lora_rank == 8
    sessions = rest.list_sessions().result(SECONDS).sessions
    assert rest.get_session(sessions[0]).result(SECONDS).training_run_ids == [run]


def in_store(served, project):
    admin = tinker.AdminClient(base_url=served.url, api_key=served.key())
    [item] = admin.get_current_checkpoint_storage_usage(project_id=project).result(SECONDS).data
    assert item.project_id == project
    return item.checkpoint_count, item.size_bytes


@pytest.mark.full
def test_it_takes_external_weights_away(served, client):
    import httpx

    training = client.create_lora_training_client(base_model=BASE, rank=8).result(SECONDS)
    path = training.save_weights_external("mine").result(SECONDS).path
    urls = (
        tinker.RestClient(base_url=served.url, api_key=served.key())
        .get_external_weights_urls(path)
        .result(SECONDS)
        .urls
    )
    assert list(urls) == ["a.bin"]
    assert httpx.get(urls["a.bin"], headers={"X-API-Key": served.key()}, trust_env=False).content == b"weights"


@pytest.mark.full
def test_it_is_told_what_is_served(served):
    rest = tinker.RestClient(base_url=served.url, api_key=served.key())
    [model] = rest.get_server_capabilities().result(SECONDS).supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == (BASE, 128, True)
