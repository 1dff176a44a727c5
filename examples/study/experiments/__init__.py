"""The experiments of the study, each a plan, a section and a figure."""
