"""What `dpo` is made of, beside its loop."""
