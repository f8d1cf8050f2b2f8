"""Recipes: complete training runs, each as one readable loop. `twinkle_recipes.sft.sft` fine-tunes on conversations."""
