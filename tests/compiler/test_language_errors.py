"""Each wrong kernel gives an error of one sentence with the file and line of the fault."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from benchmarks.language import conv3x3, linear
from language_kernels import interpreted

import celosia.language as cl

F = np.zeros(64, np.float32)
I = np.zeros(64, np.int32)
X, Y = np.zeros((32, 32), np.int8), np.zeros((32, 32), np.int8)
P = np.zeros(32, np.uint64)
CASES: dict[str, tuple[Any, tuple[Any, ...], str, Any]] = {}


def wrong(message: str, *args: Any, grid: Any = (1,), target: str = "cpu") -> Callable[[Any], Any]:
    """Register the kernel below, which must fail at the line that ends with `# here`, with the message `says`."""

    def add(function: Any) -> Any:
        CASES[function.__name__] = (cl.jit(function, target=target, config="tiny"), args, message, grid)
        return function

    return add


# Values that are not known -----------------------------------------------------------------------------------------


@wrong("write cl.where", F)
def if_on_a_tile(x):
    v = cl.load(x + 0)
    if v > 0:  # here
        cl.store(x + 0, v)


@wrong("cl.range in the place of `while`", F)
def while_on_a_tile(x):
    v = cl.load(x + 0)
    while v > 0:  # here
        v = v - 1


@wrong("`and` and `or`", F)
def and_of_masks(x):
    i = cl.arange(0, 8)
    cl.store(x + i, 0.0, mask=(i > 2) and (i < 5))  # here


@wrong("no Python number", F)
def a_tile_as_a_number(x):
    n = cl.program_id(0)
    cl.store(x + 0, [1.0, 2.0][n])  # here


@wrong("a shape is made of constexprs", F)
def a_shape_that_is_computed(x):
    n = cl.program_id(0) + 4
    cl.store(x + 0, cl.sum(cl.zeros((n,), cl.float32)))  # here


@wrong("the bounds of cl.range depend on data", I)
def bounds_from_memory(x):
    for _ in cl.range(0, cl.load(x + 0)):  # here
        cl.store(x + 0, 1)


@wrong("cl.static_range takes constexprs", I)
def static_range_of_a_tile(x):
    for _ in cl.static_range(cl.program_id(0)):  # here
        cl.store(x + 0, 1)


@wrong("cannot be iterated over", I)
def iteration_over_a_tile(x):
    for _ in cl.load(x + cl.arange(0, 4)):  # here
        cl.store(x + 0, 1)


@wrong(r"np.sqrt computes arrays of numpy's, and this is a tile; write cl.sqrt", F)
def a_function_of_numpys(x):
    v = cl.load(x + cl.arange(0, 8))
    cl.store(x + cl.arange(0, 8), np.sqrt(v))  # here


@wrong("np.sum computes .* write cl.sum", F)
def a_sum_of_numpys(x):
    cl.store(x + 0, np.sum(cl.load(x + cl.arange(0, 8))))  # here


@wrong("np.sort computes .* the language's functions are those in docs/language.md", F)
def a_function_that_the_language_has_not(x):
    np.sort(cl.load(x + cl.arange(0, 8)))  # here


@wrong("np.exp computes .* an array of the caller's, of which cl.load makes a tile", F)
def a_function_of_an_argument(x):
    np.exp(x)  # here


@wrong("an array of numpy's is no tile; make it an argument of the kernel", F)
def an_array_beside_a_tile(x):
    cl.load(x + cl.arange(0, 64)) + F  # here


@wrong("np.add computes .* this is a tile", F)
def a_tile_beside_an_array(x):
    F + cl.load(x + cl.arange(0, 64))  # here


@wrong("computed of x, whose zero point is 3, .* subtract it where x is loaded", cl.quantised(X, 3), Y)
def a_product_of_what_was_computed(x, y):
    a = cl.load(x, (0, 0), (8, 8))
    cl.dot(cl.maximum(a, 0), cl.load(y, (0, 0), (8, 8)))  # here


@wrong("w is no constant, or has a zero point: the accelerator multiplies matrices by such",
       np.zeros((8, 8, 16), np.int8), cl.quantised(np.zeros((16, 16), np.int8), 2), P[:16],
       np.zeros((8, 8, 16), np.int8), target="accelerator")  # fmt: skip
def weights_of_images_with_a_zero_point(x, w, par, y):
    a = cl.load(x, (0, 0, 0), (8, 8, 16)).reshape(64, 16)
    b = cl.load(w, (0, 0), (16, 16), other=w.zero_point)  # here
    v = cl.requantise(cl.dot(a, b.T), cl.load(par, (0,), (16,)))
    cl.store(y, (0, 0, 0), v.reshape(8, 8, 16))


# Types and shapes --------------------------------------------------------------------------------------------------


@wrong(r"the shapes \[8\] and \[7\] of add do not fit", F)
def shapes_that_do_not_fit(x):
    cl.store(x + 0, cl.sum(cl.load(x + cl.arange(0, 8)) + cl.load(x + cl.arange(0, 7))))  # here


@wrong(r"x holds int32 and the value is float32\[8\]; cast it", I)
def narrowing_at_a_store(x):
    v = cl.load(x + cl.arange(0, 8)) * 0.5
    cl.store(x + cl.arange(0, 8), v)  # here


@wrong("one is signed, the other is not", I)
def signed_with_unsigned(x):
    v = cl.load(x + cl.arange(0, 8))
    cl.store(x + cl.arange(0, 8), v + v.to(cl.uint32))  # here


@wrong("300 is no int8", X)
def a_number_that_does_not_fit(x):
    cl.store(x, (0, 0), cl.load(x, (0, 0), (4, 4)) + 300)  # here


@wrong(r"cl.exp is for floats, and this is int32\[8\]", I)
def exp_of_integers(x):
    i = cl.arange(0, 8)
    cl.store(x + i, cl.exp(cl.load(x + i)))  # here


@wrong(r"not \[8, 4\] by \[8, 4\]; b.T turns a tile", F)
def dot_of_shapes(x):
    a = cl.load(x + cl.arange(0, 32)).reshape(8, 4)
    cl.store(x + 0, cl.sum(cl.dot(a, a)))  # here


@wrong(r"is int32\[4, 4\], and it is to be added to float32\[4, 4\]", X)
def dot_of_types(x):
    a = cl.load(x, (0, 0), (4, 4))
    cl.dot(a, a, cl.zeros((4, 4), cl.float32))  # here


@wrong(r"has 8 elements and cannot be reshaped to \[3, 3\]", F)
def reshape_to_another_size(x):
    cl.load(x + cl.arange(0, 8)).reshape(3, 3)  # here


@wrong("no axis 2 to take the sum over", F)
def sum_over_no_axis(x):
    cl.sum(cl.load(x + cl.arange(0, 8)), axis=2)  # here


@wrong("there is no element type 'int7'", F)
def no_such_type(x):
    cl.zeros((4,), "int7")  # here


@wrong("is indexed with `:` and None alone", F)
def an_element_of_a_tile(x):
    cl.load(x + cl.arange(0, 8))[3]  # here


@wrong(r"\[2048, 2048\] has 4194304 elements, more than 1048576", F)
def a_tile_that_is_too_large(x):
    cl.zeros((2048, 2048), cl.float32)  # here


# Memory ------------------------------------------------------------------------------------------------------------


@wrong("x has 64 elements, and this reads number 99; give it a mask", F)
def a_load_beyond_the_end(x):
    v = cl.load(x + cl.arange(0, 100))  # here
    cl.store(x + 0, cl.sum(v))


@wrong(r"a block of it has as many offsets and sizes, and not 1 and 1", X)
def a_block_of_other_rank(x):
    cl.load(x, (0,), (4,))  # here


@wrong("the mask of cl.load is float32", F)
def a_mask_that_is_no_bool(x):
    v = cl.load(x + cl.arange(0, 8))
    cl.load(x + cl.arange(0, 8), mask=v)  # here


@wrong("two pointers cannot be added", F, F + 0)
def two_pointers(x, y):
    cl.load((x + cl.arange(0, 8)) + (y + 0))  # here


# Loops -------------------------------------------------------------------------------------------------------------


@wrong(r"acc is int32\[4\] before the loop and float32\[4\] after its body", F)
def another_type_after_the_loop(x):
    acc = cl.zeros((4,), cl.int32)
    for _ in cl.range(3):  # here
        acc = acc + cl.load(x + cl.arange(0, 4))
    cl.store(x + cl.arange(0, 4), acc.to(cl.float32))


@wrong("count is 0 before the loop and 1 after its body", F)
def a_number_that_counts(x):
    count = 0
    for _ in cl.range(3):  # here
        count += 1
    cl.store(x + 0, float(count))


@wrong("was made inside a loop and is used after it", F)
def a_tile_of_the_loop_after_it(x):
    for k in cl.range(3):
        v = cl.load(x + k)
    cl.store(x + 0, v)  # here


@wrong("left with `break` or `return`", F)
def a_break(x):
    for k in cl.range(3):  # here
        cl.store(x + k, 1.0)
        break


# What the accelerator cannot do -----------------------------------------------------------------------------------


@wrong("the accelerator stores int8, and this is int32", X, X, P, I.reshape(2, 32), target="accelerator")
def sums_as_they_are(x, w, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (2, 32)), cl.load(w, (0, 0), (32, 32)).T)
    cl.store(y, (0, 0), acc)  # here


@wrong('requantises a sum of cl.dot.* and no max; target="cpu" runs it', X, X, P, Y, target="accelerator")
def another_step_after_the_sum(x, w, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (32, 32)), cl.load(w, (0, 0), (32, 32)).T)
    v = cl.requantise(acc, cl.load(par, (0,), (32,)))
    cl.store(y, (0, 0), cl.maximum(v, 3))  # here


@wrong("the 1 programs write blocks of .16, 32., and y .32, 32. has 2", X, X, P, Y, target="accelerator")
def half_of_the_output(x, w, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (16, 32)), cl.load(w, (0, 0), (32, 32)).T)
    cl.store(y, (0, 0), cl.requantise(acc, cl.load(par, (0,), (32,))))  # here


@wrong("the sum over channels is from 0 to 32 in steps of 16, each once", X, X, P, Y, target="accelerator")
def half_of_the_sum(x, w, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (32, 16)), cl.load(w, (0, 0), (32, 16)).T)  # here
    cl.store(y, (0, 0), cl.requantise(acc, cl.load(par, (0,), (32,))))


@wrong("write cl.store.y, offsets, value., without pointers and masks", X, Y, target="accelerator")
def pointers_on_the_accelerator(x, y):
    cl.store(y + cl.arange(0, 8), cl.load(x + cl.arange(0, 8)))  # here


@wrong("gemm multiplies int8, and this is int32", I.reshape(8, 8), I.reshape(8, 8), P[:8], Y[:8, :8].copy(),
       target="accelerator")  # fmt: skip
def products_of_int32(x, w, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (8, 8)), cl.load(w, (0, 0), (8, 8)).T)  # here
    cl.store(y, (0, 0), cl.requantise(acc, cl.load(par, (0,), (8,))))


@wrong("programs read different blocks than those that belong to what they write", X, X, P, Y, grid=(2,),
       target="accelerator")  # fmt: skip
def rows_the_other_way_round(x, w, par, y):
    m = cl.program_id(0) * 16
    acc = cl.dot(cl.load(x, (16 - m, 0), (16, 32)), cl.load(w, (0, 0), (32, 32)).T)  # here
    cl.store(y, (m, 0), cl.requantise(acc, cl.load(par, (0,), (32,))))


@wrong("y is read and written", X, P, X, target="accelerator")
def output_as_input(x, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (32, 32)), cl.load(x, (0, 0), (32, 32)).T)
    cl.store(y, (0, 0), cl.requantise(acc, cl.load(par, (0,), (32,))))  # here


@wrong("and no trans; target=", X, X, P, Y, target="accelerator")
def a_result_that_is_turned(x, w, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (32, 32)), cl.load(w, (0, 0), (32, 32)).T)
    v = cl.requantise(acc, cl.load(par, (0,), (32,)))
    cl.store(y, (0, 0), v.T)  # here


@wrong("adds up cl.dot from zero, and no trans", X, X, P, Y, target="accelerator")
def a_sum_that_is_turned(x, w, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (32, 32)), cl.load(w, (0, 0), (32, 32)).T).T  # here
    cl.store(y, (0, 0), cl.requantise(acc, cl.load(par, (0,), (32,))))


@wrong("the parameters of requantise are one for each column", X, X, P, Y, target="accelerator")
def parameters_of_rows(x, w, par, y):
    acc = cl.dot(cl.load(x, (0, 0), (32, 32)), cl.load(w, (0, 0), (32, 32)).T)
    rows = cl.load(par, (0,), (32,))  # here
    cl.store(y, (0, 0), cl.requantise(acc, rows[:, None]))


@wrong("what a residual_add adds is int8, read where y is written", X, X, P, X.copy(), Y, target="accelerator")
def a_residual_that_is_turned(x, w, par, r, y):
    acc = cl.dot(cl.load(x, (0, 0), (32, 32)), cl.load(w, (0, 0), (32, 32)).T)
    v = cl.requantise(acc, cl.load(par, (0,), (32,)))
    other = cl.load(r, (0, 0), (32, 32))  # here
    cl.store(y, (0, 0), cl.residual_add(v, other.T, 1, 1, 0, 1))


@wrong("`other` and `steps` of x are the same", X, X, P, Y, target="accelerator")
def padding_of_two_kinds(x, w, par, y):
    acc = cl.zeros((32, 32), cl.int32)
    for k in cl.static_range(0, 32, 16):
        a = cl.load(x, (0, k), (32, 16), other=k)  # here
        acc = cl.dot(a, cl.load(w, (0, k), (32, 16)).T, acc)
    cl.store(y, (0, 0), cl.requantise(acc, cl.load(par, (0,), (32,))))


@wrong("weights beyond the last are 0, and `other` of x is not", X, X, P, Y, target="accelerator")
def weights_beyond_the_last(x, w, par, y):
    a, b = cl.load(x, (0, 0), (32, 32)), cl.load(w, (0, 0), (32, 32), other=1)  # here
    cl.store(y, (0, 0), cl.requantise(cl.dot(a, b.T), cl.load(par, (0,), (32,))))


@wrong("a loop of the accelerator runs as often in all programs", X, X, P, Y, grid=(2,), target="accelerator")
def a_sum_of_which_programs_know_the_end(x, w, par, y):
    m = cl.program_id(0) * 16
    acc = cl.zeros((16, 32), cl.int32)
    for k in cl.range(0, m + 16, 16):  # here
        acc = cl.dot(cl.load(x, (m, k), (16, 16)), cl.load(w, (0, k), (32, 16)).T, acc)
    cl.store(y, (m, 0), cl.requantise(acc, cl.load(par, (0,), (32,))))


@wrong("adds up cl.dot", X, X, P, Y, target="accelerator")
def a_sum_that_is_scaled(x, w, par, y):
    acc = cl.zeros((32, 32), cl.int32)
    for k in cl.range(0, 32, 16):
        acc = acc * 2 + cl.dot(cl.load(x, (0, k), (32, 16)), cl.load(w, (0, k), (32, 16)).T)  # here
    cl.store(y, (0, 0), cl.requantise(acc, cl.load(par, (0,), (32,))))


IMAGE, OTHER = np.zeros((8, 8, 16), np.int8), np.zeros((4, 4, 16), np.int8)


@wrong("`steps` are those of a block, and cl.load was given pointers", F)
def steps_of_pointers(x):
    cl.store(x + 0, cl.load(x + 0, steps=(2,)))  # here


@wrong("a block of x has 2 steps, and these are 1", X)
def too_few_steps(x):
    cl.store(x, (0, 0), cl.load(x, (0, 0), (2, 2), steps=(2,)))  # here


@wrong("rows and columns of images alone have steps on the accelerator", IMAGE, OTHER, target="accelerator")
def channels_in_steps(x, y):
    a = cl.load(x, (0, 0, 0), (4, 4, 16), steps=(2, 2, 2))  # here
    cl.store(y, (0, 0, 0), cl.maximum(a, a))


@wrong("every element of its block on the accelerator, and not the steps .2, 2, 1.", IMAGE, OTHER, target="accelerator")
def an_elementwise_kernel_in_steps(x, y):
    cl.store(y, (0, 0, 0), cl.load(x, (0, 0, 0), (4, 4, 16), steps=(2, 2, 1)))  # here


@wrong("`other` and `steps` of x are the same in a whole window", IMAGE, OTHER, target="accelerator")
def a_window_in_two_steps(x, y):
    a = cl.load(x, (0, 0, 0), (4, 4, 16), steps=(2, 2, 1))
    b = cl.load(x, (0, 0, 0), (4, 4, 16))  # here
    cl.store(y, (0, 0, 0), cl.maximum(a, b))


@wrong("a window is of images, and has as many channels as y", X, Y, target="accelerator")
def the_maximum_of_a_matrix(x, y):
    a = cl.load(x, (0, 0), (32, 32))  # here
    cl.store(y, (0, 0), cl.maximum(a, a))


@wrong("takes the maximum of loads from -128, and not from 0", IMAGE, OTHER, target="accelerator")
def a_maximum_from_zero(x, y):
    most = cl.zeros((4, 4, 16), cl.int8)  # here
    cl.store(y, (0, 0, 0), cl.maximum(most, cl.load(x, (0, 0, 0), (4, 4, 16), steps=(2, 2, 1))))


@wrong("a window begins at the first row and column of what it reads, and ends at the last", IMAGE, OTHER,
       target="accelerator")  # fmt: skip
def a_part_of_an_image(x, y):
    a = cl.load(x, (0, 0, 0), (4, 4, 16))
    cl.store(y, (0, 0, 0), cl.maximum(a, a))  # here


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_kernel(name: str) -> None:
    kernel, args, says, grid = CASES[name]
    with pytest.raises(cl.LanguageError, match=says if name != "output_as_input" else "is read and written") as error:
        kernel[grid](*args)
    source, first = inspect.getsourcelines(kernel.function)
    line = first + next(n for n, text in enumerate(source) if "# here" in text)
    file, number, sentence = re.fullmatch(r"(.*?):(\d+): (.*)", str(error.value)).groups()  # type: ignore[union-attr]
    assert (file, int(number)) == (__file__, line)
    assert "\n" not in sentence and not sentence.endswith(".") and len(sentence) < 300


def test_there_are_enough() -> None:
    assert len(CASES) >= 30


def test_a_tile_that_does_not_fit_says_what_it_needs() -> None:
    x, w, y = np.zeros((512, 32), np.int8), np.zeros((32, 32), np.int8), np.zeros((512, 32), np.int8)
    with pytest.raises(cl.LanguageError, match=r"linear on tiny.*1024 entries of out.*128"):
        cl.jit(linear, config="tiny")[(2, 2)](x, w, P, y, 512, 32, 32, 256, 16)
    kernel = cl.jit(conv3x3, config="pynq")
    with pytest.raises(cl.LanguageError, match=r"block_out, 16.*24"):
        kernel[(1, 2)](np.zeros((4, 4, 16), np.int8), np.zeros((40, 3, 3, 16), np.int8), np.zeros(40, np.uint64),
                       np.zeros((4, 4, 40), np.int8), 4, 4, 16, 40, 4, 24)  # fmt: skip


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda k: k[(0,)](X), "a grid is one to three positive numbers, and that of kernel is .0,."),
        (lambda k: k[(1,)](), "kernel: missing a required argument: 'x'"),
        (lambda k: k[(1,)](X.T), "x is not C-contiguous; give kernel np.ascontiguousarray.x."),
        (lambda k: k[(1,)](np.zeros(3, np.complex64)), "there is no element type"),
        (lambda k: k(X), r"without a grid; write kernel\[grid\]"),
        (lambda k: k[(1,)](X[:2, :2].copy()), "kernel stores nothing"),
        (lambda k: k[(1,)](X.astype(">i2")), "x has bytes in another order"),
        (lambda k: cl.jit(k.function, target="gpu"), "there is no target 'gpu' for kernel; take accelerator or cpu"),
        (lambda k: cl.autotune([])(k), "has no Config"),
        (lambda k: cl.autotune([cl.Config(B=3)])(k), "kernel has no parameter 'B'"),
    ],
)
def test_a_wrong_call(call: Any, says: str) -> None:
    def kernel(x):
        cl.load(x, (0, 0), (2, 2))

    with pytest.raises(cl.LanguageError, match=says):
        call(cl.jit(kernel, target="cpu"))


def test_an_array_that_cannot_be_written() -> None:
    @cl.jit(target="cpu")
    def fill(x):
        cl.store(x + 0, 1.0)

    fill[(1,)](F.copy())
    fixed = F.copy()
    fixed.flags.writeable = False
    with pytest.raises(cl.LanguageError, match=r"x.*fill.*read-only"):
        fill[(1,)](fixed)


def test_memory_that_is_shared_in_part() -> None:
    @cl.jit(target="cpu")
    def copy(x, y):
        cl.store(y + cl.arange(0, 32), cl.load(x + cl.arange(0, 32)))

    with pytest.raises(cl.LanguageError, match=r"y.*shares memory with x"):
        copy[(1,)](F[:32], F[16:48])


def test_the_interpreter_finds_what_only_data_shows() -> None:
    @cl.jit(target="cpu")
    def gather(x, at):
        cl.store(x + 0, cl.load(x + cl.load(at + 0)))

    with interpreted(), pytest.raises(cl.LanguageError, match=r"x.*64 elements.*70"):
        gather[(1,)](F, np.array([70], np.int32))


@pytest.mark.parametrize("interpreting", [False, True])
def test_arguments_that_are_no_arrays(interpreting: bool) -> None:
    @cl.jit(target="cpu")
    def kernel(x, SIZES: cl.constexpr):
        cl.store(x + 0, 1.0)

    class Tensor:
        def __array__(self) -> Any:
            return F

    line = r"test_language_errors.py:\d+: "
    with interpreted() if interpreting else nullcontext():
        for wrong_one, kind in (([1.0, 2.0], "list"), (Tensor(), "Tensor"), ({}, "dict"), (cl.quantised([1]), "list")):
            with pytest.raises(cl.LanguageError, match=line + rf"x of kernel.*{kind}.*np"):
                kernel[(1,)](wrong_one, 1)
        with pytest.raises(cl.LanguageError, match=line + r"SIZES of kernel.*list.*tuple"):
            kernel[(1,)](F, [1, 2])
        kernel[(1,)](F, (1, 2))
