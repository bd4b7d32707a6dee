"""Pure code and single parts, no Ray."""
