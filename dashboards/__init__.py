"""What people look at: every metric once."""
