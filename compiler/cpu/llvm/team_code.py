"""Code of a team of threads that work through lists of calls, without Python between two kernels.

A list is the number of its records and the records: two pointers each, a function and its argument. All functions are
called with (argument, part, parts): kernels, `celosia_wait`, which is a barrier, and `celosia_stamp`, which stores the
time. Each thread has a list of its own; all lists have the same barriers.

A worker has a slot: an int32 with its state, its list at byte 8, the number of parts, and from byte 64 on the semaphore
(sem_t) at which it sleeps.
"""

from __future__ import annotations

from typing import Any

from celosia.compiler.cpu.llvm.machine import foreign_target, link, machine, optimise
from celosia.compiler.program.host.thread_team import ASLEEP, FUNCTIONS, IDLE, SLOT_BYTES, STOP, WORK
from celosia.compiler.target import compiling_for

PAUSE_INSTRUCTIONS = {
    "x86_64": "@llvm.x86.sse2.pause()",
    "aarch64": "@llvm.aarch64.hint(i32 1)",
    "armv7": "@llvm.arm.hint(i32 1)",
}
"""First part of a target's triple -> the instruction that tells a processor that a loop only waits."""
BARRIER_SPINS = 128
"""Iterations of spinning at a barrier, some 10 us, before a thread yields to others, for which it may be waiting."""
IDLE_SPINS = 4096
"""Iterations of spinning of an idle worker, some 100 to 300 us, before it sleeps."""

TEAM_IR = f"""
%record = type {{ ptr, ptr }}
%slot = type {{ i32, i32, ptr, i64, [40 x i8], [64 x i8] }}
declare i32 @sem_init(ptr, i32, i32)
declare i32 @sem_wait(ptr)
declare i32 @sem_post(ptr)
declare i32 @sched_yield()
declare i32 @clock_gettime(i32, ptr)
PAUSE_DECLARED

; Calls the functions of a list, as thread `part` of `parts`.
define void @celosia_run(ptr %list, i64 %part, i64 %parts) nounwind {{
start:
  %count = load i64, ptr %list  ; read first: after the last barrier the list may be freed
  %records = getelementptr inbounds i8, ptr %list, i64 8
  br label %next
next:
  %number = phi i64 [ 0, %start ], [ %after, %call ]
  %left = icmp ult i64 %number, %count
  br i1 %left, label %call, label %done
call:
  %record = getelementptr inbounds %record, ptr %records, i64 %number
  %place = getelementptr inbounds %record, ptr %record, i64 0, i32 1
  %function = load ptr, ptr %record
  %argument = load ptr, ptr %place
  call void %function(ptr %argument, i64 %part, i64 %parts)
  %after = add i64 %number, 1
  br label %next
done:
  ret void
}}

; Waits for all threads. arrived: number of threads that wait, and at byte 64 the number of times that all had arrived.
define void @celosia_wait(ptr %arrived, i64 %part, i64 %parts) nounwind {{
start:
  %times = getelementptr inbounds i8, ptr %arrived, i64 64
  %before = load atomic i32, ptr %times monotonic, align 4
  %others = atomicrmw add ptr %arrived, i32 1 acq_rel
  %count = trunc i64 %parts to i32
  %present = add i32 %others, 1
  %last = icmp eq i32 %present, %count
  br i1 %last, label %open, label %turn
open:
  store atomic i32 0, ptr %arrived monotonic, align 4
  %now = add i32 %before, 1
  store atomic i32 %now, ptr %times release, align 4
  ret void
turn:
  %turns = phi i32 [ 0, %start ], [ %more, %pause ], [ %turns, %yield ]
  %seen = load atomic i32, ptr %times acquire, align 4
  %closed = icmp eq i32 %seen, %before
  br i1 %closed, label %again, label %done
again:
  %patient = icmp ult i32 %turns, {BARRIER_SPINS}
  br i1 %patient, label %pause, label %yield
pause:
  call void PAUSE
  %more = add i32 %turns, 1
  br label %turn
yield:
  %ignored = call i32 @sched_yield()
  br label %turn
done:
  ret void
}}

; Stores the time of the monotonic clock in a struct timespec.
define void @celosia_stamp(ptr %place, i64 %part, i64 %parts) nounwind {{
  %ignored = call i32 @clock_gettime(i32 1, ptr %place)
  ret void
}}

; Sets the state of a worker, and wakes it where it sleeps.
define void @celosia_wake(ptr %slot, i32 %state) nounwind {{
start:
  %before = atomicrmw xchg ptr %slot, i32 %state acq_rel
  %asleep = icmp eq i32 %before, {ASLEEP}
  br i1 %asleep, label %wake, label %done
wake:
  %place = getelementptr inbounds %slot, ptr %slot, i64 0, i32 5
  %ignored = call i32 @sem_post(ptr %place)
  br label %done
done:
  ret void
}}

; Gives every worker its list, lists[part], and does part 0 itself.
define void @celosia_go(ptr %slots, ptr %lists, i64 %parts) nounwind {{
start:
  br label %next
next:
  %part = phi i64 [ 1, %start ], [ %after, %post ]
  %left = icmp ult i64 %part, %parts
  br i1 %left, label %post, label %run
post:
  %offset = mul i64 %part, {SLOT_BYTES}
  %slot = getelementptr inbounds i8, ptr %slots, i64 %offset
  %source = getelementptr inbounds ptr, ptr %lists, i64 %part
  %list = load ptr, ptr %source
  %list.at = getelementptr inbounds %slot, ptr %slot, i64 0, i32 2
  %count = getelementptr inbounds %slot, ptr %slot, i64 0, i32 3
  store ptr %list, ptr %list.at
  store i64 %parts, ptr %count
  call void @celosia_wake(ptr %slot, i32 {WORK})
  %after = add i64 %part, 1
  br label %next
run:
  %own = load ptr, ptr %lists
  call void @celosia_run(ptr %own, i64 0, i64 %parts)
  ret void
}}

; A worker: runs the lists that it gets until its state is STOP.
define void @celosia_serve(ptr %slot, i64 %part) nounwind {{
start:
  %semaphore = getelementptr inbounds %slot, ptr %slot, i64 0, i32 5
  br label %turn
turn:
  %turns = phi i32 [ 0, %start ], [ %more, %pause ], [ 0, %work ], [ 0, %sleep ], [ 0, %asleep ]
  %state = load atomic i32, ptr %slot acquire, align 4
  switch i32 %state, label %idle [ i32 {WORK}, label %work i32 {STOP}, label %stop ]
work:
  store atomic i32 {IDLE}, ptr %slot monotonic, align 4  ; first: once the list is done, the next may come at any time
  %list.at = getelementptr inbounds %slot, ptr %slot, i64 0, i32 2
  %parts.at = getelementptr inbounds %slot, ptr %slot, i64 0, i32 3
  %list = load ptr, ptr %list.at
  %parts = load i64, ptr %parts.at
  call void @celosia_run(ptr %list, i64 %part, i64 %parts)
  br label %turn
idle:
  %patient = icmp ult i32 %turns, {IDLE_SPINS}
  br i1 %patient, label %pause, label %sleep
pause:
  call void PAUSE
  %more = add i32 %turns, 1
  br label %turn
sleep:
  %tried = cmpxchg ptr %slot, i32 {IDLE}, i32 {ASLEEP} acq_rel monotonic
  %idle.still = extractvalue {{ i32, i1 }} %tried, 1
  br i1 %idle.still, label %asleep, label %turn
asleep:
  %interrupted = call i32 @sem_wait(ptr %semaphore)
  %again = icmp ne i32 %interrupted, 0
  br i1 %again, label %asleep, label %turn
stop:
  ret void
}}

; Initialises the slot of a worker.
define void @celosia_prepare(ptr %slot) nounwind {{
  store i32 {IDLE}, ptr %slot
  %semaphore = getelementptr inbounds %slot, ptr %slot, i64 0, i32 5
  %ignored = call i32 @sem_init(ptr %semaphore, i32 0, i32 0)
  ret void
}}
"""


def team_object() -> bytes:
    """Compile the team's functions (`FUNCTIONS`) to an object file for the target."""
    triple = machine(foreign_target()).triple
    pause = next((call for name, call in PAUSE_INSTRUCTIONS.items() if triple.startswith(name)), None)
    declaration = f"declare void {pause.replace(' 1', '')}" if pause else ""
    call = f"call void {pause}" if pause else ""
    return optimise(TEAM_IR.replace("PAUSE_DECLARED", declaration).replace("call void PAUSE", call))[1]


def link_team() -> tuple[dict[str, int], Any]:
    """Link the team's functions into this process. Returns their addresses, and the owner of their code."""
    with compiling_for(None):
        linked = link(FUNCTIONS, team_object())
    return {name: linked[name] for name in FUNCTIONS}, linked


assert all(f"@{name}(" in TEAM_IR for name in FUNCTIONS)
