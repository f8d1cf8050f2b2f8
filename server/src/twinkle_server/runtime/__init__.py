"""The API process's half: order of operations, their futures, and the engine child that it looks after."""
