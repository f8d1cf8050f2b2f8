"""The recipe `gkd`: distillation, off- and on-policy. Read `gkd` from top to bottom: it is the whole run."""

import time
from typing import Any

from twinkle.run import Run
from twinkle_recipes.distillation.config import DistillationConfig
from twinkle_recipes.distillation.roles import Student, Teacher, build_teacher, encode_conversations, is_on_policy
from twinkle_recipes.history import Curve
from twinkle_recipes.run.building import build_model
from twinkle_recipes.run.keeper import evaluated, result_name, steps_of, update
from twinkle_recipes.run.opening import opened

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
    """Train a student to match a teacher's distributions, and write the results and their records to `run.folder`.

    In a fraction `on_policy` of the steps, the student samples the answers; in the others, the answers are those of the
    data. `metrics.jsonl` (a line per step; step 0 is the initial evaluation), `config.yaml`, `plugins.json`,
    `loss.png`, `kl.png`, `checkpoints/`, and the result: `adapter/` (PEFT) or `model/` (all parameters).

    Returns:
        `path` of the result, `steps`, the losses and held-out numbers of the last step, the `best` checkpoint and the
        pictures.

    Raises:
        ConfigError: several processes, a teacher with another vocabulary, or a resumed run with a changed
            configuration.
        DataError: a row has no prompt, or a prompt leaves no room for an answer.
        NonFiniteError: the loss became NaN or infinite; the rows are kept in `nonfinite_batch.json`.
        KeyboardInterrupt: after Ctrl-C, once the current step is finished and a checkpoint is written.
    """
    with opened(config, run, COLUMNS) as opening:
        training, held_out = opening.data(encode_conversations)
        batches = len(training)
        model = build_model(config, steps_of(opening.whole, config.epochs, batches))
        keeper = opening.keeper(model, training, steps_of(config, config.epochs, batches), CURVES)
        if keeper.is_finished():
            return keeper.summary()
        teacher = build_teacher(config, model)
        student = Student(config, model) if config.on_policy > 0 else None
        if student is not None:
            student.check_room((training, held_out))
        opening.write(model) if student is None else opening.write(model, student.sampler)
        if held_out is not None and keeper.first == 1:
            keeper.begin(evaluate(model, held_out, teacher, student, config))
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

    They are computed on the student's own answers to the held-out prompts, sampled with the same seed in each
    evaluation; off-policy, on the answers in the data.
    """
    for batch in held_out:
        rows = batch if student is None else student.answers(batch, step=0)
        if rows:
            arguments = teacher(rows)
            model.forward_only(inputs=rows, **config.in_memory)
            model.calculate_loss(**arguments)
    return evaluated(model)
