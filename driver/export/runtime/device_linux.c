/* A device under Linux. Memory is opened with O_SYNC, uncached, so that nothing needs to be flushed. */

#define _GNU_SOURCE
#include "celosia_linux.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define REGISTER_BYTES 4096

static uint32_t read_register(void *context, uint32_t offset) {
    return *(volatile const uint32_t *)(((const celosia_linux *)context)->registers + offset);
}

static void write_register(void *context, uint32_t offset, uint32_t value) {
    *(volatile uint32_t *)(((celosia_linux *)context)->registers + offset) = value;
}

static uint64_t now(void *context) {
    struct timespec time;
    (void)context;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

static void wait(void *context, uint32_t microseconds) {
    celosia_linux *self = context;
    uint32_t count = 1; /* what UIO wants to hear to pass the next interrupt on */
    struct pollfd interrupt = {self->interrupt, POLLIN, 0};
    if (self->interrupt < 0) {
        struct timespec time = {(time_t)(microseconds / 1000000), (long)(microseconds % 1000000) * 1000};
        nanosleep(&time, NULL);
    } else if (write(self->interrupt, &count, sizeof count) == sizeof count &&
               poll(&interrupt, 1, (int)(microseconds / 1000)) > 0) {
        if (read(self->interrupt, &count, sizeof count) < 0) self->interrupt = -1; /* polled from now on */
    }
}

/* The lock that Python's driver takes, too. */
static int lock(void *context) {
    celosia_linux *self = context;
    while (flock(self->lock, LOCK_EX))
        if (errno != EINTR) return errno;
    return 0;
}

static void unlock(void *context) { flock(((celosia_linux *)context)->lock, LOCK_UN); }

/* Physical address of a u-dma-buf. */
static int physical_of(const char *path, uint64_t *address) {
    char name[128], text[32] = {0}, *end;
    const char *last = strrchr(path, '/');
    int size = snprintf(name, sizeof name, "/sys/class/u-dma-buf/%s/phys_addr", last ? last + 1 : path);
    if (size >= (int)sizeof name) return ENAMETOOLONG;
    int file = open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno;
    ssize_t count = read(file, text, sizeof text - 1);
    close(file);
    *address = strtoull(text, &end, 0);
    return count > 0 && end != text ? 0 : EIO;
}

/* `size` bytes of a file, shared and uncached. */
static int map(const char *path, uint64_t at, size_t size, void *found) {
    int file = open(path, O_RDWR | O_SYNC | O_CLOEXEC);
    if (file < 0) return errno;
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)at);
    int code = start == MAP_FAILED ? errno : 0;
    close(file);
    memcpy(found, &start, sizeof start);
    return code;
}

static int open_all(celosia_linux *self, uint64_t registers, const char *memory, uint64_t physical, size_t size,
                    const char *interrupt) {
    char path[64];
    int code;
    snprintf(path, sizeof path, "/run/lock/celosia-%llx", (unsigned long long)registers);
    if ((self->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)) < 0) return errno;
    if (interrupt && (self->interrupt = open(interrupt, O_RDWR | O_CLOEXEC)) < 0) return errno;
    if ((code = map("/dev/mem", registers, REGISTER_BYTES, &self->registers))) {
        self->registers = NULL;
        return code;
    }
    int reserved = !strcmp(memory, "/dev/mem");
    if (!reserved && (code = physical_of(memory, &physical))) return code;
    if ((code = map(memory, reserved ? physical : 0, size, &self->device.memory))) {
        self->device.memory = NULL;
        return code;
    }
    self->device.base = physical;
    self->device.size = size;
    return 0;
}

int celosia_linux_open(celosia_linux *self, uint64_t registers, const char *memory, uint64_t physical, size_t size,
                       const char *interrupt) {
    memset(self, 0, sizeof *self);
    self->lock = self->interrupt = -1;
    celosia_device *device = &self->device;
    device->context = self;
    device->read = read_register;
    device->write = write_register;
    device->wait = wait;
    device->now = now;
    device->lock = lock;
    device->unlock = unlock;
    device->interrupt = interrupt != NULL;
    int code = open_all(self, registers, memory, physical, size, interrupt);
    if (code) celosia_linux_close(self);
    return code;
}

void celosia_linux_close(celosia_linux *self) {
    if (self->device.memory) munmap(self->device.memory, self->device.size);
    if (self->registers) munmap((void *)(uintptr_t)self->registers, REGISTER_BYTES);
    if (self->interrupt >= 0) close(self->interrupt);
    if (self->lock >= 0) close(self->lock);
    self->device.memory = NULL;
    self->registers = NULL;
    self->lock = self->interrupt = -1;
}
