"""The model: attention, blocks, loss, decoding, and the files it is kept in.

Names of arrays end in letters that give their axes, in all of the repository:

A micro-batches of a step, B sequences, T tokens (queries of attention), S
source tokens (its keys and values, slots of the cache), N tokens of all
sequences together, C tokens of a chunk, D features, F hidden features of the
MLP, H heads, K features of a head, X query, key and value, L layers, V
vocabulary, 1 an axis of size one.
"""
