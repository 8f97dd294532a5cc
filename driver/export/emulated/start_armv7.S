/* Begins main with the floating-point unit, a stack and memory that is zero, then turns the machine off. */
    .syntax unified
    .arch armv7-a
    .fpu neon
    .section .start, "ax"
    .globl _start
_start:
    mrc p15, 0, r0, c1, c0, 2
    orr r0, r0, #0xf00000
    mcr p15, 0, r0, c1, c0, 2
    isb
    mov r0, #0x40000000
    vmsr fpexc, r0
    ldr sp, =stack_end
    ldr r0, =bss_start
    ldr r1, =bss_end
    mov r2, #0
1:  cmp r0, r1
    strlo r2, [r0], #4
    blo 1b
    bl main
    ldr r0, =0x84000008
    .arch_extension virt
    hvc #0
2:  b 2b
