"""`twinkle doctor`: what this machine computes fast and exactly, what it does not, and why."""
