"""`ModelCondenser`: a language model shortens chunks."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from twinkle.data_format import SampledSequence, SamplingParams
from twinkle.errors import ArgumentError, DataError
from twinkle_agentic.condenser.base import SKIPPED_ROLES, Choice, Condenser, at_least, condensed
from twinkle_agentic.data_format import Chunk, Chunks

SYSTEM = (
    "You shorten passages. Another model reads your version and decides whether it needs the whole passage.\n"
    "Write two sections. `## Summary` states the subject of the passage and its main facts: names, numbers, dates, "
    "relations; facts that matter for the question come first. `## More` lists the kinds of further facts that the "
    "passage contains, without the facts themselves.\n"
    "Use the language of the passage. Use short notes instead of sentences. Add nothing that is not in the passage, "
    "and never write about the question itself."
)
USER = "Question: {query}\n\nWrite at most {budget} characters.\n\nPassage:\n{text}"
_SLOT = re.compile(r"\{(?:query|budget|text)\}")
_NO_QUERY = "(none)"
_SPECIAL = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?s>|<(?:eos|bos|end_of_turn|start_of_turn)>")
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


class ModelCondenser(Condenser):
    """Shortens chunks with a sampler; a version that is not shorter than the chunk is dropped.

    Args:
        sampler: any sampler with a template.
        compression_ratio: by how much chunks are to be shortened, above 1.
        sampling_params: None draws greedily, with as many tokens as the longest version may have characters.
        system_prompt: None asks for the sections `## Summary` and `## More`.
        user_prompt_template: text with `{budget}` (characters) and `{text}`, and optionally `{query}`.
        min_chars: shorter chunks stay.
        min_budget_chars: the least that the model is told it may write; a chunk that is not longer stays.
        template: None is the template of the sampler; its special tokens are removed from the answers.
        skip_roles: chunks of these roles stay.
        skip_pattern: chunks in which this regular expression is found stay.
        related_query: returns the question that a chunk holds, or None; it applies to the chunks that follow.
        rounds: only chunks of these rounds are shortened; None are all.
        batch_size: chunks of one call of the sampler; the last call is filled up to this number. None is one call.
        lora_path: adapter to sample with; None is the base model.

    Raises:
        ArgumentError: an argument is outside its range.
    """

    def __init__(
        self,
        sampler: Any,
        compression_ratio: float = 2.0,
        *,
        sampling_params: SamplingParams | None = None,
        system_prompt: str | None = None,
        user_prompt_template: str | None = None,
        min_chars: int = 200,
        min_budget_chars: int = 250,
        template: Any = None,
        skip_roles: Collection[str] = SKIPPED_ROLES,
        skip_pattern: str | None = None,
        related_query: Callable[[Chunk], str | None] | None = None,
        rounds: Sequence[int] | None = None,
        batch_size: int | None = None,
        lora_path: str | None = None,
    ) -> None:
        if not callable(getattr(sampler, "sample", None)):
            raise ArgumentError(f"sampler must have sample(), got {type(sampler).__name__}")
        self.user_prompt_template = USER if user_prompt_template is None else user_prompt_template
        if missing := [name for name in ("{budget}", "{text}") if name not in self.user_prompt_template]:
            raise ArgumentError(f"user_prompt_template must contain {missing[0]}")
        try:
            self.skip_pattern = None if skip_pattern is None else re.compile(skip_pattern)
        except re.error as error:
            raise ArgumentError(f"skip_pattern is not a regular expression: {error}") from error
        self.choice = Choice(compression_ratio, min_chars, skip_roles, rounds)
        self.min_budget_chars = at_least("min_budget_chars", min_budget_chars, 1)
        self.batch_size = None if batch_size is None else at_least("batch_size", batch_size, 1)
        self.sampler, self.sampling_params, self.template = sampler, sampling_params, template
        self.system_prompt = SYSTEM if system_prompt is None else system_prompt
        self.related_query, self.lora_path = related_query, lora_path

    def __call__(self, chunks: Chunks, **kwargs: Any) -> Chunks:
        """Return the chunks, those that were chosen shortened.

        Args:
            chunks: of one or several conversations, in order.
            **kwargs: none; an unknown name is an error.

        Raises:
            DataError: the sampler returns another number of responses than it was given prompts.
        """
        if kwargs:
            raise ArgumentError(f"ModelCondenser takes no argument {next(iter(kwargs))!r} in a call")
        found = list(chunks.chunks)
        jobs = self._jobs(found)
        size = self.batch_size or len(jobs)
        for start in range(0, len(jobs), size or 1):
            batch = jobs[start : start + size]
            for (place, _, _), text in zip(batch, self._written(batch, size), strict=True):
                if text and len(text) < len(found[place]["content"]):
                    found[place] = condensed(found[place], text)
        return Chunks(found)

    def _jobs(self, chunks: Sequence[Chunk]) -> list[tuple[int, str, int]]:
        """Return position, prompt and budget of each chunk to shorten."""
        jobs, query = [], _NO_QUERY
        for place, chunk in enumerate(chunks):
            if self.related_query is not None and (asked := self.related_query(chunk)):
                query = asked
            if not self.choice.takes(chunk) or (self.skip_pattern and self.skip_pattern.search(chunk["content"])):
                continue
            text = chunk["content"]
            budget = max(self.min_budget_chars, self.choice.budget(text))
            if budget < len(text):
                # Not str.format: the passage and the prompt may contain braces.
                values = {"{query}": query, "{budget}": str(budget), "{text}": text}
                jobs.append((place, _filled(self.user_prompt_template, values), budget))
        return jobs

    def _written(self, batch: Sequence[tuple[int, str, int]], size: int) -> list[str]:
        prompts: list[Any] = [
            {"messages": [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": prompt}]}
            for _, prompt, _ in batch
        ]
        params = self.sampling_params
        if params is None:
            params = SamplingParams(temperature=0.0, max_tokens=max(budget for _, _, budget in batch))
        model = {"use_base_model": True} if self.lora_path is None else {"adapter_path": self.lora_path}
        padded = prompts + prompts[-1:] * (size - len(prompts))
        responses = self.sampler.sample(padded, replace(params, num_samples=1), **model)
        if len(responses) != len(padded):
            raise DataError(f"the sampler gave {len(responses)} responses for {len(padded)} prompts")
        return [self._text(response.sequences[0]) for response in responses[: len(prompts)]]

    def _text(self, sequence: SampledSequence) -> str:
        template = self.template if self.template is not None else getattr(self.sampler, "template", None)
        text = sequence.decoded
        if text is None and template is not None:
            text = template.decode(sequence.tokens, skip_special_tokens=True)
        for token in getattr(getattr(template, "tokenizer", None), "all_special_tokens", None) or ():
            text = (text or "").replace(token, "")
        return _THOUGHT.sub("", _SPECIAL.sub("", text or "")).strip()


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _SLOT.sub(lambda found: values[found[0]], template)
