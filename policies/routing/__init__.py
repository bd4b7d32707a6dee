"""Which replica takes a request: prefix index, load, predicted TTFT, bounded load."""
