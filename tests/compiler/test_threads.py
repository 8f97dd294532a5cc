"""Kernels give the same bytes on any number of threads, whatever else runs."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from thorough import one_each, tries

import celosia
from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule import parallel, schedule
from celosia.compiler.expr.loops import For, Function, Store
from celosia.compiler.program.host import thread_team
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.host.thread_team import ThreadsError, default_threads, encode_calls, team
from celosia.driver.runtime import Runtime

RNG = np.random.default_rng(0)


def f(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


@pytest.fixture
def every_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Share all loops between threads that can be shared."""
    monkeypatch.setattr(parallel, "MIN_PARALLEL_WORK", 0)
    yield


CASES: list[Any] = [
    ("Softmax", {"axis": -1}, [f(40, 6000)]),  # a temporary of each row, too large for the stack
    ("Softmax", {"axis": 1}, [f(3, 50, 33)]),
    ("LayerNormalization", {}, [f(30, 64), f(64), f(64)]),
    ("MatMul", {}, [f(45, 30), f(30, 70)]),
    ("MatMul", {}, [f(1, 300), f(300, 900)]),
    ("Conv", {"pads": [1, 1, 1, 1]}, [f(2, 5, 17, 19), f(11, 5, 3, 3), f(11)]),
    ("Conv", {"group": 12, "strides": [2, 2]}, [f(1, 12, 20, 20), f(12, 1, 3, 3)]),
    ("MaxPool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, [f(2, 9, 15, 15)]),
    ("Transpose", {"perm": [0, 2, 1]}, [f(3, 37, 50)]),
    ("ReduceMax", {"axes": [1]}, [f(60, 90)]),
    ("ReduceMean", {"axes": [0]}, [f(60, 3000)]),
    ("ArgMax", {"axis": 1}, [f(40, 40, 30)]),
    ("Gather", {}, [f(50, 9), RNG.integers(0, 50, (7, 8))]),
    ("Resize", {"mode": "linear"}, [f(1, 3, 9, 9), None, np.array([1, 1, 2, 2.5], np.float32)]),
    ("Gemm", {"transB": 1}, [RNG.integers(-9, 9, shape).astype(np.int32) for shape in ((30, 20), (25, 20))]),
]  # fmt: skip


@pytest.mark.parametrize("op, attrs, inputs", one_each(CASES, lambda case: (case[0], case[1].get("axis"))))
def test_any_number_of_threads_gives_the_same(every_loop: None, op: str, attrs: Any, inputs: list[Any]) -> None:
    constants = (1, 2) if op == "Resize" else ()
    types = [None if x is None else x if k in constants else (x.shape, x.dtype.name) for k, x in enumerate(inputs)]
    kernel = compile_op(op, attrs, types, opset=13)
    assert any(kernel.phases)
    arrays = [x for x in inputs if x is not None]
    want = kernel(*arrays)
    for count in (2, 3, 5, 16):
        for got, expected in zip(kernel(*arrays, threads=count), want):
            np.testing.assert_array_equal(got, expected)
    for got, expected in zip(CompiledKernel.from_bytes(kernel.to_bytes())(*arrays, threads=2), want):
        np.testing.assert_array_equal(got, expected)


def phases(*outputs: T.Tensor) -> list[bool]:
    return [phase.loop is not None for phase in parallel.split_phases(T.fuse_loops(T.lower(schedule(outputs))))[1]]


def test_only_what_is_worth_it_is_shared() -> None:
    small, large = T.placeholder((40, 100), "float32", "small"), T.placeholder((4000, 4000), "float32", "large")
    for x, shared in ((small, False), (large, True)):
        assert phases(T.compute(x.shape, lambda i, j, x=x: T.call("exp", x[j, i]), "y")) == [shared]


def test_a_single_sum_is_not_shared(every_loop: None) -> None:
    x = T.placeholder((5000,), "float32", "x")
    k = T.reduce_axis(5000, "k")
    assert phases(T.compute((), lambda: T.sum(x[k], k), "y")) == [False]


def test_a_loop_whose_iterations_write_the_same_is_not_shared(every_loop: None) -> None:
    i, y = T.Axis("i", extent=50), T.Tensor("y", (1,), "float32")
    zero = T.wrap(0, T.INDEX)
    code = For(i, 50, Store(y, (zero,), i.astype("float32")))
    assert parallel.split_phases(Function("f", (), (y,), code))[1][0].loop is None


def test_a_loop_that_a_schedule_marks_is_shared() -> None:
    a = T.placeholder((6, 40), "float32", "a")
    y = T.compute((6, 40), lambda i, j: a[i, j] * 2, "y")
    s = T.create_schedule(y)
    s[y].parallel(y.axes[1])
    kernel = compile_function(T.lower(s))
    assert kernel.phases == (True,)
    x = f(6, 40)
    np.testing.assert_array_equal(kernel(x, threads=4)[0], x * 2)


def test_phases_wait_for_each_other(every_loop: None) -> None:
    """All threads wait until the rows are summed, and then read the sums of others."""
    a = T.placeholder((64, 48), "float32", "a")
    k = T.reduce_axis(48, "k")
    sums = T.compute((64,), lambda i: T.sum(a[i, k], k), "sums")
    y = T.compute((64, 48), lambda i, j: a[i, j] - sums[63 - i], "y")
    kernel = compile_function(T.fuse_loops(T.lower(schedule([y]))))
    assert kernel.phases == (True, True) and kernel.shared_bytes == 256
    x = f(64, 48)
    for _ in range(50):
        np.testing.assert_array_equal(kernel(x, threads=3)[0], kernel(x)[0])


def test_runtimes_in_several_threads(every_loop: None) -> None:
    nodes = [
        helper.make_node("Softmax", ["x"], ["a"], axis=-1), helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Transpose", ["b"], ["y"], perm=[1, 0]),
    ]  # fmt: skip
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (60, 80)), ("w", (80, 50)))]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, (50, 60))
    model = helper.make_model(helper.make_graph(nodes, "g", values, [out]), opset_imports=[helper.make_opsetid("", 17)])
    program = celosia.compile(model, "tiny")
    feeds = [{"x": f(60, 80), "w": f(80, 50)} for _ in range(4)]
    want = [Runtime(program, threads=1).run(feed).outputs["y"] for feed in feeds]
    wrong: list[int] = []

    def run(number: int) -> None:
        runtime = Runtime(program, threads=2 + number % 2)
        for _ in range(60):
            if not np.array_equal(runtime.run(feeds[number]).outputs["y"], want[number]):
                wrong.append(number)

    runners = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for each in runners:
        each.start()
    for each in runners:
        each.join()
    assert not wrong


def test_runtimes_of_different_threads_in_turn(every_loop: None) -> None:
    """Results are right while workers wait for the next list, sleep, or are started."""
    kernel = compile_op("MatMul", {}, [((45, 30), "float32"), ((30, 70), "float32")])
    a, b = f(45, 30), f(30, 70)
    want = kernel(a, b)[0]
    for number, count in enumerate((2, 3, 2, 7, 1, 4, 2) * 5):
        np.testing.assert_array_equal(kernel(a, b, threads=count)[0], want)
        if number % 3 == 0:
            time.sleep(0.002)


def test_all_threads_pass_a_barrier_together() -> None:
    """No thread passes a barrier before the others; the test finds calls without a barrier.

    Between barriers each thread records the counters of all threads.
    """
    own = team()
    count, rounds = 3, 200
    observed = np.zeros((count, rounds, count), np.int64)
    turn = np.zeros(count, np.int64)

    def note(argument: int | None, part: int, parts: int) -> None:
        observed[part, turn[part]] = turn
        turn[part] += 1

    noting = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(note)
    address = ctypes.cast(noting, ctypes.c_void_p).value or 0
    wait = own.wait, own.barrier

    def go(records: list[tuple[int, int]]) -> NDArray[Any]:
        turn[:] = observed[:] = 0
        made = encode_calls(records)
        assert own.run((ctypes.c_void_p * count)(*[ctypes.addressof(made)] * count))
        return np.ptp(observed[:, :-1], axis=2)

    assert go([(address, 0), wait] * rounds).max() <= 1 and (turn == rounds).all()
    apart = max(go([(address, 0)] * (rounds - 1) + [(address, 0), wait]).max() for _ in range(20))
    assert apart > 1


def test_errors_in_python_leave_the_team_free() -> None:
    own = team()
    with pytest.raises(TypeError):
        own.run(None)  # type: ignore[arg-type]
    kernel = compile_op("MatMul", {}, [((45, 30), "float32"), ((30, 70), "float32")])
    kernel(f(45, 30), f(30, 70), threads=2)
    assert own.busy.acquire(blocking=False)
    own.busy.release()


def test_where_no_thread_can_be_started_one_does_all(monkeypatch: pytest.MonkeyPatch, every_loop: None) -> None:
    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kernel = compile_op("MatMul", {}, [((45, 30), "float32"), ((30, 70), "float32")])
    a, b = f(45, 30), f(30, 70)
    own = team()
    own.stop()
    monkeypatch.setattr(threading.Thread, "start", none)
    np.testing.assert_array_equal(kernel(a, b, threads=3)[0], kernel(a, b)[0])
    monkeypatch.undo()
    np.testing.assert_array_equal(kernel(a, b, threads=3)[0], kernel(a, b)[0])


USES_THREADS = """
import os
import numpy as np
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.cpu.schedule import parallel
parallel.MIN_PARALLEL_WORK = 0
kernel = compile_op("Relu", {}, [((64, 64), "float32")])
x = np.ones((64, 64), np.float32)
use = lambda: kernel(x, threads=3)[0].sum() == 4096 or os._exit(1)
use()
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    code = USES_THREADS + "child = os.fork()\nuse()\nif child == 0: os._exit(7)\n"
    code += "assert os.waitpid(child, 0)[1] == 7 << 8"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


FORKS = """
import multiprocessing
import os
import numpy as np
from onnx import TensorProto, helper
import celosia
from celosia.compiler.cpu.schedule import parallel
parallel.MIN_PARALLEL_WORK = 0
values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (60, 60)) for n in "xy"]
node = helper.make_node("MatMul", ["x", "x"], ["y"])
graph = helper.make_graph([node], "g", values[:1], values[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
runtime = celosia.Runtime(celosia.compile(model, "tiny"), threads=2)
x = np.eye(60, dtype=np.float32)
def use(_=None):
    return bool((runtime.run({"x": x}).outputs["y"] == x).all())
assert use()
"""


@pytest.mark.parametrize(
    "code",
    [
        "child = os.fork()\nif child == 0: os._exit(7 if use() and use() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 7 << 8 and use()",
        "with multiprocessing.get_context('fork').Pool(2) as pool: assert all(pool.map(use, range(6))) and use()",
        # While the team is at work, in the middle of a list as often as not.
        "import threading\n"
        "on = True\n"
        "def go():\n"
        "    while on: celosia.Runtime(runtime.program, threads=2).run({'x': x})\n"
        "thread = threading.Thread(target=go)\n"
        "thread.start()\n"
        "for _ in range(20):\n"
        "    child = os.fork()\n"
        "    if child == 0: os._exit(7 if use() and use() else 1)\n"
        "    assert os.waitpid(child, 0)[1] == 7 << 8 and use()\n"
        "on = False",
    ],
    ids=["fork", "multiprocessing", "at work"],
)
def test_a_runtime_goes_on_in_a_forked_process(code: str) -> None:
    """A forked process starts its own workers; those of its parent do not exist there."""
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORKS + code], start_new_session=True)
    try:
        assert process.wait(60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children that hang, too


def test_an_interrupt_stops_no_worker_in_the_middle() -> None:
    """Signals during the work of two threads interrupt no list."""
    code = (
        USES_THREADS
        + """
import signal
caught, inside = 0, False
def interrupt(*_):
    global caught
    if inside:
        caught += 1
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1.3e-3)
while caught < 60:
    try:
        try:
            inside = True
            kernel(x, threads=3)
        finally:
            inside = False
    except KeyboardInterrupt:
        inside = False
signal.setitimer(signal.ITIMER_REAL, 0)
use()
"""
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_process_ends_while_its_threads_wait() -> None:
    for _ in range(tries(7)):
        subprocess.run([sys.executable, "-c", USES_THREADS], check=True, timeout=60)


def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(thread_team.THREADS_VARIABLE, raising=False)
    assert 1 <= default_threads() <= thread_team.MAX_DEFAULT_THREADS
    monkeypatch.setenv(thread_team.THREADS_VARIABLE, "3")
    assert default_threads() == 3
    for text in ("0", "-1", "two", "", "99999", "1.5"):
        monkeypatch.setenv(thread_team.THREADS_VARIABLE, text)
        with pytest.raises(ThreadsError, match=r"CELOSIA_THREADS is .*threads"):
            default_threads()
