"""The recipe `dpo`: preference training on pairs. Read `dpo` from top to bottom: it is the whole run."""

import time
from typing import Any

from twinkle.run import Run
from twinkle.runtime.seeding import seed_everything
from twinkle_recipes.building import build_model
from twinkle_recipes.data import loaders
from twinkle_recipes.interrupt import StopRequest
from twinkle_recipes.keeper import Keeper, evaluated, steps_of, update
from twinkle_recipes.pairs import check_pairs, interleaved
from twinkle_recipes.plan import check_early, make_plan, write_plan
from twinkle_recipes.plots import Curve
from twinkle_recipes.preference_config import DPOConfig
from twinkle_recipes.preference_reference import Reference, build_reference, check_reference
from twinkle_recipes.progress import display
from twinkle_recipes.ranks import check_alone
from twinkle_recipes.results import is_finished, result_name, told_of
from twinkle_recipes.resuming import resume, say_how_to_resume, write_config
from twinkle_recipes.unchanged import whole_run

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
    """Train a model to prefer the chosen answer of each pair, and leave in `run.folder` everything that says how.

    `metrics.jsonl` (a line a step), `config.yaml`, `plugins.json`, `loss.png`, `margin.png`, `checkpoints/`, with
    `reference.cache` the folder `reference/`, and the result: `adapter/` (PEFT) or `model/` (all parameters).

    Returns:
        `path` of the result, `steps`, the losses and held-out numbers of the last step, the `best` checkpoint and the
        pictures.

    Raises:
        ConfigError: several processes, a reference that the loss does not take, or a resumed run that is not as it
            began.
        DataError: a row is no pair, or one of its answers trains nothing.
        NonFiniteError: the loss became NaN or infinite; the rows are kept in `nonfinite_batch.json`.
        KeyboardInterrupt: after Ctrl-C, once the current step is finished and a checkpoint stands.
    """
    whole = whole_run(config)
    check_early(config)
    check_alone(config.recipe)
    check_reference(config)
    show = display(config.log_every, columns=COLUMNS, charted="rewards/margins")
    with (
        say_how_to_resume(show, run.folder, config.recipe),
        StopRequest(lambda: show.note("stopping as soon as this step is done; Ctrl-C again stops at once")) as stop,
    ):
        plan = make_plan(config)
        seed_everything(config.seed)
        training, held_out = loaders(config)
        kept = [loader.dataset for loader in (training, held_out) if loader is not None]
        for dataset in kept:
            check_pairs(dataset, config.data)
        show.say(f"data: {told_of(len(training), held_out)}")
        stop.check()

        model = build_model(config, steps_of(whole, config.epochs, len(training)))
        resumed = resume(config, model, run)
        if resumed.done:
            training.resume_from_checkpoint(resumed.consumed)
        steps = steps_of(config, config.epochs, len(training))
        keeper = Keeper(config, run, show, stop, resumed, steps, CURVES)
        if is_finished(config, run.folder, resumed.done, steps):
            show.say(f"all {steps} steps are made and the result is saved; nothing is left to do")
            return keeper.summary()
        stop.check()

        write_plan(plan, run.folder)
        write_config(whole, run.folder)
        show.say(f"run: {run.folder} ({len(plan['parts'])} parts, see plugins.json)")
        reference = build_reference(config, model, run.folder, kept)
        stop.check()

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
