"""Tenants of one service cannot find out which prompts others have sampled, through any face."""

from collections.abc import Iterator
from typing import Any

import pytest
import server_sdk as sdk
from deferred import Deferred
from serving import Served, pool

from twinkle.testing import tiny_model
from twinkle_client import TwinkleClient, vLLMSampler

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]
openai: Any = Deferred("openai")
BASE = "acme/tiny"
SECRET = "the password of the safe in the cellar is swordfish"
PROMPTS = {face: [face, *range(3, 60)] for face in (100, 101)}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("isolation")
    served = pool(folder / "data", tiny_model(folder / "base"), {"name": BASE, "auth": True}).start()
    yield served
    assert served.stop() == 0


def with_tinker(url: str, key: str) -> int:
    """Return how many tokens of a prompt came from the cache, through Tinker."""
    params = sdk.tinker.SamplingParams(max_tokens=2, temperature=0.0)
    with sdk.tinker.ServiceClient(base_url=url, api_key=key) as client:
        sampling = client.create_sampling_client(base_model=BASE).result(sdk.SECONDS)
        answer = sampling.sample(sdk.prompt(PROMPTS[100]), num_samples=1, sampling_params=params).result(sdk.SECONDS)
        return int(answer.prompt_cache_hit_tokens)


def with_openai(url: str, key: str) -> int:
    """Return the same through `/v1`, of a text."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=sdk.SECONDS) as client:
        usage = client.completions.create(model=BASE, prompt=SECRET, max_tokens=2, temperature=0).usage
        return int(usage.prompt_tokens_details.cached_tokens)


def with_client(url: str, key: str) -> int:
    """Return the same through our client."""
    with TwinkleClient(url, key) as client:
        (answer,) = vLLMSampler(BASE, client=client).sample(
            [{"input_ids": PROMPTS[101]}], {"max_tokens": 2, "temperature": 0.0}
        )
        return int(answer.cached_tokens)


@pytest.mark.parametrize("face", [with_tinker, with_openai, with_client])
def test_a_prompt_of_another_tenant_is_read_as_a_new_one(service: Served, face: Any) -> None:
    ana, bob = (service.new_key(f"{name}-{face.__name__}") for name in ("ana", "bob"))
    assert face(service.url, ana) == 0
    assert face(service.url, bob) == 0
    assert face(service.url, ana) >= 32
    assert face(service.url, bob) >= 32
