"""Text to tokens to batches.

``corpus`` reads the text that fits in memory, ``documents`` streams any amount
of it, ``tokenizer`` turns text into tokens, ``tokens`` keeps them in files, and
``batches`` puts them on devices.
"""
