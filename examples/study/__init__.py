"""The experiments of the paper, at the size of the machine at hand."""
