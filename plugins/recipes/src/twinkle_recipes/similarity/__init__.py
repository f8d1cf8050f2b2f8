"""What `embedding` is made of, beside its loop."""
