"""The recipe `sft`: supervised fine-tuning on conversations. Read `sft` from top to bottom: it is the whole run."""

import functools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.run import Run
from twinkle.runtime.seeding import seed_everything
from twinkle_recipes.config.sft import SFTConfig
from twinkle_recipes.rows.loading import batches_per_epoch, count_steps, count_tokens, groups_of_batches, loaders, share
from twinkle_recipes.run.building import build_model
from twinkle_recipes.run.checkpoints import Checkpoints
from twinkle_recipes.run.interrupt import StopRequest
from twinkle_recipes.run.keeping import keep_rows
from twinkle_recipes.run.plan import base_models, check_early, make_plan, measured_paths, say_paths, write_plan
from twinkle_recipes.run.questions import Interview
from twinkle_recipes.run.ranks import agree_to_stop, check_stop, ranks_of_this_run
from twinkle_recipes.run.results import is_finished, result_name, summary, told_of
from twinkle_recipes.run.resuming import resume, say_how_to_resume, score_of, write_config
from twinkle_recipes.run.unchanged import whole_run
from twinkle_recipes.show.numbers import is_due, readable
from twinkle_recipes.show.plots import write_loss_curve
from twinkle_recipes.show.progress import Silent, display

if TYPE_CHECKING:
    from twinkle.mesh.ranks import Ranks


def sft(config: SFTConfig, run: Run) -> dict[str, Any]:
    """Fine-tune a model and leave in `run.folder` everything that says how.

    `metrics.jsonl` (a line a step), `config.yaml`, `plugins.json`, `loss.png`, `answers.json`, `checkpoints/`, and the
    result: `adapter/` (PEFT) or `model/` (all parameters). Under torchrun every rank calls this; the first one shows
    and writes.

    Returns:
        `path` of the result (the weights of the last step), `steps`, `last_loss` (of the last step) and `eval/loss`,
        and the `best` checkpoint, the `curve` and the `answers` where there are any.

    Raises:
        NonFiniteError: the loss became NaN or infinite and `on_nonfinite` is `raise`; the rows are kept in
            `nonfinite_batch.json`.
        ConfigError: it goes on in a run folder, but not as the run began (`whole_run`).
        KeyboardInterrupt: after Ctrl-C, once the current step is finished and a checkpoint stands; before the first
            step, once what is being loaded stands.
    """
    whole = whole_run(config)
    check_early(config)
    ranks = ranks_of_this_run()
    show = display(config.log_every) if ranks.is_first else Silent()
    with (
        say_how_to_resume(show, run.folder, config.recipe),
        StopRequest(lambda: show.note("stopping as soon as this step is done; Ctrl-C again stops at once")) as stop,
    ):
        plan = make_plan(config) | {"models": base_models(config)}
        seed_everything(config.seed)
        training, held_out = loaders(config)
        batches = batches_per_epoch(training)
        steps = count_steps(whole, batches)
        show.say(f"data: {told_of(batches, held_out)}")
        check_stop(stop, ranks)

        model = build_model(config, steps, config.gradient_accumulation_steps)
        if not ranks.is_first:
            seed_everything(config.seed + ranks.index)  # no two ranks drop out the same
        resumed = resume(config, model, run, config.gradient_accumulation_steps)
        done, history = resumed.done, resumed.history
        if done:
            training.resume_from_checkpoint(resumed.consumed)
        steps = count_steps(config, batches)
        if is_finished(config, run.folder, done, steps):
            show.say(f"all {steps} steps are made and the result is saved; nothing is left to do")
            return summary(config, run.folder, steps, history.last)
        checkpoints = Checkpoints(run.folder / "checkpoints", config.save_total_limit, writes=ranks.is_first)
        checkpoints.best_score = score_of(history, checkpoints.path("best"))
        check_stop(stop, ranks)

        if ranks.is_first:
            paths = measured_paths(model)
            write_plan({**plan, "paths": paths}, run.folder)
            write_config(whole, run.folder)
            show.say(f"run: {run.folder} ({len(plan['parts'])} parts, see plugins.json)")
            say_paths(show, paths)
        interview = Interview(config, run.folder, show, ranks)
        interview.before(model)
        check_stop(stop, ranks)

        metrics: dict[str, float] = {}
        epochs = None if batches is None else config.epochs
        remaining = groups_of_batches(training, epochs, config.gradient_accumulation_steps)
        try:
            with show:
                show.begin(done + 1, steps)
                for step, group in zip(range(done + 1, steps + 1), remaining, strict=False):
                    metrics = train(model, group, config, run.folder, ranks)
                    last = step == steps
                    if held_out is not None and (last or is_due(step, config.eval_every)):
                        metrics |= evaluate(model, held_out, config, ranks)
                    history.add(step, metrics)
                    run.log(metrics, step)
                    show.step(step, metrics)

                    score = metrics.get("eval/loss")
                    stopping = agree_to_stop(stop, ranks)
                    if last or stopping or is_due(step, config.save_every) or checkpoints.is_best(score):
                        consumed = training.get_state()["consumed_train_samples"]
                        write = functools.partial(model.save, save_optimizer=True, consumed_train_samples=consumed)
                        run.checkpoint_saved(checkpoints.save(step, score, write), step)
                    if stopping and not last:
                        raise KeyboardInterrupt
        finally:
            if ranks.is_first:
                write_loss_curve(history, run.folder / "loss.png", run.folder.name)

    model.save(result_name(config), output_dir=str(run.folder))
    interview.after(model)
    return summary(config, run.folder, steps, history.last)


def train(model: Any, group: list[Any], config: SFTConfig, folder: Path, ranks: "Ranks") -> dict[str, float]:
    """Make one optimizer step from the batches of `group`, each rank with its rows, and return the numbers of all."""
    started = time.monotonic()
    accumulation: dict[str, Any] = {}
    if config.gradient_accumulation_steps > 1:
        size = config.gradient_accumulation_steps
        accumulation = {"gradient_accumulation_steps": size, "flush": len(group) < size}
    with keep_rows(folder, group):
        for batch in group:
            model.forward_backward(inputs=share(batch, ranks.index, ranks.size), **config.in_memory)
        model.clip_grad_and_step(max_grad_norm=config.max_grad_norm, **accumulation)
    tokens = sum(count_tokens(batch) for batch in group)
    speed = tokens / max(time.monotonic() - started, 1e-9)
    numbers = {"loss": math.nan, **readable(model.calculate_metric(is_training=True))}  # no loss: the step was skipped
    return {**numbers, "tokens": tokens, "tokens_per_second": speed}


def evaluate(model: Any, held_out: Any, config: SFTConfig, ranks: "Ranks") -> dict[str, float]:
    """Return the numbers over all held-out rows of all ranks, each name under `eval/`."""
    for batch in held_out:
        model.forward_only(inputs=share(batch, ranks.index, ranks.size), **config.in_memory)
        model.calculate_loss()
    numbers = readable(model.calculate_metric(is_training=False))
    return {f"eval/{name}": value for name, value in numbers.items() if name not in ("learning_rate", "grad_norm")}
