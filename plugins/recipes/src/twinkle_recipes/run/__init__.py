"""What surrounds the loop of every recipe: it begins, keeps what it made, stops and goes on."""
