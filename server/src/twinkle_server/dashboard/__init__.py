"""The dashboard: pages rendered by the server, with scripts of our own for curves and live updates."""
