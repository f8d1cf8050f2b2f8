"""What is durable: SQLite, and files beside it."""
