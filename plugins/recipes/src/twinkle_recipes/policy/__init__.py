"""What `grpo` and `rloo` are made of, beside their loop."""
