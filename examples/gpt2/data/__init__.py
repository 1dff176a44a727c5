"""Text to tokens to batches.

``documents`` reads text from files, ``tokenizer`` turns it into tokens,
``tokens`` writes, caches and maps token files, ``batches`` puts tokens on
devices. ``atomic`` writes files and folders all or nothing.
"""
