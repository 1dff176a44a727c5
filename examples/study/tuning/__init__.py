"""What is tuned, and how: learning rates, and one setting after the other."""
