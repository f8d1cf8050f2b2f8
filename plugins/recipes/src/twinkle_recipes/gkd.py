"""The recipe `gkd`: distillation, off- and on-policy. Read `gkd` from top to bottom: it is the whole run."""

import time
from typing import Any

from twinkle.run import Run
from twinkle.runtime.seeding import seed_everything
from twinkle_recipes.building import build_model
from twinkle_recipes.data import loaders
from twinkle_recipes.distillation import Student, Teacher, build_teacher, encode_prompts, is_on_policy
from twinkle_recipes.distillation_config import DistillationConfig
from twinkle_recipes.interrupt import StopRequest
from twinkle_recipes.keeper import Keeper, evaluated, steps_of, update
from twinkle_recipes.plan import check_early, make_plan, write_plan
from twinkle_recipes.plots import Curve
from twinkle_recipes.progress import display
from twinkle_recipes.ranks import check_alone
from twinkle_recipes.results import is_finished, result_name, told_of
from twinkle_recipes.resuming import resume, say_how_to_resume, write_config
from twinkle_recipes.unchanged import whole_run

COLUMNS = {
    "loss": "divergence",
    "nonfinite_skipped": "skipped",
    "kl": "KL(t, s)",
    "reverse_kl": "KL(s, t)",
    "eval/loss": "eval divergence",
    "eval/kl": "eval KL(t, s)",
    "on_policy": "on policy",
    "learning_rate": "lr",
    "grad_norm": "grad norm",
    "tokens_per_second": "tokens/s",
}
CURVES = {
    "loss.png": Curve({"loss": "training"}, "divergence (nats per token)", {"eval/loss": "held out"}, from_zero=True),
    "kl.png": Curve(
        {"kl": "KL(teacher, student)", "reverse_kl": "KL(student, teacher)"},
        "KL divergence (nats per token)",
        {"eval/kl": "KL(teacher, student), held out"},
        from_zero=True,
    ),
}


def gkd(config: DistillationConfig, run: Run) -> dict[str, Any]:
    """Bring a student's distributions near to a teacher's, and leave in `run.folder` everything that says how.

    In a share `on_policy` of the steps the student answers the prompts itself, in the others the answers are those of
    the data. `metrics.jsonl` (a line a step; step 0 is the evaluation before), `config.yaml`, `plugins.json`,
    `loss.png`, `kl.png`, `checkpoints/`, and the result: `adapter/` (PEFT) or `model/` (all parameters).

    Returns:
        `path` of the result, `steps`, the losses and held-out numbers of the last step, the `best` checkpoint and the
        pictures.

    Raises:
        ConfigError: several processes, a teacher with other tokens, or a resumed run that is not as it began.
        NonFiniteError: the loss became NaN or infinite; the rows are kept in `nonfinite_batch.json`.
        KeyboardInterrupt: after Ctrl-C, once the current step is finished and a checkpoint stands.
    """
    whole = whole_run(config)
    check_early(config)
    check_alone(config.recipe)
    show = display(config.log_every, columns=COLUMNS)
    with (
        say_how_to_resume(show, run.folder, config.recipe),
        StopRequest(lambda: show.note("stopping as soon as this step is done; Ctrl-C again stops at once")) as stop,
    ):
        plan = make_plan(config)
        seed_everything(config.seed)
        training, held_out = loaders(config, encode_prompts if config.samples else None)
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
        teacher = build_teacher(config, model)
        student = Student(config, model) if config.on_policy > 0 else None
        stop.check()

        write_plan(plan, run.folder)
        write_config(whole, run.folder)
        show.say(f"run: {run.folder} ({len(plan['parts'])} parts, see plugins.json)")
        if held_out is not None and not resumed.done:
            run.log(evaluate(model, held_out, teacher, student, config), 0)
        with keeper:
            for step, rows in keeper.batches(training):
                started, on_policy = time.monotonic(), student is not None and is_on_policy(config, step)
                if student is not None and on_policy:
                    rows = student.answers(rows, step)
                metrics = {"on_policy": float(on_policy), "answers": len(rows)}
                if rows:
                    metrics |= update(model, rows, config, run.folder, started, **teacher(rows))
                if held_out is not None and keeper.evaluates(step):
                    metrics |= evaluate(model, held_out, teacher, student, config)
                keeper.keep(step, metrics, model, training)

    model.save(result_name(config), output_dir=str(run.folder))
    return keeper.summary()


def evaluate(
    model: Any, held_out: Any, teacher: Teacher, student: Student | None, config: DistillationConfig
) -> dict[str, float]:
    """Return the divergences on held-out rows, each name under `eval/`.

    They are those of the student's own answers to the held-out prompts, drawn alike at each evaluation; off-policy
    those of the answers in the data.
    """
    for given in held_out:
        rows = given if student is None else student.answers(given, step=0)
        if rows:
            arguments = teacher(rows)
            model.forward_only(inputs=rows, **config.in_memory)
            model.calculate_loss(**arguments)
    return evaluated(model)
