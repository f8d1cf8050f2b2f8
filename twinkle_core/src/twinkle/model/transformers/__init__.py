"""Models of the transformers backend, under their published paths."""

from typing import Any

_MODELS = ("MultiLoraTransformersModel", "TransformersModel")


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        import twinkle.model

        return getattr(twinkle.model, name)
    raise AttributeError(f"module 'twinkle.model.transformers' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return list(_MODELS)
