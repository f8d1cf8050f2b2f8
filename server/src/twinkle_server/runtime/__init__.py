"""The API process: order of operations, futures, sessions, and supervision of the engine process."""
