"""What the study trains beside GPT-2: a masked language model, and images."""
