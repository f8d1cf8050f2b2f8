"""Parts of the recipe `dpo`."""
