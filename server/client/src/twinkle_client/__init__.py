"""The client of a Twinkle service: the classes of a local training script, over HTTP.

Nothing is imported before it is used.
"""

from typing import TYPE_CHECKING, Any

_WHERE = {
    "Connection": "twinkle_client.http",
    "MultiLoraTransformersModel": "twinkle_client.model",
    "TorchSampler": "twinkle_client.sampler",
    "TransformersModel": "twinkle_client.full_model",
    "TwinkleClient": "twinkle_client.client",
    "TwinkleClientError": "twinkle_client.errors",
    "current_client": "twinkle_client.client",
    "download_tokenizer": "twinkle_client.tokenizers",
    "init_tinker_client": "twinkle_client.tinker",
    "init_twinkle_client": "twinkle_client.client",
    "vLLMSampler": "twinkle_client.sampler",
}
__all__ = [
    "Connection",
    "MultiLoraTransformersModel",
    "TorchSampler",
    "TransformersModel",
    "TwinkleClient",
    "TwinkleClientError",
    "current_client",
    "download_tokenizer",
    "init_tinker_client",
    "init_twinkle_client",
    "vLLMSampler",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'twinkle_client' has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from twinkle_client.client import TwinkleClient as TwinkleClient
    from twinkle_client.client import current_client as current_client
    from twinkle_client.client import init_twinkle_client as init_twinkle_client
    from twinkle_client.errors import TwinkleClientError as TwinkleClientError
    from twinkle_client.full_model import TransformersModel as TransformersModel
    from twinkle_client.http import Connection as Connection
    from twinkle_client.model import MultiLoraTransformersModel as MultiLoraTransformersModel
    from twinkle_client.sampler import TorchSampler as TorchSampler
    from twinkle_client.sampler import vLLMSampler as vLLMSampler
    from twinkle_client.tinker import init_tinker_client as init_tinker_client
    from twinkle_client.tokenizers import download_tokenizer as download_tokenizer
