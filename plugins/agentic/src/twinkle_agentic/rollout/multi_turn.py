"""`MultiTurnRollout`: turns of a sampler with tools between them, ready for training token for token."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinkle import registry, remote_class, remote_function
from twinkle.data_format import SampledSequence, SamplingParams, Trajectory
from twinkle.errors import ArgumentError, CapacityError, DataError
from twinkle.rollout import Rollout
from twinkle_agentic.rollout.traces import Traces
from twinkle_agentic.rollout.tracks import Track
from twinkle_agentic.rollout.turns import checked_rows, checked_turns, managers, with_tools
from twinkle_agentic.tools.tool_manager import ToolManager

_THREADS = 16
_TURN = 1_000_003  # what a seed grows by from turn to turn, so that no two turns are drawn with the same noise,
_PLACE = 7_368_787  # and from batch to batch of one turn, since the rows of each are counted from 0
Managers = ToolManager | Sequence[ToolManager | None] | None


@remote_class()
class MultiTurnRollout(Rollout):
    """Plays trajectories out: the sampler writes a turn, its tool calls are run, their results follow, and so on.

    All trajectories that still live are sampled in one batch a turn. Sampled tokens are never tokenized again; results
    of tools come in as untrained tokens (`extend_with_bridge`). What ends one trajectory ends no other one.

    Each result is the trajectory with its encoded row (`input_ids`, `labels`, ...), the grown `messages`, which end
    with a turn of the assistant, and

    - `logprobs`: one number a trained token, in order, at the time of sampling; empty if the sampler gives none;
    - `turns`: how many turns the assistant took, and `turn_tokens`: how many trained tokens each has;
    - `turn_rewards`: what environments gave in each turn, where tools belong to one;
    - `stop_reason`: `stop` (a turn without calls), `done` (an environment ended its episode), `max_turns`, `length` (a
      turn was cut at `max_tokens`), `max_trajectory_tokens`, `context` (the sampler's), `bridge` (the chat template
      cannot go on after the results), or the sampler's `abort` and `error`;
    - `truncated`: whether a limit ended it: `max_turns`, `length`, `max_trajectory_tokens`, `context`;
    - `success`, with a `success_callback`.

    A turn with calls that cannot be read is answered with an error, and the next turn may do better. Trajectories
    without a tool manager take one turn.
    """

    def __init__(
        self,
        sampler: Any,
        template: Any = None,
        tool_manager: Managers = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Callable[[dict[str, Any]], Any] | None = None,
        success_callback: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        """Put a rollout together.

        Args:
            sampler: any `twinkle.sampler.Sampler`.
            template: encodes prompts and results, in any form of component argument, or any object with `encode`,
                `concat_input_feature` and `decode`; None is the sampler's own.
            tool_manager: the tools of all trajectories, or a list with one manager for each; a call may give others.
            sampling_params: sampling parameters of a turn; `num_samples` must be 1; `logprobs` is at least 1.
            max_turns: turns of the assistant, at most.
            max_trajectory_tokens: tokens of a whole row, at most; None leaves it to the sampler's context.
            trace_dir: where to write a Markdown file for each trajectory, see `Traces`.
            trace_callback: called with each trace, a dict.
            success_callback: called with each result; its return value is stored as `success`.

        Raises:
            ArgumentError: a number is out of range, `num_samples` is not 1, or the template splits rows.
        """
        self.sampler, self.tool_manager = sampler, tool_manager
        self._template = None if template is None else _built(template)
        self.sampling_params = _checked(sampling_params)
        self.max_turns = checked_turns(max_turns, "MultiTurnRollout")
        if max_trajectory_tokens is not None and (type(max_trajectory_tokens) is not int or max_trajectory_tokens < 2):
            raise ArgumentError(
                f"MultiTurnRollout: max_trajectory_tokens is {max_trajectory_tokens!r}; it is a number of tokens from "
                "2, or None"
            )
        self.max_trajectory_tokens = max_trajectory_tokens
        self._traces = Traces(trace_dir, trace_callback, success_callback)

    @property
    def template(self) -> Any:
        """The template.

        Raises:
            ArgumentError: it splits long rows, which then have no single continuation.
        """
        template = self.sampler.template if self._template is None else self._template
        if getattr(template, "truncation_strategy", None) == "split":
            raise ArgumentError(
                "MultiTurnRollout: a template with truncation_strategy='split'; choose another strategy"
            )
        return template

    @remote_function(dispatch="slice_dp", collect="flatten", lazy_collect=False)
    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        tool_manager: Managers = None,
        global_step: int | None = None,
        **kwargs: Any,
    ) -> list[Trajectory]:
        """Return one finished trajectory for each given one, in order; the given ones stay as they are.

        Args:
            trajectories: prompts; `tools` are those of the tool manager unless they name their own.
            sampling_params: instead of the constructor's. With a `seed` the same call draws the same tokens.
            tool_manager: instead of the constructor's: one for all, or a list with one (or None) for each trajectory.
                Trajectories that act in environments need one each.
            global_step: number of the training step, for traces.
            **kwargs: for the sampler, such as `adapter_name`.

        Raises:
            ArgumentError: what is given does not fit; see the class.
            DataError: a prompt cannot be encoded or sampled from, or the sampler gives log-probabilities for some
                tokens only.
        """
        params = self.sampling_params if sampling_params is None else _checked(sampling_params)
        rows = checked_rows(trajectories, "MultiTurnRollout")
        found = managers(self.tool_manager if tool_manager is None else tool_manager, len(rows), "MultiTurnRollout")
        tracks = self._begun([with_tools(row, manager) for row, manager in zip(rows, found, strict=True)], found)
        for turn in range(self.max_turns):
            live = [track for track in tracks if track.reason is None]
            if not live:
                break
            self._sample(live, params if params.seed is None else _reseeded(params, turn * _TURN), kwargs)
            self._answer([track for track in live if track.reason is None], last=turn == self.max_turns - 1)
        results = [track.result() for track in tracks]
        self._traces.keep(results, [row["messages"] for row in rows], [track.turns for track in tracks], global_step)
        return results  # type: ignore[return-value]

    def _begun(self, rows: list[dict[str, Any]], found: Sequence[ToolManager | None]) -> list[Track]:
        features = [{**row, **encoded} for row, encoded in zip(rows, self._encoded(rows), strict=True)]
        for number, feature in enumerate(features):
            found_here, most = len(feature["input_ids"]), self.max_trajectory_tokens
            if not found_here:
                raise DataError(f"trajectory {number} has no tokens: it is longer than the template's max_length")
            if most is not None and found_here >= most:
                raise DataError(
                    f"trajectory {number} begins with {found_here} tokens and max_trajectory_tokens is {most}, which "
                    "leaves no room to answer; raise it, or shorten the prompt"
                )
        return [Track(feature, manager) for feature, manager in zip(features, found, strict=True)]

    def _encoded(self, rows: list[dict[str, Any]]) -> Any:
        template = self.template
        if hasattr(template, "batch_encode"):
            return template.batch_encode(rows, add_generation_prompt=True)
        return [template.encode(row, add_generation_prompt=True) for row in rows]

    def _sample(self, live: Sequence[Track], params: SamplingParams, kwargs: Mapping[str, Any]) -> None:
        """Let each trajectory take a turn; those with less room than others in a call of their own."""
        groups: dict[int | None, list[Track]] = {}
        for track in live:
            room = None if self.max_trajectory_tokens is None else self.max_trajectory_tokens - track.length
            if room is not None and room < 1:
                track.cut("max_trajectory_tokens")
                continue
            limits = [limit for limit in (room, params.max_tokens) if limit is not None]
            groups.setdefault(min(limits, default=None), []).append(track)
        for limit, group in groups.items():
            shortened = limit is not None and limit != params.max_tokens
            for track, sequence in self._drawn(group, live, replace(params, max_tokens=limit), kwargs):
                track.take(sequence, self.template, "max_trajectory_tokens" if shortened else "length")

    def _drawn(
        self, group: Sequence[Track], live: Sequence[Track], params: SamplingParams, kwargs: Mapping[str, Any]
    ) -> list[tuple[Track, SampledSequence]]:
        """Sample a batch of those that live; where a later turn does not fit the context, each row for itself."""
        seeded = params if params.seed is None else _reseeded(params, live.index(group[0]) * _PLACE)
        try:
            responses = self.sampler.sample([track.feature for track in group], seeded, **kwargs)
        except (CapacityError, DataError):
            if any(not track.turns for track in group):
                raise  # it is the prompt that is wrong
            if len(group) == 1:
                group[0].cut("context")
                return []
            return [pair for track in group for pair in self._drawn([track], live, params, kwargs)]
        if len(responses) != len(group):
            raise DataError(f"the sampler gave {len(responses)} responses for {len(group)} rows")
        return [(track, response.sequences[0]) for track, response in zip(group, responses, strict=True)]

    def _answer(self, tracks: Sequence[Track], last: bool) -> None:
        """Run the tools of all trajectories, side by side, and build the bridges to the next turn."""
        template = self.template
        if not tracks:
            return
        with ThreadPoolExecutor(min(_THREADS, len(tracks))) as threads:
            ended = list(threads.map(lambda track: track.answer(template), tracks))
        for track, messages in zip(tracks, ended, strict=True):
            if messages and last:
                track.end("max_turns", truncated=True)
            elif messages:
                track.bridge(messages, template)


def _built(template: Any) -> Any:
    if isinstance(template, str | type):
        return registry().build(template, "template")
    missing = [name for name in ("encode", "concat_input_feature", "decode") if not hasattr(template, name)]
    if missing:
        raise ArgumentError(
            f"MultiTurnRollout: template is a {type(template).__name__} without {missing[0]}(); give a template, its "
            "class or its name"
        )
    return template


def _checked(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if params.num_samples != 1:
        raise ArgumentError(
            f"MultiTurnRollout: num_samples is {params.num_samples}; a trajectory continues from one sample, so pass "
            "each prompt once per trajectory: [p for p in prompts for _ in range(n)]"
        )
    if params.max_tokens == 0:
        raise ArgumentError("MultiTurnRollout: max_tokens is 0, which draws nothing; give a number from 1, or None")
    return replace(params, logprobs=max(1, params.logprobs or 0))


def _reseeded(params: SamplingParams, more: int) -> SamplingParams:
    seed = params.seed if isinstance(params.seed, int) else next(iter(params.seed or (0,)))
    return replace(params, seed=(seed + more) % 2**63)
