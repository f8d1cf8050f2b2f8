"""Contract checks of engines, sampling: correct tokens, seeds, lengths, progress, constant versions."""

import json
import math
from typing import TYPE_CHECKING, Any

from twinkle.engine import Feature
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle_testing.contracts.case import NotApplicable, Violation, require
from twinkle_testing.contracts.engine_case import (
    PROMPT,
    EngineCase,
    raises,
)
from twinkle_testing.contracts.values import shown

if TYPE_CHECKING:
    pass


def versions(case: EngineCase) -> None:
    """A version does not change while its adapter is trained or removed; without one the base model is sampled."""
    ref = case.trained()
    version = case.engine.version(ref)
    require(version.nbytes > 0, f"nbytes of a version is {version.nbytes}")
    before = case.sample(version, temperature=0)
    base = case.sample(None, temperature=0)
    for _ in range(3):
        case.backward(ref, case.rows())
        case.step(ref)
    after, present = case.sample(version, temperature=0), case.sample(case.engine.version(ref), temperature=0)
    require(_scores(after) == _scores(before), "a version samples otherwise after its adapter was trained")
    require(_scores(present) != _scores(before), "a new version samples like the old one")
    require(_scores(base) != _scores(before), "without a version the adapter is sampled")
    case.engine.remove(ref)
    require(_scores(case.sample(version, temperature=0)) == _scores(before), "a version changed with remove()")


def read_versions(case: EngineCase) -> None:
    """A version that was read from an export samples like the adapter itself."""
    ref = case.trained()
    own, again = case.engine.version(ref), case.engine.read_version(case.exported(ref))
    one, two = (case.tokens(version, temperature=0, max_tokens=8) for version in (own, again))
    require(one == two, f"the version of an adapter draws {one}, and the one read from its export {two}")
    require(again.nbytes > 0, f"nbytes of a version is {again.nbytes}")


def greedy(case: EngineCase) -> None:
    """Greedy samples are the most probable tokens of a forward, with its log-probabilities; so is `topk_logprobs`."""
    ref = case.trained()
    for adapter, version in ((None, None), (ref, case.engine.version(ref))):
        response = case.sample(version, temperature=0, max_tokens=8, topk_logprobs=2)
        (sequence,) = response.sequences
        require(response.prompt_token_ids in (None, list(PROMPT)), "prompt_token_ids is not the prompt")
        require(sequence.logprobs is not None and sequence.topk_logprobs is not None, "there are no log-probabilities")
        ids = [*PROMPT, *sequence.tokens]
        table = case.table(adapter, ids)[len(PROMPT) - 1 : -1]
        for place, token in enumerate(sequence.tokens):
            first, logprob = sequence.logprobs[place][0]
            require(first == token, f"the drawn token {token} does not come first in logprobs")
            far = abs(logprob - float(table[place, token]))
            require(far <= case.precision, f"the log-probability of token {place} is {far:.3g} from that of a forward")
            gap = float(table[place].max()) - float(table[place, token])
            require(gap <= case.precision, f"token {place} is {token}; another one is more probable by {gap:.3g}")
            wanted = table[place].topk(2).values.tolist()
            found = [value for _, value in sequence.topk_logprobs[place]]
            fine = len(found) == 2 and all(abs(a - b) <= case.precision for a, b in zip(found, wanted, strict=True))
            require(fine, f"topk_logprobs of token {place} is {sequence.topk_logprobs[place]}, a forward's {wanted}")


def probabilities(case: EngineCase) -> None:
    """Token frequencies match the model at a temperature, and `top_k` and `top_p` remove the tail."""
    draws, temperature = 200, 2.0
    chances = (case.table(None, PROMPT)[-1] / temperature).softmax(-1)
    drawn = [tokens[0] for tokens in case.tokens(max_tokens=1, num_samples=draws, temperature=temperature, seed=3)]
    for token in chances.topk(3).indices.tolist():
        chance = float(chances[token])
        found, spread = drawn.count(token) / draws, math.sqrt(chance * (1 - chance) / draws)
        require(
            abs(found - chance) <= 5 * spread, f"token {token} has the probability {chance:.3f}, drawn were {found:.3f}"
        )
    best = chances.topk(2).indices.tolist()
    cut: Any
    for cut in ({"top_k": 2}, {"top_p": float(chances[best[0]]) + 1e-4}):
        found_ = {tokens[0] for tokens in case.tokens(max_tokens=1, num_samples=40, temperature=temperature, **cut)}
        require(found_ <= set(best), f"with {cut} it drew {sorted(found_ - set(best))}, which is not among {best}")


def lengths(case: EngineCase) -> None:
    """It samples at most `max_tokens` tokens, none for 0, and ends at a stop token, which is the last one."""
    for limit in (0, 1, 5):
        (sequence,) = case.sample(max_tokens=limit).sequences
        drawn, reason = len(sequence.tokens), sequence.stop_reason
        require(
            (drawn, reason) == (limit, "length"), f"max_tokens={limit} gave {drawn} tokens and the reason {reason!r}"
        )
    (free,) = case.tokens(temperature=0, max_tokens=6)
    stop = free[2]
    (sequence,) = case.sample(temperature=0, max_tokens=6, stop=[stop]).sequences
    wanted = free[: free.index(stop) + 1]
    require(list(sequence.tokens) == wanted, f"with stop=[{stop}] it drew {sequence.tokens}; without, {free}")
    require(sequence.stop_reason == "stop", f"at a stop token the reason is {sequence.stop_reason!r}")


def seeds(case: EngineCase) -> None:
    """A seed gives the same tokens whatever other requests run; another seed or sample gives other tokens."""
    params: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "stop": [], "logprobs": None}
    alone = case.tokens(seed=5, **params)
    engine, submitted = case.engine, []
    for seed, prompt in ((7, (1, 2)), (5, PROMPT), (8, (9, 8, 7, 6, 5, 4))):
        submitted.append(engine.submit(list(prompt), {**params, "seed": seed}))
        engine.decode()
    beside = [list(sequence.tokens) for sequence in submitted[1].result().sequences]
    for request in submitted:
        request.result()
    require(alone == beside, f"the seed 5 drew {alone} alone and {beside} beside others")
    require(case.tokens(seed=6, **params) != alone, "the seeds 5 and 6 draw the same")
    both = case.tokens(seed=[6, 5], num_samples=2, **params)
    require(both[1:] == alone, f"seed=[6, 5] drew {both[1:]} for the 5, and alone {alone}")
    many = case.tokens(seed=5, num_samples=3, **params)
    require(len({tuple(tokens) for tokens in many}) > 1, f"three samples of one seed are all {many[0]}")


def progress(case: EngineCase) -> None:
    """The parts from `progress` add up to the tokens of `result`, each with its log-probability."""
    params = {"max_tokens": 6, "logprobs": 1, "num_samples": 2, "seed": 2, "stop": []}
    request = case.engine.submit(list(PROMPT), params)
    require(not request.done, "a request is done before anything was decoded")
    with raises("progress() of a sample that does not exist", ArgumentError):
        request.progress(2)
    pieces: list[list[int]] = [[], []]
    scores: list[list[float]] = [[], []]
    ended: list[Any] = [None, None]
    for _ in range(100):
        for sample in range(2):
            piece = request.progress(sample, len(pieces[sample]))
            pieces[sample] += piece.tokens
            scores[sample] += piece.logprobs
            ended[sample] = piece.stop_reason
        if request.done:
            break
        require(ended != ["length", "length"], "both samples have a stop reason, and the request is not done")
        case.engine.decode()
    response = request.result()
    for sample, sequence in enumerate(response.sequences):
        require(
            pieces[sample] == list(sequence.tokens), f"progress() gave {pieces[sample]}, result() {sequence.tokens}"
        )
        expected = [pairs[0][1] for pairs in sequence.logprobs]
        require(scores[sample] == expected, "progress() gave other log-probabilities than result()")
        require(ended[sample] == sequence.stop_reason, f"progress() ended with {ended[sample]!r}")
    plain = case.engine.submit(list(PROMPT), {**params, "logprobs": None})
    plain.result()
    require(plain.progress().logprobs == [], "progress() has log-probabilities that were not requested")


def cancellation(case: EngineCase) -> None:
    """`cancel` ends a request with the reason "abort" and its current tokens, without effect on others."""
    params: dict[str, Any] = {"max_tokens": 40, "seed": 2, "stop": []}
    request, other = (case.engine.submit(list(PROMPT), {**params, "max_tokens": size}) for size in (40, 8))
    case.engine.decode()
    drawn = request.progress().tokens
    request.cancel()
    request.cancel()
    require(request.done, "a cancelled request is not done")
    (sequence,) = request.result().sequences
    require(sequence.stop_reason == "abort", f"a cancelled request has the stop reason {sequence.stop_reason!r}")
    require(list(sequence.tokens) == drawn, f"it had drawn {drawn} when it was cancelled, and has {sequence.tokens}")
    (expected,) = case.tokens(**{**params, "max_tokens": 8})
    (left,) = other.result().sequences
    require(list(left.tokens) == expected, "a request beside a cancelled one draws otherwise")
    other.cancel()
    require(left.stop_reason == "length", "cancel() changed a request that was done")
    for _ in range(100):
        if not case.engine.decode():
            return
    raise Violation("decode() continues without a request")


def cache_salts(case: EngineCase) -> None:
    """A prompt comes from a cache only for requests with the same salt, and has the same tokens with any salt."""
    length = min(64, case.info.context - 8)
    prompt = [(7 * place + 3) % min(case.info.vocabulary, 250) for place in range(length)]
    params = {"max_tokens": 4, "seed": 1, "temperature": 0, "logprobs": 1, "stop": []}

    def begun(salt: str | None) -> Any:
        request = case.engine.submit(prompt, params, cache_salt=salt)
        case.engine.decode()
        return request

    before = begun("first").result()
    expected = [list(sequence.tokens) for sequence in before.sequences]
    together = [(salt, begun(salt)) for salt in ("second", None, "third", "first")]
    for salt, request, response in [(salt, request, request.result()) for salt, request in together]:
        known = max(response.cached_tokens, request.progress().cached_tokens)
        fine = known == 0 or salt == "first"
        require(fine, f"with the salt {salt!r}, {known} tokens came from a prompt with another salt")
        found = [list(sequence.tokens) for sequence in response.sequences]
        require(found == expected, f"with the salt {salt!r} it drew {found}, and the first time {expected}")


def wrong_requests(case: EngineCase) -> None:
    """Invalid prompts and parameters are refused when they are submitted."""
    info, good = case.info, list(PROMPT)
    prompts: dict[str, list[int]] = {"an empty prompt": [], "an id outside of the vocabulary": [1, info.vocabulary]}
    prompts |= {"a negative id": [1, -1]}
    if info.context <= 4096:
        prompts["a prompt longer than the context"] = [1] * (info.context + 1)
    for what, prompt in prompts.items():
        with raises(what, DataError):
            case.engine.submit(prompt, {"max_tokens": 1})
    for params in ({"no_such_parameter": 1}, {"top_p": 0.0}, {"temperature": -1.0}, {"num_samples": 0}):
        with raises(f"submit() with {params}", ArgumentError, ValueError):
            case.engine.submit(good, {"max_tokens": 1, **params})
    require(not case.engine.decode(), "decode() has something to do after all requests were refused")


def prompt_scores(case: EngineCase) -> None:
    """`prompt_logprobs` and `prompt_targets` are a forward's log-probabilities; without the feature: `Unsupported`."""
    size = len(PROMPT)
    asked: dict[str, Any] = {"prompt_logprobs": 1, "prompt_targets": [[3, -1]] * size, "prompt_draws": 2}
    if not case.has("prompt_scores"):
        for name, value in asked.items():
            with raises(f"{name} without the feature prompt_scores", Unsupported):
                case.engine.submit(list(PROMPT), {"max_tokens": 1, name: value})
        raise NotApplicable("its features do not include 'prompt_scores'")
    ref = case.trained()
    table = case.table(ref, PROMPT)
    response = case.sample(case.engine.version(ref), max_tokens=1, prompt_temperature=1.0, **asked)
    scored, targets, draws = response.prompt_logprobs, response.prompt_target_logprobs, response.prompt_draws
    require(scored is not None and len(scored) == size and scored[0] is None, f"prompt_logprobs is {shown(scored)}")
    expected = [float(table[place, token]) for place, token in enumerate(PROMPT[1:])]
    far = max(abs(found - wanted) for found, wanted in zip(scored[1:], expected, strict=True))
    require(far <= case.precision, f"prompt_logprobs is {far:.3g} from a forward's")
    require(targets is not None and len(targets) == size, f"prompt_target_logprobs is {shown(targets)}")
    for place, (first, second) in enumerate(targets):
        fine = second is None and abs(first - float(table[place, 3])) <= case.precision
        require(fine, f"prompt_target_logprobs {place} is {[first, second]}; a forward gives {float(table[place, 3])}")
    fine = draws is not None and len(draws) == size - 1 and all(len(pairs) == 2 for pairs in draws)
    require(fine, f"prompt_draws is {shown(draws)} for {size} tokens and 2 draws")


def stop_strings(case: EngineCase) -> None:
    """A text in `stop` ends a sample; without the feature it is `Unsupported`."""
    if not case.has("stop_strings"):
        with raises("a text in stop without the feature stop_strings", Unsupported):
            case.engine.submit(list(PROMPT), {"max_tokens": 1, "stop": "a"})
        raise NotApplicable("its features do not include 'stop_strings'")
    for seed in range(8):
        (free,) = case.sample(seed=seed, max_tokens=8, temperature=1.5).sequences
        text = free.decoded or ""
        stop = next((letter for letter in text[1:] if letter.isascii() and letter.isalnum()), "")
        if not stop or stop in text[:1]:
            continue
        (ended,) = case.sample(seed=seed, max_tokens=8, temperature=1.5, stop=stop).sequences
        require(ended.stop_reason == "stop", f"with stop={stop!r} the reason is {ended.stop_reason!r} after {text!r}")
        same = list(free.tokens)[: len(ended.tokens)] == list(ended.tokens)
        require(same and len(ended.tokens) < 8, f"with stop={stop!r} it drew {ended.tokens}; without, {free.tokens}")
        return
    raise NotApplicable("in eight samples there was no text to stop at")


def min_p(case: EngineCase) -> None:
    """`min_p` removes tokens below that share of the largest probability; without the feature it is `Unsupported`."""
    _needs_feature(case, "min_p", {"min_p": 0.5})
    chances = (case.table(None, PROMPT)[-1] / 2.0).softmax(-1)
    share = float(chances.topk(3).values[-1] / chances.max()) * 0.999
    kept = set((chances >= share * chances.max()).nonzero().flatten().tolist())
    drawn = case.tokens(max_tokens=1, num_samples=60, temperature=2.0, min_p=share)
    found = {tokens[0] for tokens in drawn}
    require(found <= kept, f"with min_p={share:.3f} it drew {sorted(found - kept)}, which is not among {sorted(kept)}")
    require(len(found) > 1, f"with min_p={share:.3f} all samples are {found}")


def logit_bias(case: EngineCase) -> None:
    """`logit_bias` is added to the logits; without the feature it is `Unsupported`."""
    _needs_feature(case, "logit_bias", {"logit_bias": {3: 1.0}})
    (drawn,) = case.tokens(temperature=0, max_tokens=3, logit_bias={3: 1e4})
    require(drawn == [3, 3, 3], f"with a large bias for token 3 it drew {drawn}")
    (free,) = case.tokens(temperature=0, max_tokens=1)
    (other,) = case.tokens(temperature=0, max_tokens=1, logit_bias={free[0]: -1e4})
    require(other != free, f"with a large negative bias for token {free[0]} it drew {other}")


def penalties(case: EngineCase) -> None:
    """`presence_penalty` and `frequency_penalty` lower logits of sampled tokens, or raise them if they are negative.

    Absent they are `Unsupported`.
    """
    _needs_feature(case, "penalties", {"presence_penalty": 1.0}, {"frequency_penalty": 1.0})
    for name in ("presence_penalty", "frequency_penalty"):
        penalty: dict[str, Any] = {name: 1e4}
        (drawn,) = case.tokens(temperature=0, max_tokens=6, **penalty)
        require(len(set(drawn)) == 6, f"with {name}=1e4 it drew {drawn}, which has a token twice")
        penalty = {name: -1e4}
        (drawn,) = case.tokens(temperature=0, max_tokens=6, **penalty)
        require(len(set(drawn)) == 1, f"with {name}=-1e4 it drew {drawn}, which is not one token again and again")
    (first,), (repeated,) = (case.tokens(temperature=0, max_tokens=1, presence_penalty=value) for value in (0.0, 1e4))
    require(first == repeated, "presence_penalty changed the first token, although nothing had been sampled")


def structured_outputs(case: EngineCase) -> None:
    """The text matches `structured_outputs` and ends where it is complete; absent it is `Unsupported`."""
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    stops: tuple[Any, ...] = (None, [])
    _needs_feature(case, "structured_outputs", {"structured_outputs": {"json": schema}})
    for stop in stops:
        for sequence in case.sample(
            temperature=1.5, num_samples=4, max_tokens=60, stop=stop, structured_outputs={"json": schema}
        ).sequences:
            require(sequence.stop_reason == "stop", f"a complete text has the stop reason {sequence.stop_reason!r}")
            text = sequence.decoded
            if text is not None:
                require(json.loads(text).get("a") in ("x", "yz"), f"{text!r} does not match the schema")
    with raises("a schema that is not one", ArgumentError):
        case.engine.submit(list(PROMPT), {"max_tokens": 1, "structured_outputs": {"json": {"type": "nothing"}}})


def _needs_feature(case: EngineCase, feature: Feature, *asked: dict[str, Any]) -> None:
    """Check that an engine without a feature refuses parameters, and skip the rest of the check for it."""
    if case.has(feature):
        return
    for params in asked:
        with raises(f"{next(iter(params))} without the feature {feature}", Unsupported):
            case.engine.submit(list(PROMPT), {"max_tokens": 1, **params})
    raise NotApplicable(f"its features do not include {feature!r}")


def _scores(response: Any) -> Any:
    return [sequence.logprobs for sequence in response.sequences]
