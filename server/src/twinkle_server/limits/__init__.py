"""What stands between the network and the application: bounds on everything that a stranger can send."""
