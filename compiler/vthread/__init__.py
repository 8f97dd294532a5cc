"""Merge the tiles of a launch into one instruction stream with explicit tokens, and prove it.

In the order in which tiles pass the files:

interleave       how the statements of virtual threads in a user's schedule alternate (layers use pipeline instead)
pipeline         in which order tiles load and compute, and which entries of scratchpads they get; in which order the
                 first loads of a launch come, where codebooks are loaded, and which weights come through both ports
                 (from which size on: hw/spec/scratchpads.py)
needs            which instructions each instruction must come after, by the addresses that both access
load_order       which LOADs move before one that waits, and which are cut in parts
tokens           which instruction takes tokens from which, as few as possible
encode           the bytes of instructions, and their text (disassembly)
verify/          proves that a stream computes its layers without a race, independently of the files above
"""
