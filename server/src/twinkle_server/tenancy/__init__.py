"""Authentication, quotas, and the audit log."""
