"""What all rooms share; imports nothing of them."""
