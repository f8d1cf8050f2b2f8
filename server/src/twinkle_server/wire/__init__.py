"""What stands in the bodies of the Tinker protocol: messages, arrays in them, and the JSON forms of older clients."""
