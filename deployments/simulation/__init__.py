"""Files and terminal of the simulator; what it computes is in ``autoscaling/simulator``."""
