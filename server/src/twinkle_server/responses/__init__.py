"""Models of the responses of all routes, for the OpenAPI description.

Endpoints write responses themselves, without conversion by these models. Tests send requests of all kinds, and compare
each response with its model.
"""
