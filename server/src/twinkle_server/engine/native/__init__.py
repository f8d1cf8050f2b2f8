"""Models of tenants with components of their own, as the native protocol uses them."""
