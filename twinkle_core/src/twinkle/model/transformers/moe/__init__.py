"""Published path of what concerns mixture-of-experts models."""
