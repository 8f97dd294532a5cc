/* The bridge's stream where there is no operating system: a serial port of qemu's machines `virt`. */

#include "celosia_bridge.h"

#if defined(__riscv)
/* A 16550. */
#define UART ((volatile uint8_t *)0x10000000)
#define CAN_READ (UART[5] & 1)
#define CAN_WRITE (UART[5] & 0x20)
#else
/* A PL011. */
#define UART ((volatile uint32_t *)0x09000000)
#define CAN_READ (!(UART[6] & 0x10))
#define CAN_WRITE (!(UART[6] & 0x20))
#endif

void celosia_bridge_get(void *bytes, size_t size) {
    for (uint8_t *to = bytes, *end = to + size; to < end;)
        if (CAN_READ) *to++ = (uint8_t)UART[0];
}

void celosia_bridge_put(const void *bytes, size_t size) {
    for (const uint8_t *from = bytes, *end = from + size; from < end;)
        if (CAN_WRITE) UART[0] = *from++;
}
