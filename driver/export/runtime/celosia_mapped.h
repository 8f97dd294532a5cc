/* A device whose registers and memory are at fixed addresses (device_mapped.c). */

#ifndef CELOSIA_MAPPED_H
#define CELOSIA_MAPPED_H

#include "celosia.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where memory is cached, set `flush` and `invalidate` of what this returns to what cleans and invalidates lines, or map
   it uncached; with `wait` and `interrupt` the processor may sleep. */
celosia_device celosia_mapped(uintptr_t registers, uintptr_t memory, size_t size);

#ifdef __cplusplus
}
#endif

#endif
