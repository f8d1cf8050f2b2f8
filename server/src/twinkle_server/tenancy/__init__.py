"""Who may ask for what, and how much: keys, quotas, the audit log."""
