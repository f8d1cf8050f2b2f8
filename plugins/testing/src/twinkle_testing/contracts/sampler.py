"""Contract checks of samplers: correct tokens and log-probabilities, seeds, stops, limits, rows for training."""

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_testing.contracts.case import Case, NotApplicable, Violation, require
from twinkle_testing.contracts.values import left_alone, shown

if TYPE_CHECKING:
    from torch import Tensor

_PROMPTS = ((1, 2, 3), (40, 41, 42, 43, 44, 45, 46), (7,))
_NEAR = 1e-4


@dataclass(kw_only=True)
class SamplerCase(Case):
    """A sampler; without `model_id` among its arguments it gets a tiny random Llama.

    Attributes:
        model_id: the folder of the model whose forward its log-probabilities are compared with; by default that of its
            arguments.
        logits: alternatively a function of token ids that returns float `[T, V]`, the trainer's logits; None if they
            are not available.
        tokenizer: the tokenizer; by default that of the model's folder.
        near: largest allowed difference from the trainer's log-probabilities.
    """

    kind = "sampler"

    model_id: str | Path | None = None
    logits: Callable[[Sequence[int]], "Tensor"] | None = None
    tokenizer: Any = None
    near: float = _NEAR

    @cached_property
    def tiny(self) -> Path:
        """The folder of the tiny model; its weights are large, so that the most probable tokens are unambiguous."""
        from twinkle.hub.quiet import quiet_transformers
        from twinkle_testing.models import tiny_model

        with quiet_transformers():
            return tiny_model(self.folder / "tiny", initializer_range=0.3)

    @property
    def _gets_tiny(self) -> bool:
        if not self.is_class or "model_id" in self.kwargs:
            return False
        with contextlib.suppress(TypeError, ValueError):
            return "model_id" in inspect.signature(self.component).parameters
        return False

    @property
    def place(self) -> str | Path | None:
        """The folder of its model, if it is known."""
        return self.model_id or self.kwargs.get("model_id") or (self.tiny if self._gets_tiny else None)

    def build(self, **more: Any) -> Any:
        """Return the sampler."""
        return super().build(**({"model_id": str(self.tiny), **more} if self._gets_tiny else more))

    @cached_property
    def sampler(self) -> Any:
        """A sampler that all checks share, because building one may load a model."""
        sampler = self.build()
        sampler.set_template("Template", **self._text())
        return sampler

    def _text(self) -> dict[str, Any]:
        from twinkle_testing.models import tiny_tokenizer

        if self.tokenizer is None and self.place is not None:
            return {"model_id": str(self.place)}
        return {"tokenizer": self.tokenizer or tiny_tokenizer()}

    @cached_property
    def forward(self) -> Callable[[Sequence[int]], "Tensor"]:
        """The trainer's forward: token ids to logits `[T, V]`."""
        if self.logits is not None:
            return self.logits
        if self.place is None or not Path(self.place).is_dir():
            raise NotApplicable("the logits of its model are not known; give model_id= (a folder) or logits=")
        import torch
        from transformers import AutoModelForCausalLM

        from twinkle.hub.quiet import quiet_transformers

        with quiet_transformers():
            module = AutoModelForCausalLM.from_pretrained(self.place, dtype=torch.float32).eval()

        def logits(ids: Sequence[int]) -> "Tensor":
            with torch.no_grad():
                found: Tensor = module(input_ids=torch.tensor([list(ids)])).logits[0]
            return found.double()

        return logits

    def logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> "Tensor":
        """Return float64 `[T - 1]`: the trainer's log-probability of each token given those before it."""
        import torch

        table = (self.forward(ids).double() / temperature).log_softmax(-1)
        found: Tensor = table[torch.arange(len(ids) - 1), torch.tensor(list(ids[1:]))]
        return found

    def sample(self, prompts: Sequence[Sequence[int]] = _PROMPTS, **params: Any) -> list[Any]:
        """Return the responses to encoded prompts, and check that each prompt has one with sequences."""
        params = {"max_tokens": 6, "logprobs": 1, **params}
        found: list[Any] = self.sampler.sample([{"input_ids": list(ids)} for ids in prompts], params)
        require(isinstance(found, list) and len(found) == len(prompts), f"{shown(found)} for {len(prompts)} prompts")
        for response in found:
            count = len(response.sequences)
            wanted = params.get("num_samples", 1)
            require(count == wanted, f"a response has {count} sequences; num_samples is {wanted}")
        return found


def tokens(responses: Sequence[Any]) -> list[list[list[int]]]:
    """Return the tokens of all sequences."""
    return [[list(sequence.tokens) for sequence in response.sequences] for response in responses]


def responses(case: SamplerCase) -> None:
    """Each prompt gets a response, in order, with `num_samples` sequences of whole numbers and a known stop reason."""
    for response, prompt in zip(case.sample(num_samples=2), _PROMPTS, strict=True):
        if response.prompt_token_ids is not None:
            require(list(response.prompt_token_ids) == list(prompt), f"prompt_token_ids is {response.prompt_token_ids}")
        for sequence in response.sequences:
            whole = all(type(token) is int for token in sequence.tokens)
            require(whole, f"tokens is {shown(sequence.tokens)}; it must be a list of whole numbers")
            known = sequence.stop_reason in ("length", "stop", "abort", "error")
            require(known, f"stop_reason is {sequence.stop_reason!r}; it is length, stop, abort or error")


def empty_input(case: SamplerCase) -> None:
    """An empty input gives an empty response."""
    case.sample(prompts=())


def greedy(case: SamplerCase) -> None:
    """At temperature 0 it selects the most probable token, the same in every call."""
    first, second = (tokens(case.sample(temperature=0, max_tokens=8)) for _ in range(2))
    require(first == second, f"two greedy calls gave {first} and {second}")
    for prompt, (drawn,) in zip(_PROMPTS, first, strict=True):
        table = case.forward([*prompt, *drawn])[len(prompt) - 1 : -1]
        for place, token in enumerate(drawn):
            gap = float(table[place].max() - table[place, token])
            require(
                gap < case.near,
                f"token {place} after {list(prompt)} is {token}; the model prefers {int(table[place].argmax())}",
            )


def logprobs(case: SamplerCase) -> None:
    """The log-probabilities of sampled tokens equal those of a training forward, at any temperature."""
    for temperature in (1.0, 0.7):
        for prompt, response in zip(_PROMPTS, case.sample(temperature=temperature, seed=3), strict=True):
            (sequence,) = response.sequences
            require(sequence.logprobs is not None, "with logprobs=1 there are no log-probabilities")
            pairs = [entry[0] for entry in sequence.logprobs]
            require(
                [token for token, _ in pairs] == list(sequence.tokens),
                "the drawn token does not come first in logprobs",
            )
            expected = case.logprobs([*prompt, *sequence.tokens], temperature)[len(prompt) - 1 :].tolist()
            far = max((abs(found - wanted) for (_, found), wanted in zip(pairs, expected, strict=True)), default=0.0)
            require(far <= case.near, f"at temperature {temperature} they are up to {far:.3g} from the trainer's")


def prompt_logprobs(case: SamplerCase) -> None:
    """`max_tokens=0` samples nothing, and `prompt_logprobs` scores the prompt like a trainer; its first is None."""
    for prompt, response in zip(_PROMPTS, case.sample(max_tokens=0, prompt_logprobs=1), strict=True):
        drawn = list(response.sequences[0].tokens)
        require(not drawn, f"with max_tokens=0 it drew {drawn}")
        scored = response.prompt_logprobs
        require(
            scored is not None and len(scored) == len(prompt),
            f"prompt_logprobs is {shown(scored)} for {len(prompt)} tokens",
        )
        require(
            scored[0] is None, f"the first of prompt_logprobs is {scored[0]}; nothing comes before it, so it is None"
        )
        expected = case.logprobs(prompt).tolist() if len(prompt) > 1 else []
        far = max((abs(a - b) for a, b in zip(scored[1:], expected, strict=True)), default=0.0)
        require(far <= case.near, f"the prompt's are up to {far:.3g} from the trainer's")


def seeds(case: SamplerCase) -> None:
    """The same seed gives the same tokens in any call; another seed or another sample gives others."""
    first, second, other = (tokens(case.sample(seed=seed, num_samples=3, max_tokens=12)) for seed in (5, 5, 6))
    require(first == second, f"the seed 5 drew {shown(first)} and then {shown(second)}")
    require(first != other, "the seeds 5 and 6 draw the same")
    distinct = {tuple(sequence) for sequence in first[0]}
    require(len(distinct) > 1, f"the samples of one prompt are all {first[0][0]}")
    alone = tokens(case.sample(_PROMPTS[:1], seed=5, num_samples=3, max_tokens=12))
    require(alone == first[:1], "a prompt alone draws otherwise than beside others, with the same seed")


def generators_left_alone(case: SamplerCase) -> None:
    """With a seed it does not touch torch's random generator, which training uses."""
    import torch

    before = torch.get_rng_state()
    case.sample(seed=5)
    require(
        torch.equal(before, torch.get_rng_state()),
        "it used torch's generator, so that training would depend on sampling",
    )


def max_tokens(case: SamplerCase) -> None:
    """It samples at most `max_tokens` tokens, and reports `length` if this ended the sequence."""
    for limit in (1, 5):
        for response in case.sample(max_tokens=limit, seed=1):
            for sequence in response.sequences:
                count = len(sequence.tokens)
                require(count <= limit, f"with max_tokens={limit} it drew {count}")
                said = sequence.stop_reason
                require(
                    count < limit or said in ("length", "stop"), f"after {limit} tokens the stop reason is {said!r}"
                )
                require(count == limit or said != "length", f"after {count} of {limit} tokens it says 'length'")


def stop_tokens(case: SamplerCase) -> None:
    """A token id in `stop` ends a sequence, is its last token, and the reason is `stop`."""
    drawn = tokens(case.sample(_PROMPTS[:1], temperature=0, max_tokens=8))[0][0]
    stop = drawn[min(2, len(drawn) - 1)]
    (response,) = case.sample(_PROMPTS[:1], temperature=0, max_tokens=8, stop=[stop])
    found, wanted = list(response.sequences[0].tokens), drawn[: drawn.index(stop) + 1]
    require(found == wanted, f"with stop=[{stop}] it drew {found}; without, {drawn}")
    require(
        response.sequences[0].stop_reason == "stop", f"the reason is {response.sequences[0].stop_reason!r}, not 'stop'"
    )


def stop_strings(case: SamplerCase) -> None:
    """A text in `stop` ends a sequence and is not part of `decoded`."""
    for seed in range(8):
        (response,) = case.sample(_PROMPTS[:1], seed=seed, max_tokens=8)
        text = response.sequences[0].decoded or ""
        stop = next((text[at : at + 1] for at in range(1, len(text)) if text[at].isascii() and text[at].isalnum()), "")
        if not stop or stop in text[:1]:
            continue
        (ended,) = case.sample(_PROMPTS[:1], seed=seed, max_tokens=8, stop=stop)
        found = ended.sequences[0]
        require(
            found.stop_reason == "stop", f"with stop={stop!r} the reason is {found.stop_reason!r}; drawn was {text!r}"
        )
        wanted = text[: text.index(stop)]
        require(found.decoded == wanted, f"with stop={stop!r} decoded is {found.decoded!r}; it must be {wanted!r}")
        require(len(found.tokens) <= len(response.sequences[0].tokens), "it drew on behind the stop")
        return
    raise NotApplicable("eight samples contained no text to stop at")


def trains(case: SamplerCase) -> None:
    """A conversation becomes a row for training: the prompt, then the sampled tokens; only these have labels."""
    asked = {"messages": [{"role": "user", "content": "Hello?"}]}
    (response,) = case.sampler.sample([asked], {"max_tokens": 5, "seed": 2})
    sequence = response.sequences[0]
    row = sequence.new_input_feature
    require(row is not None, "new_input_feature is None; make it by template.concat_input_feature")
    ids, labels = list(row["input_ids"]), list(row["labels"])
    drawn = list(sequence.tokens)
    require(ids[len(ids) - len(drawn) :] == drawn, "new_input_feature does not end with the drawn tokens")
    trained = [label for label in labels if label != -100]
    require(trained == drawn, f"its labels are {shown(trained)}; drawn was {shown(drawn)}")
    require(isinstance(sequence.decoded, str), f"decoded is {shown(sequence.decoded)}; it must be text")


def inputs_left_alone(case: SamplerCase) -> None:
    """It changes neither the rows nor the sampling parameters."""
    given = [[{"input_ids": list(ids)} for ids in _PROMPTS], {"max_tokens": 3, "seed": 1}]
    left_alone(lambda both: case.sampler.sample(both[0], both[1]), given, "the inputs or the parameters")


def bad_arguments(case: SamplerCase) -> None:
    """Unknown sampling parameters and keywords are errors that name them; an empty prompt is an error."""
    row = [{"input_ids": list(_PROMPTS[0])}]
    calls: dict[str, Callable[[], Any]] = {
        "no_such_parameter": lambda: case.sampler.sample(row, {"no_such_parameter": 1}),
        "no_such_keyword": lambda: case.sampler.sample(row, {"max_tokens": 1}, no_such_keyword=1),
        "": lambda: case.sampler.sample([{"input_ids": []}], {"max_tokens": 1}),
    }
    for name, call in calls.items():
        try:
            found = call()
        except Exception as error:  # any error type is allowed, but its message must name the argument
            require(name in str(error), f"{name}=1 raised {type(error).__name__}: {error}; it must name it")
            continue
        raise Violation(f"{name + '=1' if name else 'an empty prompt'} was accepted and gave {shown(found)}")


def probabilities(case: SamplerCase) -> None:
    """Token frequencies match the model: 400 samples of one token, within five standard deviations."""
    count, prompt = 400, _PROMPTS[1]
    chances = case.forward(prompt)[-1].double().softmax(-1)
    (response,) = case.sample([prompt], max_tokens=1, num_samples=count, seed=11)
    drawn = [sequence.tokens[0] for sequence in response.sequences]
    for token in chances.topk(3).indices.tolist():
        chance = float(chances[token])
        found, spread = drawn.count(token) / count, math.sqrt(chance * (1 - chance) / count)
        require(
            abs(found - chance) <= 5 * spread + 1e-9,
            f"token {token} came in {found:.3f} of draws; its probability is {chance:.3f}",
        )


def prefixes(case: SamplerCase) -> None:
    """`reset_prefix_cache` can be called at any time and does not change results for the same weights."""
    before = tokens(case.sample(temperature=0))
    case.sampler.reset_prefix_cache()
    require(tokens(case.sample(temperature=0)) == before, "after reset_prefix_cache() it draws otherwise")


CASE = SamplerCase
CHECKS = (
    responses,
    empty_input,
    greedy,
    logprobs,
    prompt_logprobs,
    seeds,
    generators_left_alone,
    max_tokens,
    stop_tokens,
    stop_strings,
    trains,
    inputs_left_alone,
    bad_arguments,
    probabilities,
    prefixes,
)
