/* A device that is in another process, which a stream of bytes leads to: a simulator, where a board will be. Registers
   are asked for one by one; `flush` and `invalidate` are what moves memory.

   Each message is a letter and what belongs to it, in 32 bits each: R offset -> value; W offset value; F start size
   bytes; I start size -> bytes; T microseconds. */

#include "celosia_bridge.h"

static void put(const void *bytes, size_t size) { celosia_bridge_put(bytes, size); }

static void message(char kind, uint32_t first, uint32_t second) {
    uint32_t words[2] = {first, second};
    put(&kind, 1);
    put(words, sizeof words);
}

static uint32_t read_register(void *context, uint32_t offset) {
    uint32_t value = 0;
    (void)context;
    message('R', offset, 0);
    celosia_bridge_get(&value, sizeof value);
    return value;
}

static void write_register(void *context, uint32_t offset, uint32_t value) {
    (void)context;
    message('W', offset, value);
}

static void flush(void *context, const uint8_t *start, size_t size) {
    message('F', (uint32_t)(start - (const uint8_t *)context), (uint32_t)size);
    put(start, size);
}

static void invalidate(void *context, uint8_t *start, size_t size) {
    message('I', (uint32_t)(start - (const uint8_t *)context), (uint32_t)size);
    celosia_bridge_get(start, size);
}

static void wait(void *context, uint32_t microseconds) {
    (void)context;
    message('T', microseconds, 0);
}

celosia_device celosia_bridge(uint8_t *memory, size_t size) {
    celosia_device device = {0};
    device.context = memory;
    device.read = read_register;
    device.write = write_register;
    device.flush = flush;
    device.invalidate = invalidate;
    device.wait = wait;
    device.interrupt = 1;
    device.memory = memory;
    device.size = size;
    message('O', (uint32_t)size, 0);
    celosia_bridge_get(&device.base, sizeof device.base);
    return device;
}

void celosia_bridge_take(void *tensor, size_t size) {
    message('X', (uint32_t)size, 0);
    celosia_bridge_get(tensor, size);
}

void celosia_bridge_give(const void *tensor, size_t size) {
    message('Y', (uint32_t)size, 0);
    put(tensor, size);
}

uint32_t celosia_bridge_told(int code, uint32_t instruction) {
    uint32_t next = 0;
    message('E', (uint32_t)code, instruction);
    celosia_bridge_get(&next, sizeof next);
    return next;
}
