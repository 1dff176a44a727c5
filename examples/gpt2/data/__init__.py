"""Text to tokens to batches.

``files`` finds, unpacks and decodes what people have text in, ``documents``
takes the documents out of it, ``tokenizer`` turns them into tokens, ``writer``
writes these as shards, ``shards`` reads token files of every format, and
``counts`` counts what has no index. ``evaluation`` opens what is only evaluated
on, ``tokens`` all that a run needs, ``mixture`` chooses the sequences of a
step, and ``batches`` puts them on devices.
"""
