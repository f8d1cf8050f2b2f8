"""The hook specs of Twinkle.

Two families. A *component hook* `twinkle_<kind>()` returns the specs of the components that a plugin offers; the
registry implements it for each plugin from its manifest, so almost no plugin writes one. A *lifecycle hook* is called
for every plugin that declares it in its manifest (`hooks = { module = ..., implements = [...] }`), with keyword
arguments. If an implementation raises, the error is logged with the plugin's name and does not reach the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_registry import ComponentSpec, hookspec

if TYPE_CHECKING:
    from twinkle.run import Run


@hookspec
def twinkle_model() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `model`. Trains: forward, backward, step, save, load."""


@hookspec
def twinkle_engine() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `engine`. Trains and samples many adapters on one base model."""


@hookspec
def twinkle_sampler() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `sampler`. Generates tokens from a model and its adapters."""


@hookspec
def twinkle_dataset() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `dataset`. Rows with a length, or a stream of rows."""


@hookspec
def twinkle_dataloader() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `dataloader`. Batches of rows for each data rank."""


@hookspec
def twinkle_template() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `template`. Turns conversations into tokens and labels, and back."""


@hookspec
def twinkle_tool_parser() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `tool_parser`. Finds tool calls in generated text."""


@hookspec
def twinkle_preprocessor() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `preprocessor`. Turns raw columns into trajectories."""


@hookspec
def twinkle_filter() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `filter`. Keeps or drops a row."""


@hookspec
def twinkle_processor() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `processor`. Collates encoded rows into a batch of tensors."""


@hookspec
def twinkle_loss() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `loss`. Turns log-probabilities into a sum and its denominator."""


@hookspec
def twinkle_loss_scale() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `loss_scale`. Weights tokens by role and turn."""


@hookspec
def twinkle_metric() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `metric`. Accumulates numbers over steps."""


@hookspec
def twinkle_reward() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `reward`. Scores trajectories."""


@hookspec
def twinkle_advantage() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `advantage`. Turns rewards into advantages."""


@hookspec
def twinkle_optimizer() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `optimizer`. Updates parameters; torch's optimizer protocol."""


@hookspec
def twinkle_scheduler() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `scheduler`. Changes the learning rate; torch's scheduler protocol."""


@hookspec
def twinkle_checkpoint_engine() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `checkpoint_engine`. Moves weights from trainer to sampler."""


@hookspec
def twinkle_patch() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `patch`. Changes a model in a way that can be undone."""


@hookspec
def twinkle_kernel() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `kernel`. A faster form of a layer or function."""


@hookspec
def twinkle_hub() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `hub`. Resolves `scheme://` references to models, data and code."""


@hookspec
def twinkle_runtime() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `runtime`. Decides where components live and calls them there."""


@hookspec
def twinkle_notifier() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `notifier`. Sends messages about a run."""


@hookspec
def twinkle_tracker() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `tracker`. Records the metrics of a run."""


@hookspec
def twinkle_rollout() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `rollout`. Generates trajectories of several turns."""


@hookspec
def twinkle_tool() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `tool`. A function that a model may call."""


@hookspec
def twinkle_env() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `env`. An environment that a model acts in."""


@hookspec
def twinkle_recipe() -> list[ComponentSpec]:  # type: ignore[empty-body]
    """Components of kind `recipe`. A whole run: one readable loop with a configuration."""


@hookspec
def twinkle_configure(config: Mapping[str, Any]) -> None:
    """A run is about to start; `config` is its whole configuration, as plain values, before anything is built."""


@hookspec
def twinkle_run_start(run: "Run") -> None:
    """A run has started: its folder exists, `run.config` is written, and no step has run yet."""


@hookspec
def twinkle_step_end(run: "Run", step: int, metrics: Mapping[str, float]) -> None:
    """An optimizer step (or an evaluation, keys `eval/...`) of number `step` (from 1) ended with these numbers."""


@hookspec
def twinkle_checkpoint_saved(run: "Run", path: Path, step: int) -> None:
    """A checkpoint has been written completely at `path`."""


@hookspec
def twinkle_run_error(run: "Run", error: BaseException) -> None:
    """The run ends with `error` (including KeyboardInterrupt); called once, before `twinkle_run_end`."""


@hookspec
def twinkle_run_end(run: "Run") -> None:
    """The run has ended, with success or error; release resources."""


@hookspec
def twinkle_server_routes(router: Any) -> None:
    """Add routes to the server's `fastapi.APIRouter`, which requires authentication."""
