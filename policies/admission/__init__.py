"""Who gets in: bounds on what one gateway holds."""
