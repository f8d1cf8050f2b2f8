"""Many adapters on one base model."""
