"""Virtual threads to one instruction stream with explicit tokens.

In the order in which tiles pass the files:

interleave       how the tiles of virtual threads alternate
pipeline         which places in scratchpads tiles get, and which loads run ahead of their use
load_passes      in which order the first loads of a launch come, where codebooks are loaded, and which weights come
                 through both ports
tokens           which instruction waits for which, by as few tokens as possible
encode           the bytes of instructions, and their text
verify/          whether a stream computes its layers, without a race: an independent proof
"""
