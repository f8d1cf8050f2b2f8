"""Worker processes, so that code that hangs, crashes or takes too much memory affects only its tenant."""
