"""Tests of token insertion as text. Each line is an instruction; its tokens follow the arrow."""

from __future__ import annotations

from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.pipeline import Ring, StreamInstruction, reorder_first_loads
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import Rule, VerifyError, verify
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import GEMM_LOOPS, VECTOR_LOOPS, ASource, BSource, Buffer, Destination, Opcode, Unit

_SMALL = dict(inp_depth=16, wgt_depth=16, acc_depth=16, vin_depth=16, out_depth=16, par_depth=8)
CFG = Config(block_in=4, block_out=4, **_SMALL)
ARENA = 4096


def parse(line: str) -> StreamInstruction:
    """Return the instruction of a line.

    load  BUFFER FIRST COUNT [BYTE]        from byte (default: a constant)
    gemm  INP WGT ACC COUNT [accumulate]   inputs and accumulators from INP and ACC on
    vector acc|vin A OUT COUNT [vin B]
    store FIRST COUNT BYTE
    """
    opcode, *words = line.split()
    numbers = [int(word) for word in words if word.isdigit()]
    if opcode == "load":
        first, count, *place = numbers
        fields = dict(
            x_size=count, y_size=1, z_size=1, sram_base=first, sram_x=1, dram_addr=place[0] if place else ARENA
        )
        return StreamInstruction(Opcode.LOAD, fields | dict(buffer=Buffer[words[0].upper()]))
    if opcode == "store":
        first, count, place = numbers
        fields = dict(x_size=count, y_size=1, z_size=1, sram_base=first, sram_x=1, dram_addr=place)
        return StreamInstruction(Opcode.STORE, fields)
    if opcode == "gemm":
        inp, wgt, acc, count = numbers
        fields = {f"extent_{loop}": 1 for loop in GEMM_LOOPS} | dict(extent_x=count, inp_x=1, acc_x=1)
        fields |= dict(inp_base=inp, wgt_base=wgt, acc_base=acc, accumulate="accumulate" in words)
        return StreamInstruction(Opcode.GEMM, fields)
    a, out, count, *b = numbers
    fields = {f"extent_{loop}": 1 for loop in VECTOR_LOOPS} | dict(extent_x=count, a_x=1, dst_x=1)
    fields |= dict(a_base=a, a_source=ASource[words[0].upper()], dst_base=out, destination=Destination.OUT)
    if b:
        fields |= dict(b_source=BSource.VIN, b_base=b[0], b_x=1)
    return StreamInstruction(Opcode.VECTOR, fields)


def with_tokens(text: str, cfg: Config = CFG) -> str:
    """Return the lines of `text`, each with its waits and posts, after verification."""
    lines = [" ".join(line.split("->")[0].split()) for line in text.strip().splitlines()]
    stream = [parse(line) for line in lines]
    insert_tokens(cfg, stream, ARENA)
    verify(cfg, encode(cfg, stream), 2 * ARENA, (0, ARENA))
    return "\n".join(f"{line} -> {_tokens(i)}".strip() for line, i in zip(lines, stream, strict=True))


def _tokens(instruction: StreamInstruction) -> str:
    parts = []
    for kind in ("wait", "post"):
        units = [unit.name for unit in Unit if instruction.fields.get(kind, 0) >> unit & 1]
        parts += [f"{kind} {' '.join(units)}"] if units else []
    return ", ".join(parts)


def same(text: str, cfg: Config = CFG) -> None:
    """Assert that `text` without its arrows gets the tokens in `text`."""
    expected = "\n".join(" ".join(line.split()) for line in text.strip().splitlines())
    assert with_tokens(text, cfg) == expected


def test_a_result_waits_for_its_operands() -> None:
    same("""
        load inp 0 4         ->
        load wgt 0 1         -> post GEMM
        gemm 0 0 0 4         -> wait LOAD, post VECTOR
        vector acc 0 0 4     -> wait GEMM, post STORE
        store 0 4 0          -> wait VECTOR
    """)


def test_what_is_known_through_another_unit_needs_no_token() -> None:
    """The last vector needs no token from the load, whose end it knows through the gemm."""
    same("""
        load vin 0 4               ->
        load inp 0 4               ->
        load wgt 0 1               -> post GEMM
        gemm 0 0 0 4               -> wait LOAD, post VECTOR
        vector acc 0 0 4 vin 0     -> wait GEMM
    """)


def test_operands_from_two_units_take_two_tokens() -> None:
    same("""
        load inp 0 4               ->
        load wgt 0 1               -> post GEMM
        load vin 0 4               -> post VECTOR
        gemm 0 0 0 4               -> wait LOAD, post VECTOR
        vector acc 0 0 4 vin 0     -> wait LOAD GEMM
    """)


def test_a_buffer_is_loaded_again_once_it_has_been_read() -> None:
    same("""
        load wgt 0 1         ->
        load inp 0 4         -> post GEMM
        gemm 0 0 0 4         -> wait LOAD, post LOAD
        load inp 4 4         -> post GEMM
        gemm 4 0 4 4         -> wait LOAD
        load inp 0 4         -> wait GEMM, post GEMM
        gemm 0 0 8 4         -> wait LOAD
    """)


def test_only_the_last_of_several_reads_gives_a_token() -> None:
    same("""
        load wgt 0 1         ->
        load inp 0 4         -> post GEMM
        gemm 0 0 0 4         -> wait LOAD
        gemm 0 0 4 4         ->
        gemm 1 0 8 2         -> post LOAD
        load inp 0 4         -> wait GEMM
    """)


def test_a_layer_reads_what_the_one_before_stored() -> None:
    same("""
        load vin 0 8 0        -> post VECTOR
        vector vin 0 0 4      -> wait LOAD, post STORE
        store 0 4 512         -> wait VECTOR, post LOAD
        vector vin 4 4 4      -> post STORE
        store 4 4 528         -> wait VECTOR, post LOAD
        load vin 8 4 512      -> wait STORE
        load vin 12 4 528     -> wait STORE
    """)


def test_a_store_waits_until_its_bytes_have_been_read() -> None:
    """A store waits until a load has read the bytes that it overwrites. The vector has waited only for the first
    load."""
    same("""
        load vin 0 4 0        -> post VECTOR
        load vin 4 4 16       -> post STORE
        vector vin 0 0 4      -> wait LOAD, post STORE
        store 0 4 0           -> wait VECTOR
        store 0 4 16          -> wait LOAD
    """)


def test_constants_are_not_tracked() -> None:
    same("""
        load inp 0 4          ->
        load wgt 0 1          ->
        load wgt 0 1          -> post GEMM
        gemm 0 0 0 4          -> wait LOAD
    """)


def test_accumulation_stays_within_its_unit() -> None:
    same("""
        load inp 0 4              ->
        load wgt 0 2              -> post GEMM
        gemm 0 0 0 4              -> wait LOAD
        gemm 0 1 0 4 accumulate   -> post VECTOR
        vector acc 0 0 4          -> wait GEMM, post GEMM
        gemm 0 0 0 4              -> wait VECTOR
    """)


def test_what_runs_alone_waits_for_all_that_computes() -> None:
    """The loads of a tile that must not overlap wait for all compute, though they touch none of its data."""
    text = """
        load inp 0 4
        load wgt 0 1
        gemm 0 0 0 4
        vector acc 0 0 4
        load inp 4 4
    """
    stream = [parse(line) for line in text.strip().splitlines()]
    stream[-1].waits_for_compute = True
    insert_tokens(CFG, stream, ARENA)
    assert _tokens(stream[-1]) == "wait VECTOR"  # the vector has waited for the gemm
    assert with_tokens(text).splitlines()[-1].endswith("->")
    verify(CFG, encode(CFG, stream), 2 * ARENA, (0, ARENA))


AHEAD = """
    load wgt 0 1
    load inp 0 1
    load vin 0 1
    load vin 1 1
    load vin 2 1
    load acc 0 8
    gemm 0 0 0 1 accumulate
    gemm 0 0 0 1 accumulate
    gemm 0 0 0 1 accumulate
    vector vin 0 0 1
    vector vin 1 1 1
    vector vin 2 2 1
    vector acc 4 3 1
"""


def test_no_more_tokens_than_a_semaphore_holds() -> None:
    """A semaphore holds three tokens, so that the last load gives the third one, too.

    With a fourth token this load could not start before a vector. The fetch does not reach that vector, since the queue
    of GEMM is full of instructions that wait for the load.
    """
    small = Config(block_in=4, block_out=4, token_bits=2, queue_depth=2, **_SMALL)
    lines = [line.strip() for line in AHEAD.strip().splitlines()]
    text = with_tokens(AHEAD, small)
    assert sum("wait LOAD" in line for line in text.splitlines() if line.startswith("vector")) == 3
    assert sum("wait LOAD" in line for line in with_tokens(AHEAD).splitlines() if line.startswith("vector")) == 4

    stream = [parse(line) for line in lines]
    insert_tokens(CFG, stream, ARENA)
    try:
        verify(small, encode(small, stream), 2 * ARENA, (0, ARENA))
    except VerifyError as error:
        assert error.rule == Rule.PROGRESS
    else:
        raise AssertionError("four tokens fit a semaphore of three")


def test_entries_of_one_size_lie_at_its_multiples() -> None:
    """Entries of one size lie at multiples of the size, so that as many as possible fit."""
    ring = Ring(16)
    assert [ring.take(size) for size in (2, 5, 5, 5, 6, 6)] == [0, 5, 10, 0, 6, 0]
    assert [ring.take(size) for size in (9, 7, 7)] == [6, 0, 7]


def test_a_ring_forgets_what_it_overwrites() -> None:
    ring = Ring(8)
    assert [ring.take(3, "a"), ring.take(3, "b")] == [0, 3]
    assert ring.take(4, "c") == 0  # two entries are left at the end: too few
    assert [ring.find(key) for key in "abc"] == [None, None, 0]
    assert ring.take(4, "d") == 4
    assert [ring.find(key) for key in "cd"] == [0, 4]
    assert ring.take(8) == 0
    assert [ring.find(key) for key in "cd"] == [None, None]


# LOADs by need ------------------------------------------------------------------------------------------------------


def by_need_of(text: str) -> list[str]:
    lines = [" ".join(line.split()) for line in text.strip().splitlines()]
    stream = [parse(line) for line in lines]
    numbers = {id(instruction): number for number, instruction in enumerate(stream)}
    return [lines[numbers[id(instruction)]] for instruction in reorder_first_loads(CFG, stream)]


def test_first_loads_are_sorted_by_their_readers() -> None:
    found = by_need_of("""
        load wgt 4 2
        load par 0 1
        load wgt 0 1
        load inp 0 4
        gemm 0 0 0 4
        load inp 8 4
        load wgt 8 1
        vector acc 0 0 4
        gemm 4 4 8 4
    """)
    assert found[:4] == ["load wgt 0 1", "load inp 0 4", "load wgt 4 2", "load par 0 1"]
    assert found[4:] == ["gemm 0 0 0 4", "load inp 8 4", "load wgt 8 1", "vector acc 0 0 4", "gemm 4 4 8 4"]


def test_loads_to_the_same_place_stay_in_order() -> None:
    text = """
        load wgt 4 2
        load wgt 5 1
        load inp 0 4
        gemm 0 0 0 4
    """
    assert by_need_of(text) == [" ".join(line.split()) for line in text.strip().splitlines()]
