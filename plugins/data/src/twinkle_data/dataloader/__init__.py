"""The data loader: batches of rows in a reproducible order, each data rank its own part."""
