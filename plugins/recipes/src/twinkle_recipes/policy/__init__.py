"""Parts of the recipes `grpo` and `rloo`."""
