"""The kinds of components. Each kind has a public module, a hook spec and a contract."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of component.

    Attributes:
        contract: `"module:Attr"` of the class that a component must subclass or satisfy; empty where any class or
            callable is accepted (optimizers and schedulers follow torch's own protocol).
        summary: one line for `twinkle plugins info`.
        author: whether a scaffold exists for plugin authors.
    """

    contract: str
    summary: str
    author: bool = True


KINDS: dict[str, Kind] = {
    "model": Kind("twinkle.model:TwinkleModel", "Trains: forward, backward, step, save, load."),
    "engine": Kind("twinkle.engine:Engine", "Trains and samples many adapters on one base model."),
    "sampler": Kind("twinkle.sampler:Sampler", "Generates tokens from a model and its adapters."),
    "dataset": Kind("twinkle.dataset:DatasetLike", "Rows with a length, or a stream of rows."),
    "dataloader": Kind("twinkle.dataloader:DataLoaderLike", "Batches of rows for each data rank."),
    "template": Kind("twinkle.template:TemplateLike", "Turns conversations into tokens and labels, and back."),
    "tool_parser": Kind("twinkle.tool_parser:ToolCallParser", "Finds tool calls in generated text."),
    "preprocessor": Kind("twinkle.preprocessor:Preprocessor", "Turns raw columns into trajectories."),
    "filter": Kind("twinkle.filter:Filter", "Keeps or drops a row."),
    "processor": Kind("twinkle.processor:ProcessorLike", "Collates encoded rows into a batch of tensors."),
    "loss": Kind("twinkle.loss:Loss", "Turns log-probabilities into a sum and its denominator."),
    "loss_scale": Kind("twinkle.loss_scale:LossScale", "Weights tokens by role and turn."),
    "metric": Kind("twinkle.metric:Metric", "Accumulates numbers over steps."),
    "reward": Kind("twinkle.reward:Reward", "Scores trajectories."),
    "advantage": Kind("twinkle.advantage:Advantage", "Turns rewards into advantages."),
    "optimizer": Kind("", "Updates parameters; torch's optimizer protocol.", author=False),
    "scheduler": Kind("", "Changes the learning rate; torch's scheduler protocol."),
    "checkpoint_engine": Kind("twinkle.checkpoint_engine:CheckpointEngine", "Moves weights from trainer to sampler."),
    "patch": Kind("twinkle.patch:Patch", "Changes a model in a way that can be undone."),
    "kernel": Kind("twinkle.kernel:Kernel", "A faster form of a layer or function."),
    "hub": Kind("twinkle.hub:Hub", "Resolves `scheme://` references to models, data and code.", author=False),
    "runtime": Kind("twinkle.runtime:Runtime", "Decides where components live and calls them there.", author=False),
    "notifier": Kind("twinkle.notifier:Notifier", "Sends messages about a run."),
    "tracker": Kind("twinkle.tracker:Tracker", "Records the metrics of a run."),
    "rollout": Kind("twinkle.rollout:Rollout", "Generates trajectories of several turns."),
    "tool": Kind("twinkle.tool:Tool", "A function that a model may call."),
    "env": Kind("twinkle.env:Env", "An environment that a model acts in."),
    "recipe": Kind("twinkle.recipe:Recipe", "A whole run: one readable loop with a configuration."),
}
