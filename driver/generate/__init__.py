"""Generate text and other sequences with decoders: models that read tokens and a cache of the tokens before them.

In the order in which data passes them:

- `roles.py`: decides which input of a model is tokens, mask, positions or a cache, and which output is logits
- `vocabulary.py`: text to tokens and back
- `cached_attention.py`: rewrites attention operators with a cache inside to plain operators
- `position_source.py`, `rotary.py`, `writer.py`: parts of that: checks positions, rotates, writes nodes
- `stepping.py`: rewrites a decoder to return only the new rows of its caches
- `decoder.py`: `celosia.Decoder`: compiles for one token and for a chunk of a prompt (decides the default lengths of
  chunk and cache); keeps caches; runs step by step
  until as many tokens as asked for have come, or the cache is full
- `sampling.py`: decides the next token from logits
- `usage.py`: cycles, bytes and tokens per second of a session, for the report
"""
