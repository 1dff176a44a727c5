"""Speed and memory against peers."""
