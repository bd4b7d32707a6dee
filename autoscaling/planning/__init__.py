"""Parts of the capacity planner (``autoscaling/planner.py``): what a load asks for, which fleets, whether one holds."""
