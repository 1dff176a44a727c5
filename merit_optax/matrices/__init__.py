"""Which axes of a parameter are matrices, and their norms."""
