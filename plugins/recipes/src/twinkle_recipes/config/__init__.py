"""The keys that recipes have in common, and those of `sft`."""
