"""How many replicas, of which kind, when: pure, may use policies."""
