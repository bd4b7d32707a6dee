"""Number of replicas."""
