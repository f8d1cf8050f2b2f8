"""What `gkd` is made of, beside its loop."""
