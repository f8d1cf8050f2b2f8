"""The Tinker face: what the unmodified SDK asks for over HTTP, turned into operations and records."""
