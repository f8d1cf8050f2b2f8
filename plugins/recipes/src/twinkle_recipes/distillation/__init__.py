"""Parts of the recipe `gkd`."""
