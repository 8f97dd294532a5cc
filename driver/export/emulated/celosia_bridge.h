/* A device behind a stream of bytes (device_bridge.c), and tensors that come and go by the same stream. */

#ifndef CELOSIA_BRIDGE_H
#define CELOSIA_BRIDGE_H

#include "celosia.h"

/* The stream: two functions for the target to have (stream_*.c). They return when all bytes have passed, and not at all
   where the other side is gone. */
#ifdef __wasm__
#define IMPORTED(name) __attribute__((import_module("env"), import_name(name)))
#else
#define IMPORTED(name)
#endif
IMPORTED("celosia_bridge_get") void celosia_bridge_get(void *bytes, size_t size);
IMPORTED("celosia_bridge_put") void celosia_bridge_put(const void *bytes, size_t size);

/* `memory` is the device's, of `size` bytes. */
celosia_device celosia_bridge(uint8_t *memory, size_t size);

void celosia_bridge_take(void *tensor, size_t size);
void celosia_bridge_give(const void *tensor, size_t size);

/* Tells how a call has ended; returns the number of the model that is to run next, from 1 on, or 0 to end. */
uint32_t celosia_bridge_told(int code, uint32_t instruction);

#endif
