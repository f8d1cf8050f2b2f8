"""What runs of `grpo` and `rloo` show: the columns of the screen, and pictures."""

from twinkle_recipes.show.plots import Curve

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
