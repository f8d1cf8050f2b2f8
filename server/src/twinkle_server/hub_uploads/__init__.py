"""Uploads of checkpoints to Hugging Face and ModelScope, with tokens of tenants that are kept in memory only."""
