"""Patches: the base class `Patch`, the functions that apply and undo one, and every installed patch by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room

__getattr__, __dir__ = room(__name__, "patch")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_patches.chat_templates import Qwen3AllowToolTailTemplate as Qwen3AllowToolTailTemplate
    from twinkle_patches.chat_templates import Qwen3ChatTemplate as Qwen3ChatTemplate
    from twinkle_patches.embedding import TransformersEmbeddingPatch as TransformersEmbeddingPatch
    from twinkle_patches.fused_ce import TransformersFusedCEPatch as TransformersFusedCEPatch
    from twinkle_patches.gated_delta import GatedDeltaNetPaddingFreePatch as GatedDeltaNetPaddingFreePatch
    from twinkle_patches.no_split import NoSplitModulesPatch as NoSplitModulesPatch
