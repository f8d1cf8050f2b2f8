"""Backups of a data folder while its service runs, their verification, and their restoration."""
