"""The client of a Twinkle service: the classes of a local training script, over HTTP."""
