"""The recipe `embedding`: text embeddings. Read `embedding` from top to bottom: it is the whole run."""

import time
from typing import TYPE_CHECKING, Any

from twinkle.errors import ConfigError
from twinkle.run import Run
from twinkle_recipes.history import LOSS, Curve
from twinkle_recipes.run.building import build_model
from twinkle_recipes.run.keeper import evaluated, result_name, steps_of, update
from twinkle_recipes.run.opening import opened
from twinkle_recipes.similarity import EmbeddingConfig, encode_groups, flat

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = {
    "loss": "loss",
    "nonfinite_skipped": "skipped",
    "eval/loss": "eval loss",
    "pos_sim": "near",
    "neg_sim": "far",
    "hard_neg_sim": "hard",
    "eval/retrieval_accuracy": "found",
    "learning_rate": "lr",
    "grad_norm": "grad norm",
    "tokens_per_second": "tokens/s",
}
CURVES = {
    "loss.png": Curve({"loss": "training"}, "loss (nats per anchor)", LOSS.points, from_zero=True),
    "similarity.png": Curve(
        {"pos_sim": "to the positive", "neg_sim": "to other positives", "hard_neg_sim": "to its negatives"},
        "cosine of the anchor",
        {"eval/retrieval_accuracy": "found among held-out texts (share)"},
    ),
}


def embedding(config: EmbeddingConfig, run: Run) -> dict[str, Any]:
    """Train a model to embed texts, and write the results and their records to `run.folder`.

    `metrics.jsonl` (a line per step), `config.yaml`, `plugins.json`, `loss.png`, `similarity.png`, `checkpoints/`, and
    the result: `adapter/` (PEFT) or `model/` (all parameters).

    Returns:
        `path` of the result, `steps`, the losses and held-out numbers of the last step, the `best` checkpoint and the
        pictures.

    Raises:
        ConfigError: several processes, a `micro_batch_size` that the loss cannot take, or a resumed run that is not as
            it began.
        EncodeError: a row lacks a text, or one is empty.
        NonFiniteError: the loss became NaN or infinite; the rows are kept in `nonfinite_batch.json`.
        KeyboardInterrupt: after Ctrl-C, once the current step is finished and a checkpoint is written.
    """
    with opened(config, run, COLUMNS) as opening:
        check_memory(config)
        training, held_out = opening.data(encode_groups)
        batches = len(training)
        model = build_model(config, steps_of(opening.whole, config.epochs, batches))
        keeper = opening.keeper(model, training, steps_of(config, config.epochs, batches), CURVES)
        if keeper.is_finished():
            return keeper.summary()
        opening.write(model)
        with keeper:
            for step, groups in keeper.batches(training):
                metrics = update(model, flat(groups), config, run.folder, time.monotonic(), task="embedding")
                if held_out is not None and keeper.evaluates(step):
                    metrics |= evaluate(model, held_out, config)
                keeper.keep(step, metrics, model, training)

    model.save(result_name(config), output_dir=str(run.folder))
    return keeper.summary()


def evaluate(model: Any, held_out: Any, config: EmbeddingConfig) -> dict[str, float]:
    """Return loss and similarities of the held-out groups, and the share of anchors that find their positive.

    An anchor finds it if no other text of any held-out group is nearer; without other texts, there is no share.
    """
    import torch

    anchors: list[Tensor] = []
    documents: list[Tensor] = []
    positives: list[int] = []
    for groups in held_out:
        rows = flat(groups)
        vectors = model.forward_only(inputs=rows, task="embedding", **config.in_memory)["embeddings"]
        model.calculate_loss()
        for row, vector in zip(rows, vectors.float(), strict=True):
            if row["labels"]:
                positives.append(len(documents))  # the positive follows its anchor
            (anchors if row["labels"] else documents).append(vector)
    similarities = torch.stack(anchors) @ torch.stack(documents).T
    positive = similarities[torch.arange(len(positives)), torch.tensor(positives)]
    retrieved = positive >= similarities.max(1).values - 1e-6  # the same text may occur in two groups
    accuracy = {"eval/retrieval_accuracy": float(retrieved.double().mean())} if len(documents) > 1 else {}
    return {**evaluated(model), **accuracy}


def check_memory(config: EmbeddingConfig) -> None:
    """Refuse `micro_batch_size` if the loss compares all rows of a batch.

    Raises:
        ConfigError: `micro_batch_size` is set, and the loss needs the batch in one piece.
    """
    loss: Any = config.build("loss", config.loss.name, **config.loss.args)
    if config.micro_batch_size is not None and not getattr(loss, "splittable", True):
        raise ConfigError(
            f"micro_batch_size {config.micro_batch_size} splits a batch, but the loss {config.loss.name} compares all "
            "of its texts; omit it, or let the loss compare within groups (loss.args.use_batch false)"
        )
