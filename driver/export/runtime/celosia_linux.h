/* A device under Linux (device_linux.c): registers through /dev/mem, memory through u-dma-buf, or reserved memory through
   /dev/mem. */

#ifndef CELOSIA_LINUX_H
#define CELOSIA_LINUX_H

#include "celosia.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is open; to be given as zeros. */
typedef struct {
    celosia_device device;
    volatile uint8_t *registers;
    int lock, interrupt;
} celosia_linux;

/* registers: physical address. memory: the path of a buffer whose folder /sys/class/u-dma-buf has, such as
   "/dev/udmabuf0", or "/dev/mem" for `size` bytes of memory at `physical` that Linux was told to leave alone.
   interrupt: a UIO device's path, or NULL to poll. 0, or a code of errno. */
int celosia_linux_open(celosia_linux *self, uint64_t registers, const char *memory, uint64_t physical, size_t size,
                       const char *interrupt);
void celosia_linux_close(celosia_linux *self);

#ifdef __cplusplus
}
#endif

#endif
