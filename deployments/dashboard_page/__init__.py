"""The page at ``/dashboard``; see README.md."""
