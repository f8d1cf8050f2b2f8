"""Two models that say something of the same tokens must mean the same by them."""

from twinkle._registry import registry
from twinkle.errors import ConfigError
from twinkle_recipes.config.parts import RunConfig


def check_tokens(config: RunConfig, other: str, called: str) -> None:
    """Compare the tokens of the trained model with those of another one.

    Args:
        config: of the run.
        other: id of the other model.
        called: what the error calls it.

    Raises:
        ConfigError: they differ; names both sizes.
    """
    if other == config.model.id:
        return
    own, theirs = (
        registry().build(config.data.template, "template", model_id=model).tokenizer.get_vocab()
        for model in (config.model.id, other)
    )
    if different := len(own.items() ^ theirs.items()):
        raise ConfigError(
            f"the {called} {other} has a vocabulary of {len(theirs)} tokens and the trained model {config.model.id} "
            f"one of {len(own)}, and {different} entries differ; they must share a tokenizer, so choose a {called} of "
            "the same family"
        )
