/* A device whose registers and memory are at fixed addresses: a processor without an operating system. */

#include "celosia_mapped.h"

static uint32_t read_register(void *context, uint32_t offset) {
    return *(volatile const uint32_t *)((const uint8_t *)context + offset);
}

static void write_register(void *context, uint32_t offset, uint32_t value) {
    *(volatile uint32_t *)((uint8_t *)context + offset) = value;
}

celosia_device celosia_mapped(uintptr_t registers, uintptr_t memory, size_t size) {
    celosia_device device = {0};
    device.context = (void *)registers;
    device.read = read_register;
    device.write = write_register;
    device.memory = (uint8_t *)memory;
    device.base = memory;
    device.size = size;
    return device;
}
