"""An endpoint picker for gateways: Envoy's external processing over the router of the frontend, `python -m dynamo.picker`."""

__all__: list[str] = []
