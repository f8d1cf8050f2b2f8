"""Low-rank products of many adapters in one pass: sorted rows, grouped products, routed experts."""
