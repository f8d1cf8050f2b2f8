"""Built-in data sets, data loaders, preprocessors and filters."""
