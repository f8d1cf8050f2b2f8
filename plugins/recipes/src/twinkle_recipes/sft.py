"""The recipe `sft`: supervised fine-tuning on conversations. Read `sft` from top to bottom: it is the whole run."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.run import Run
from twinkle_recipes.config import SFTConfig
from twinkle_recipes.data import batches_per_epoch, count_steps, count_tokens, groups_of_batches, share
from twinkle_recipes.display import SFT_COLUMNS
from twinkle_recipes.history import LOSS
from twinkle_recipes.questions import Interview
from twinkle_recipes.run.building import build_model
from twinkle_recipes.run.keeper import evaluated, keep_rows, result_name, step_metrics
from twinkle_recipes.run.opening import opened

if TYPE_CHECKING:
    from twinkle.mesh.ranks import Ranks

CURVE = "loss.png"


def sft(config: SFTConfig, run: Run) -> dict[str, Any]:
    """Fine-tune a model, and write everything that describes the run into `run.folder`.

    `metrics.jsonl` (a line per step), `config.yaml`, `plugins.json`, `loss.png`, `answers.json`, `checkpoints/`, and
    the result: `adapter/` (PEFT) or `model/` (all parameters). Under torchrun every rank calls this; the first one
    shows and writes.

    Returns:
        `path` of the result (the weights of the last step), `steps`, `last_loss` (of the last step) and `eval/loss`,
        and the `best` checkpoint, the `curve` and the `answers`, or None if there are none.

    Raises:
        NonFiniteError: The loss became NaN or infinite and `on_nonfinite` is `raise`; the rows are kept in
            `nonfinite_batch.json`.
        ConfigError: A resumed run differs from how it began (`whole_run`).
        KeyboardInterrupt: After Ctrl-C, once the current step is finished and its checkpoint is saved; before the
            first step, once the current part of the preparation is finished.
    """
    size = config.gradient_accumulation_steps
    with opened(config, run, SFT_COLUMNS) as opening:
        training, held_out = opening.data()
        batches = batches_per_epoch(training)
        epochs = None if batches is None else config.epochs
        model = build_model(config, count_steps(opening.whole, batches), size)
        keeper = opening.keeper(model, training, count_steps(config, batches), {CURVE: LOSS}, accumulation=size)
        interview = Interview(config, run.folder, opening.show, opening.ranks)
        if keeper.is_finished(complete=interview.is_complete()):
            return published(keeper.summary(), interview)
        opening.write(model)
        interview.before(model)
        opening.stop.check()

        with keeper:
            for step, group in keeper.steps(groups_of_batches(training, epochs, size)):
                metrics = train(model, group, config, run.folder, opening.ranks)
                if held_out is not None and keeper.evaluates(step):
                    metrics |= evaluate(model, held_out, config, opening.ranks)
                keeper.keep(step, metrics, model, training)

    model.save(result_name(config), output_dir=str(run.folder))
    interview.after(model)
    return published(keeper.summary(), interview)


def train(model: Any, group: list[Any], config: SFTConfig, folder: Path, ranks: "Ranks") -> dict[str, float]:
    """Make one optimizer step from the batches of `group`, each rank on its rows, and return the metrics of all."""
    started = time.monotonic()
    accumulation: dict[str, Any] = {}
    if (size := config.gradient_accumulation_steps) > 1:
        accumulation = {"gradient_accumulation_steps": size, "flush": len(group) < size}
    with keep_rows(folder, group):
        for batch in group:
            model.forward_backward(inputs=share(batch, ranks.index, ranks.size), **config.in_memory)
        model.clip_grad_and_step(max_grad_norm=config.max_grad_norm, **accumulation)
    return step_metrics(model, sum(count_tokens(batch) for batch in group), started)


def evaluate(model: Any, held_out: Any, config: SFTConfig, ranks: "Ranks") -> dict[str, float]:
    """Return the metrics over all held-out rows of all ranks, each name under `eval/`."""
    for batch in held_out:
        model.forward_only(inputs=share(batch, ranks.index, ranks.size), **config.in_memory)
        model.calculate_loss()
    return evaluated(model)


def published(summary: dict[str, Any], interview: Interview) -> dict[str, Any]:
    """Return the keys that `sft` documents, from the summary of its keeper."""
    losses = {name: summary[name] for name in ("path", "steps", "last_loss", "eval/loss") if name in summary}
    return losses | {"best": summary.get("best"), "curve": summary.get(CURVE), "answers": interview.written()}
