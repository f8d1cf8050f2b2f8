"""Recipes: whole runs, each one readable loop. `twinkle_recipes.sft.sft` fine-tunes on conversations."""
