"""A causal language model that gives embeddings instead of logits."""

from collections.abc import Callable
from typing import Any, ClassVar

from twinkle.errors import ArgumentError
from twinkle.patch import Patch
from twinkle_patches.models import arguments, hugging_face, model_of

_OF_THE_HEAD = ("labels", "logits_to_keep", "shift_labels", "num_items_in_batch")


class TransformersEmbeddingPatch(Patch):
    """The forward of a Hugging Face model returns one vector a row: its last token's hidden state, at length 1 (L2).

    What it returns has `embeddings` `[n, H]` (float32 at least) and `last_hidden_state` `[B, T, H]`; n is B, or the
    number of sub-sequences where `position_ids` begin again within a row. The head is not computed. For a model that
    you call yourself; in `TransformersModel`, `task="embedding"` does the same and needs no patch.
    """

    versions: ClassVar[dict[str, str]] = {"transformers": ">=5.0,<6"}
    changes = ("<model>.forward",)
    needed = 'for models that you call yourself; TransformersModel has task="embedding"'

    def __call__(self, module: Any) -> Any:
        """Apply the patch to a transformers model, or to a PEFT model around one, and return `module`.

        Raises:
            PatchError: it is no transformers model, or something has wrapped its forward already.
        """
        model = hugging_face(module, self)
        self.wrap(model, "forward", _embed)
        model_of(model.forward.original)
        return module


def _embed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from twinkle_patches.outputs import EmbeddingOutput
    from twinkle_torch.pooling import embed

    model = model_of(forward)
    given = arguments(forward, args, kwargs)
    if refused := [name for name in _OF_THE_HEAD if not _is_default(given.get(name))]:
        raise ArgumentError(
            f"{type(model).__name__} is patched to give embeddings, which have no {', '.join(refused)}; leave "
            f"{'it' if len(refused) == 1 else 'them'} out, or undo TransformersEmbeddingPatch"
        )
    kept = {name: value for name, value in given.items() if name not in (*_OF_THE_HEAD, "return_dict")}
    hidden = model.base_model(**kept | {"use_cache": False}).last_hidden_state
    ids = kept.get("input_ids")
    batch = {"input_ids": hidden[..., 0] if ids is None else ids}
    for name in ("attention_mask", "position_ids"):
        if (value := kept.get(name)) is not None:
            batch[name] = value.cpu()
    return EmbeddingOutput(embeddings=embed(hidden, batch), last_hidden_state=hidden)


def _is_default(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value == 0)
