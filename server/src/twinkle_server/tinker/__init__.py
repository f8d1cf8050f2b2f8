"""The Tinker face: routes under `/api/v1`."""
