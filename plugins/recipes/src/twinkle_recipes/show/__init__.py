"""What is seen of a run: lines, tables and pictures."""
