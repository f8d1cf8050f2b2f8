"""The recipe `dpo`: preference training on pairs. Read `dpo` from top to bottom: it is the whole run."""

import time
from typing import Any

from twinkle.run import Run
from twinkle_recipes.history import Curve
from twinkle_recipes.preference.config import DPOConfig
from twinkle_recipes.preference.pairs import (
    Reference,
    build_reference,
    check_loss,
    encode_pairs,
    interleaved,
    needs_reference,
)
from twinkle_recipes.run.building import build_model
from twinkle_recipes.run.keeper import evaluated, result_name, steps_of, update
from twinkle_recipes.run.opening import opened

COLUMNS = {
    "loss": "loss",
    "nonfinite_skipped": "skipped",
    "eval/loss": "eval loss",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "eval/rewards/margins": "eval margin",
    "eval/rewards/accuracies": "eval accuracy",
    "learning_rate": "lr",
    "grad_norm": "grad norm",
    "tokens_per_second": "tokens/s",
}
CURVES = {
    "loss.png": Curve({"loss": "training"}, "loss (nats per pair)", {"eval/loss": "evaluation"}),
    "margin.png": Curve(
        {"rewards/margins": "margin", "rewards/chosen": "chosen", "rewards/rejected": "rejected"},
        "reward (nats)",
        {"eval/rewards/margins": "margin of held-out pairs"},
    ),
}


def dpo(config: DPOConfig, run: Run) -> dict[str, Any]:
    """Train a model to prefer the chosen answer of each pair, and write the results and their records to `run.folder`.

    `metrics.jsonl` (a line per step), `config.yaml`, `plugins.json`, `loss.png`, `margin.png`, `checkpoints/`, with
    `reference.cache` the folder `reference/`, and the result: `adapter/` (PEFT) or `model/` (all parameters).

    Returns:
        `path` of the result, `steps`, the losses and held-out numbers of the last step, the `best` checkpoint and the
        pictures.

    Raises:
        ConfigError: several processes, a loss that compares no pairs or takes no reference, or a resumed run with a
            changed configuration.
        DataError: a row is not a pair, or one of its answers has no trained tokens.
        NonFiniteError: the loss became NaN or infinite; the rows are kept in `nonfinite_batch.json`.
        KeyboardInterrupt: after Ctrl-C, once the current step is finished and a checkpoint is written.
    """
    with opened(config, run, COLUMNS, charted="rewards/margins") as opening:
        check_loss(config)
        training, held_out = opening.data(encode_pairs)
        batches = len(training)
        is_own_reference = needs_reference(config) and config.reference.id is None
        model = build_model(config, steps_of(opening.whole, config.epochs, batches), reference=is_own_reference)
        keeper = opening.keeper(model, training, steps_of(config, config.epochs, batches), CURVES)
        if keeper.is_finished():
            return keeper.summary()
        opening.write(model)
        reference = build_reference(config, model, run.folder, (training, held_out))
        opening.stop.check()

        with keeper:
            for step, pairs in keeper.batches(training):
                started, rows = time.monotonic(), interleaved(pairs)
                metrics = update(model, rows, config, run.folder, started, **reference(rows))
                if held_out is not None and keeper.evaluates(step):
                    metrics |= evaluate(model, held_out, reference, config)
                keeper.keep(step, metrics, model, training)

    model.save(result_name(config), output_dir=str(run.folder))
    return keeper.summary()


def evaluate(model: Any, held_out: Any, reference: Reference, config: DPOConfig) -> dict[str, float]:
    """Return loss, margins and accuracies over all held-out pairs, each name under `eval/`."""
    for pairs in held_out:
        rows = interleaved(pairs)
        arguments = reference(rows)
        model.forward_only(inputs=rows, **config.in_memory)
        model.calculate_loss(**arguments)
    return evaluated(model)
