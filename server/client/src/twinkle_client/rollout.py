"""`ClientMultiTurnRollout`: the rollout of `twinkle_agentic` with a sampler of a service.

There is one implementation of the rollout; it comes with the extra `twinkle-client[rollout]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import DataError, RequirementMissing
from twinkle_client.errors import OperationFailed, RequestRefused

__all__ = ["ClientMultiTurnRollout"]


class ClientMultiTurnRollout:
    """Plays trajectories out with a sampler of a service; tools and templates run in this process.

    Arguments, results and errors are those of `twinkle.rollout.MultiTurnRollout`.

    Args:
        sampler: of `twinkle_client.sampler`.
        template: encodes prompts and results of tools, in any form of component argument.
        tool_manager: the tools of all trajectories, or a list with one manager for each; a call may give others.
        sampling_params: of a turn; `num_samples` must be 1.
        max_turns: turns of the assistant, at most.
        max_trajectory_tokens: tokens of a whole row, at most; None leaves it to the model's context.
        **kwargs: `trace_dir`, `trace_callback` and `success_callback`.

    Raises:
        RequirementMissing: the extra is not installed.
        ArgumentError: an argument is invalid.
    """

    def __init__(
        self,
        sampler: Any,
        template: Any,
        tool_manager: Any = None,
        sampling_params: Any = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.sampler = sampler
        self._rollout = _implementation()(
            _Sampler(sampler), template, tool_manager, sampling_params, max_turns, max_trajectory_tokens, **kwargs
        )

    def __call__(self, trajectories: Sequence[Any], **kwargs: Any) -> list[Any]:
        """Return one finished trajectory for each given one, in order.

        Args:
            trajectories: prompts with `messages`.
            **kwargs: `sampling_params`, `tool_manager` and `global_step`; others, such as `adapter_uri`, are for the
                sampler.

        Raises:
            ArgumentError: what is given does not fit.
            DataError: a prompt cannot be encoded or sampled from.
        """
        results: list[Any] = self._rollout(trajectories, **kwargs)
        return results

    @property
    def template(self) -> Any:
        """The template."""
        return self._rollout.template


class _Sampler:
    """A sampler of a service, whose refusals are the errors of a local one."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def sample(self, inputs: Sequence[Mapping[str, Any]], sampling_params: Any = None, **kwargs: Any) -> Any:
        try:
            return self._sampler.sample(inputs, sampling_params, **kwargs)
        except RequestRefused as error:
            raise DataError(str(error)) from error
        except OperationFailed as error:
            if error.category != "user":
                raise
            raise DataError(str(error)) from error


def _implementation() -> Any:
    """Return the class of the rollout.

    Raises:
        RequirementMissing: it is not installed.
    """
    from twinkle import registry
    from twinkle.errors import ComponentNotFound

    try:
        return registry().resolve("MultiTurnRollout", "rollout")
    except ComponentNotFound as error:
        raise RequirementMissing(
            "ClientMultiTurnRollout needs the package twinkle-agentic; run: pip install 'twinkle-client[rollout]'"
        ) from error
