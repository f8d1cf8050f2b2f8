"""The recipes `grpo` and `rloo`: reinforcement learning from rewards. Read `grpo` from top to bottom: it is the run."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.run import Run
from twinkle_recipes.history import Curve, Stopwatch, readable
from twinkle_recipes.policy.completions import Completions
from twinkle_recipes.policy.config import GRPOConfig, RLOOConfig
from twinkle_recipes.policy.rollouts import Answer, answer_greedily, build_sampler, check_room, sample, sizes
from twinkle_recipes.policy.scoring import Logps, Scorer, Scores
from twinkle_recipes.run.building import build_model
from twinkle_recipes.run.keeper import keep_rows, result_name
from twinkle_recipes.run.opening import opened

COLUMNS = {
    "reward": "reward",
    "eval/reward": "eval reward",
    "completion_length": "length",
    "kl": "KL",
    "approx_kl": "moved",
    "clip_ratio": "clipped",
    "loss": "loss",
    "nonfinite_skipped": "skipped",
    "learning_rate": "lr",
    "tokens_per_second": "tokens/s",
}
CURVES = {
    "reward.png": Curve({"reward": "sampled"}, "mean reward", {"eval/reward": "greedy, held out"}),
    "kl.png": Curve({"kl": "to the reference", "approx_kl": "since sampling"}, "KL divergence (nats per token)"),
}

NOT_LOGGED = ("accuracy", "correct_tokens", "total_tokens")  # whether sampled tokens are the most probable ones


def grpo(config: GRPOConfig, run: Run) -> dict[str, Any]:
    """Train a model to earn reward, and write the results and their records to `run.folder`.

    A step samples `num_generations` answers to each of `batch_size` prompts, scores them, compares those of one prompt,
    and updates the model. `metrics.jsonl` (a line per step; step 0 is the initial evaluation), `completions.jsonl`
    (every answer with its rewards), `reward.png`, `kl.png`, `config.yaml`, `plugins.json`, `checkpoints/`, and the
    result: `adapter/` (PEFT) or `model/`.

    Returns:
        `path` of the result (the weights of the last step), `steps`, the numbers of the last evaluation, and the
        `best` checkpoint and the pictures where there are any.

    Raises:
        NonFiniteError: the loss became NaN or infinite and `on_nonfinite` is `raise`.
        ConfigError: the configuration differs from that of the resumed run (`whole_run`), or there are several ranks.
        DataError: the longest prompt leaves no room for an answer; or a reward raised, timed out or returned NaN, and
            `scoring.on_error` is `fail`.
        KeyboardInterrupt: after Ctrl-C, once the current step is finished and a checkpoint is written.
    """
    with opened(config, run, COLUMNS, charted="reward") as opening:
        prompts, held_out = opening.data()
        model = build_model(config, opening.whole.max_steps * config.updates, reference=config.asks_reference)
        keeper = opening.keeper(model, prompts, config.max_steps, CURVES, decides="eval/reward", highest=True)
        if keeper.is_finished():
            return keeper.summary()
        sampler = build_sampler(config, config.sampling, model)
        check_room(sampler, (prompts, held_out), config.data)
        syncing = CheckpointEngineManager(model=model, sampler=sampler)
        scorer, logps = Scorer(config), Logps(config, model)
        opening.write(model, sampler)
        completions = Completions(run.folder, config, opening.show, first_step=keeper.first)
        if held_out is not None and keeper.first == 1:
            keeper.begin(evaluate(sampler, syncing, scorer, held_out, config))
        with keeper:
            for step, batch in keeper.batches(prompts):
                watch = Stopwatch()
                with watch("sync"):
                    sync(syncing, sampler, config)
                with watch("sample"):
                    answers = sample(sampler, batch, config, step)
                with watch("score"):
                    scores = scorer(answers)
                with watch("train"):
                    updated = train(model, answers, scores, logps, config, run.folder)
                metrics = scores.metrics() | updated | sizes(answers, watch.total) | watch.metrics()
                if held_out is not None and keeper.evaluates(step):
                    metrics |= evaluate(sampler, syncing, scorer, held_out, config)
                completions.add(step, answers, scores)
                keeper.keep(step, metrics, model, prompts)

    model.save(result_name(config), output_dir=str(run.folder))
    return keeper.summary()


def rloo(config: RLOOConfig, run: Run) -> dict[str, Any]:
    """Run the loop of `grpo` with the mean of the other answers as baseline and the plain policy gradient."""
    return grpo(config, run)


def sync(syncing: CheckpointEngineManager, sampler: Any, config: GRPOConfig) -> None:
    """Update the sampler to the current weights."""
    syncing.sync_weights(merge_and_sync=config.sampling.merge_and_sync)
    sampler.reset_prefix_cache()


def train(
    model: Any, answers: Sequence[Answer], scores: Scores, logps: Logps, config: GRPOConfig, folder: Path
) -> dict[str, float]:
    """Make the updates of one step from its answers, and return their metrics."""
    trained = [index for index in scores.kept if answers[index].logps]
    rows = [answers[index].row for index in trained]
    if not rows:
        return {"untrained": 1}
    inputs = logps(answers, trained) | {"advantages": scores.advantages_of(trained)}
    size = config.mini_batch_size or len(rows)
    with keep_rows(folder, rows):
        for _ in range(config.num_iterations):
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                model.forward_backward(
                    inputs=rows[part],
                    temperature=config.sampling.temperature,
                    **{name: values[part] for name, values in inputs.items()},
                    **config.in_memory,
                )
                model.clip_grad_and_step(max_grad_norm=config.max_grad_norm)
    numbers = {"loss": math.nan, **readable(model.calculate_metric(is_training=True))}  # no loss: all were skipped
    return {name: value for name, value in numbers.items() if name not in NOT_LOGGED}


def evaluate(
    sampler: Any, syncing: CheckpointEngineManager, scorer: Scorer, held_out: Iterable[Any], config: GRPOConfig
) -> dict[str, float]:
    """Return the rewards of the most probable answers to all held-out prompts, each under `eval/`."""
    sync(syncing, sampler, config)
    answers = answer_greedily(sampler, [prompt for batch in held_out for prompt in batch], config)
    return {f"eval/{name}": value for name, value in scorer.rewards(answers).metrics().items()}
