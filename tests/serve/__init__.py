"""Real Ray Serve with emulated engines."""
