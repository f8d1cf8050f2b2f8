"""Templates: the class `Template` (contract and component in one), and every installed template by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.template.base import Template

__all__ = ["Template"]

__getattr__, __dir__ = room(__name__, "template")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle.template.deepseek_v4 import DeepseekV4Template as DeepseekV4Template
    from twinkle.template.glm4 import Glm4Template as Glm4Template
    from twinkle.template.reasoning import DeepseekR1Template as DeepseekR1Template
    from twinkle.template.reasoning import Gemma4Template as Gemma4Template
