"""The data loader: batches of rows in a reproducible order, divided among data ranks."""
