"""Control loop."""
