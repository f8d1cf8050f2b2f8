"""Data sets, loaders and other components of tenants that live on the service, each in a process of its own."""
