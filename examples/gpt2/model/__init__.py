"""The model: its layers, loss, decoding, and the files it is kept in."""
