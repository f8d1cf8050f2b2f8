# Written by `twinkle plugins types`; do not edit.
"""Patches: the base class `Patch`, the functions that apply and undo one, and every installed patch by name."""

from twinkle._registry import lazy_names


from twinkle_patches.apply import Applied as Applied
from twinkle_patches.apply import applied_patches as applied_patches
from twinkle_patches.apply import apply_context as apply_context
from twinkle_patches.apply import apply_patch as apply_patch
from twinkle_patches.apply import is_applied as is_applied
from twinkle_patches.apply import undo_patch as undo_patch
from twinkle_patches.chat_templates import Qwen3AllowToolTailTemplate as Qwen3AllowToolTailTemplate
from twinkle_patches.chat_templates import Qwen3ChatTemplate as Qwen3ChatTemplate
from twinkle_patches.embedding import TransformersEmbeddingPatch as TransformersEmbeddingPatch
from twinkle_patches.fused_ce import TransformersFusedCEPatch as TransformersFusedCEPatch
from twinkle_patches.gated_delta import GatedDeltaNetPaddingFreePatch as GatedDeltaNetPaddingFreePatch
from twinkle_patches.neftune import NEFTunePatch as NEFTunePatch
from twinkle_patches.no_split import NoSplitModulesPatch as NoSplitModulesPatch
from twinkle_patches.patch import Patch as Patch
from twinkle_patches.record import applications as applications
from twinkle_patches.record import is_recorded as is_recorded
from twinkle_patches.record import undo as _undo_recorded
from twinkle_patches.record import version as _record_version
record_version = _record_version
undo_recorded = _undo_recorded
