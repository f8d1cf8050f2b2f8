"""Two tenants on one service at once, each through every face that it has, get what each gets alone.

One trains with the Tinker SDK, the other with our client; both chat meanwhile with their tuned adapters through the
unmodified SDKs of OpenAI and Anthropic, and sample through Tinker. Neither sees the other's models.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import server_sdk as sdk
import tinker
from deferred import Deferred
from native_rows import CONFIG, rows
from serving import Served, pool

from twinkle.testing import tiny_model
from twinkle_client import MultiLoraTransformersModel, TwinkleClient, vLLMSampler
from twinkle_client.errors import NotFound, TwinkleClientError

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]
anthropic: Any = Deferred("anthropic")
openai: Any = Deferred("openai")
BASE = "acme/tiny"
STEPS = 4
TOKENS = 8
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = [5, 6, 7, 8]
ADAM = tinker.AdamParams(learning_rate=1e-2)


@dataclass
class Seen:
    """What a tenant has got.

    Attributes:
        run: id of its model.
        losses: of its steps.
        texts: answers of each face after each step.
        sampled: tokens through Tinker, or through our sampler, at the end.
        models: names that `/v1/models` lists.
    """

    run: str = ""
    losses: list[float] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)


Visit = Callable[[str, str, Callable[[], None]], Seen]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("faces")
    base = tiny_model(folder / "base", initializer_range=0.1)
    served = pool(folder / "data", base, {"name": BASE, "auth": True}).start()
    yield served
    assert served.stop() == 0


class Chats:
    """Both chat SDKs with one key."""

    def __init__(self, url: str, key: str) -> None:
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=sdk.SECONDS)
        self.claude = anthropic.Anthropic(base_url=url, api_key=key, timeout=sdk.SECONDS)

    def ask(self, model: str) -> tuple[str, str]:
        """Return the greedy answers of a model to one question, through both."""
        options: Any = {"model": model, "messages": HELLO, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
        one = self.openai.chat.completions.create(**options).choices[0].message.content
        other = self.claude.messages.create(**options).content
        return one or "", "".join(part.text for part in other if part.type == "text")

    def models(self) -> list[str]:
        """Return the names of all models that the key sees."""
        return sorted(model.id for model in self.openai.models.list().data)

    def close(self) -> None:
        self.openai.close()
        self.claude.close()


def with_tinker(url: str, key: str, together: Callable[[], None]) -> Seen:
    """Train with the Tinker SDK, chat after each step, and sample at the end."""
    seen, chats = Seen(), Chats(url, key)
    with tinker.ServiceClient(base_url=url, api_key=key) as client:
        training = sdk.trainer(client, BASE, seed=3)
        seen.run = training.model_id
        for step in range(STEPS):
            together()
            data = [sdk.row([10 + step, 20, 30, 40, 50]), sdk.row([7, 8, 9 + step, 10])]
            passed = training.forward_backward(data, "cross_entropy")
            training.optim_step(ADAM).result(sdk.SECONDS)
            seen.losses.append(passed.result(sdk.SECONDS).metrics["loss:sum"])
            seen.texts.append(chats.ask(training.model_id))
        sampling = training.save_weights_and_get_sampling_client().result(sdk.SECONDS)
        params = tinker.SamplingParams(max_tokens=TOKENS, temperature=0.0)
        answer = sampling.sample(sdk.prompt(PROMPT), num_samples=1, sampling_params=params).result(sdk.SECONDS)
        seen.sampled = list(answer.sequences[0].tokens)
        seen.models = chats.models()
        together()
    chats.close()
    return seen


def with_client(url: str, key: str, together: Callable[[], None]) -> Seen:
    """Train with our client, chat after each step, and sample through both it and Tinker at the end."""
    seen, chats = Seen(), Chats(url, key)
    with TwinkleClient(url, key) as client:
        model = MultiLoraTransformersModel(BASE, client=client)
        model.add_adapter_to_model("a", CONFIG, seed=5)
        model.set_optimizer("AdamW", lr=1e-2)
        seen.run = model.training_run_id()
        for step in range(STEPS):
            together()
            seen.losses.append(float(model.forward_backward(inputs=rows(step, 12, 7, 9))["loss"]))
            model.clip_grad_and_step()
            seen.texts.append(chats.ask(seen.run))
        saved = model.save("last", is_sampler=True).twinkle_path
        options = {"max_tokens": TOKENS, "temperature": 0.0}
        [answer] = vLLMSampler(BASE, client=client).sample([{"input_ids": PROMPT}], options, adapter_uri=saved)
        seen.sampled = list(answer.sequences[0].tokens)
        with tinker.ServiceClient(base_url=url, api_key=key) as other:
            sampling = other.create_sampling_client(model_path=saved.replace("twinkle://", "tinker://")).result(
                sdk.SECONDS
            )
            params = tinker.SamplingParams(max_tokens=TOKENS, temperature=0.0)
            tokens = sampling.sample(sdk.prompt(PROMPT), num_samples=1, sampling_params=params).result(sdk.SECONDS)
            assert list(tokens.sequences[0].tokens) == seen.sampled
        seen.models = chats.models()
        together()
    chats.close()
    return seen


def at_once(visits: list[tuple[Visit, str]], url: str) -> list[Seen]:
    """Let tenants work at the same time, each step of one beside the same step of the other."""
    barrier = threading.Barrier(len(visits))
    results: list[Seen | BaseException] = [Seen() for _ in visits]

    def visit(place: int, work: Visit, key: str) -> None:
        try:
            results[place] = work(url, key, lambda: void(barrier.wait(sdk.SECONDS)))
        except BaseException as error:
            results[place] = error
            barrier.abort()

    threads = [threading.Thread(target=visit, args=(place, *entry)) for place, entry in enumerate(visits)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    sdk.sweep()
    return [result for result in results if isinstance(result, Seen)]


def void(_: object) -> None:
    """Take no notice of a value."""


def test_two_tenants_on_four_faces_get_what_each_gets_alone(service: Served) -> None:
    ana, ben = service.new_key("ana"), service.new_key("ben")
    alone = [*at_once([(with_tinker, ana)], service.url), *at_once([(with_client, ben)], service.url)]
    both = at_once([(with_tinker, ana), (with_client, ben)], service.url)
    for before, now in zip(alone, both, strict=True):
        assert now.losses == pytest.approx(before.losses, rel=1e-6)
        assert now.losses[-1] < now.losses[0]
        assert now.texts == before.texts
        assert all(one == other for one, other in now.texts), "both chat faces have the same weights"
        assert len(set(now.texts)) > 1, "the answer follows the steps"
        assert now.sampled == before.sampled
    first, second = both
    assert first.texts != second.texts
    for own, foreign in ((first, second), (second, first)):
        assert any(name.startswith(own.run) for name in own.models)
        assert not any(foreign.run in name for name in own.models)


def test_neither_reaches_the_models_of_the_other(service: Served) -> None:
    ana, ben = service.new_key("carla"), service.new_key("dan")
    [first] = at_once([(with_tinker, ana)], service.url)
    [second] = at_once([(with_client, ben)], service.url)
    for key, foreign in ((ana, second.run), (ben, first.run)):
        chats = Chats(service.url, key)
        with pytest.raises(openai.NotFoundError):
            chats.ask(foreign)
        with pytest.raises(anthropic.NotFoundError):
            chats.claude.messages.create(model=foreign, messages=HELLO, max_tokens=1)
        chats.close()
        with TwinkleClient(service.url, key) as client:
            assert all(run.training_run_id != foreign for run in client.list_training_runs())
            with pytest.raises(NotFound):
                client.get_training_run(foreign)
            with pytest.raises(TwinkleClientError, match="does not exist"):
                vLLMSampler(BASE, client=client).sample(
                    [{"input_ids": PROMPT}], adapter_uri=f"twinkle://{foreign}/sampler_weights/last"
                )
        rest = tinker.RestClient(base_url=service.url, api_key=key)
        with pytest.raises(tinker.NotFoundError):
            rest.get_training_run(foreign).result(sdk.SECONDS)
    del rest
    sdk.sweep()
