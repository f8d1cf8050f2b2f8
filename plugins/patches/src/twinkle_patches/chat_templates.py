"""Repairs of the chat templates that Qwen3 models ship: what they read from a turn, which conversations they take."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar

from twinkle.errors import PatchError
from twinkle.patch import Patch

_PARSES = re.compile(
    r"\{%-?\s*if\s+'</think>'\s+in\s+(?P<text>content|message\.content)\s*-?%\}"
    r"(?P<body>(?:\s*\{%-?\s*set\s+(?:reasoning_content|content)\s*=.*?%\}){2}\s*)"
    r"\{%-?\s*endif\s*-?%\}",
    re.DOTALL,
)
_PARSED = (
    "{{%- if {text}.lstrip().startswith('<think>') and '</think>' in {text} %}}"
    "{{%- set reasoning_content = {text}.partition('</think>')[0].partition('<think>')[2].strip('\\n') %}}"
    "{{%- set content = {text}.partition('</think>')[2].lstrip('\\n') %}}"
    "{{%- endif %}}"
)
_REFUSES = re.compile(
    r"\{%-?\s*if\s+ns\.multi_step_tool\s*-?%\}\s*"
    r"\{\{-?\s*raise_exception\((?P<quote>['\"])No user query found in messages\.?(?P=quote)\)\s*-?\}\}\s*"
    r"\{%-?\s*endif\s*-?%\}"
)
_TAKES = "{%- if ns.multi_step_tool %}{%- set ns.last_query_index = -1 %}{%- endif %}"


class _ChatTemplatePatch(Patch):
    """Edits the Jinja text of a tokenizer, a processor, or a Twinkle template around them."""

    changes = ("<tokenizer>.chat_template",)
    what: ClassVar[str]

    def __call__(self, module: Any) -> Any:
        """Apply the patch to a tokenizer, a processor or a `Template`, and return it.

        Raises:
            PatchError: it has no chat template, several, or one that is not Qwen3's.
        """
        owners = list(_owners(module))
        if not owners:
            raise PatchError(
                f"{type(self).__name__}: {type(module).__name__} has no chat template; give a tokenizer, a processor "
                "or the template that encodes the rows"
            )
        for owner in owners:
            self._check(owner.chat_template)
            self.edit(owner, "chat_template", self._edited)
        return module

    def _check(self, text: Any) -> None:
        if not isinstance(text, str):
            raise PatchError(f"{type(self).__name__}: there are several chat templates ({', '.join(text)})")
        if self._edited(text) == text and not self._done(text):
            raise PatchError(
                f"{type(self).__name__}: this chat template does not {self.what}, as Qwen3's does; it is "
                "another model's, or one that needs no patch"
            )

    @staticmethod
    def _edited(text: str) -> str:
        raise NotImplementedError

    @staticmethod
    def _done(text: str) -> bool:
        raise NotImplementedError


class Qwen3ChatTemplate(_ChatTemplatePatch):
    """A `</think>` counts as the end of a thought only in a turn that begins with `<think>`.

    Qwen3's chat template takes any turn of the assistant that mentions `</think>` apart: what stands before the first
    is shown as a thought, or dropped in older turns, and what stands between the first and the last is lost. With the
    patch a turn without a thought at its beginning is shown unchanged, and a thought ends at the first `</think>`.
    Turns with `reasoning_content` are shown as before.
    """

    what = "read thoughts from the text of a turn"
    needed = "where turns of the assistant may mention </think>; without it Template refuses such a row"

    @staticmethod
    def _edited(text: str) -> str:
        return _PARSES.sub(lambda found: _PARSED.format(text=found["text"]), text)

    @staticmethod
    def _done(text: str) -> bool:
        return any(_PARSED.format(text=name) in text for name in ("content", "message.content"))


class Qwen3AllowToolTailTemplate(_ChatTemplatePatch):
    """A conversation without a user's question is rendered: a piece of an agent's work, ending in a tool's answer.

    The chat template of Qwen3.5 and later refuses it ("No user query found in messages."). With the patch such a piece
    is shown as it stands behind its question, with the thoughts of all its turns. Everything else is shown as before.
    """

    what = "refuse conversations without a question of the user"
    needed = "where rows are pieces of an agent's work, for Qwen3.5 and later"

    @staticmethod
    def _edited(text: str) -> str:
        return _REFUSES.sub(lambda found: _TAKES, text)

    @staticmethod
    def _done(text: str) -> bool:
        return _TAKES in text or "ns.last_query_index" in text  # the first Qwen3 refuses nothing


def _owners(module: Any) -> Iterator[Any]:
    """Yield the objects that have a chat template, each once: a processor has one in addition to its tokenizer's."""
    seen: list[Any] = []
    for owner in (module, getattr(module, "processor", None), getattr(module, "tokenizer", None)):
        if owner is not None and not any(owner is other for other in seen) and getattr(owner, "chat_template", None):
            seen.append(owner)
            yield owner
