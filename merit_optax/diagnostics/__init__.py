"""What an optimizer does to each parameter."""
