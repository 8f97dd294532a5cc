/* Runs of the accelerator, and how tensors become what it stores. */

#include "celosia.h"

#define SETUPS 5

static uint32_t get(const celosia_device *device, uint32_t offset) { return device->read(device->context, offset); }

static void set(const celosia_device *device, uint32_t offset, uint32_t value) {
    device->write(device->context, offset, value);
}

/* Waiting --------------------------------------------------------------------------------------------------------- */

/* When a wait ends: microseconds of the device's clock, or looks. */
typedef struct {
    uint64_t end, looks;
} limit;

static limit limit_of(const celosia_device *device, uint64_t cycles) {
    uint64_t hertz = device->clock_hz ? device->clock_hz : CELOSIA_CLOCK_HZ;
    uint64_t microseconds = cycles / hertz * 1000000 + cycles % hertz * 1000000 / hertz;
    limit made = {device->now ? device->now(device->context) + microseconds : cycles, 0};
    return made;
}

static int late(const celosia_device *device, limit *wait) {
    return (device->now ? device->now(device->context) : wait->looks++) >= wait->end;
}

static void pause(const celosia_device *device, uint32_t microseconds) {
    if (device->wait) device->wait(device->context, microseconds);
}

/* Registers ------------------------------------------------------------------------------------------------------- */

static int check_hardware(const celosia_device *device, const celosia_image *image) {
    if (get(device, CELOSIA_REG_MAGIC) != CELOSIA_MAGIC) return CELOSIA_NO_ACCELERATOR;
    if (get(device, CELOSIA_REG_IDENTITY) != image->identity) return CELOSIA_OTHER_CONFIG;
    if (get(device, CELOSIA_REG_SOURCES) != image->sources) return CELOSIA_OTHER_SOURCES;
    return 0;
}

/* Ends a run that is under way, and waits until memory has answered what it was asked. */
static int settle(const celosia_device *device) {
    uint32_t status = get(device, CELOSIA_REG_STATUS);
    limit patience = limit_of(device, CELOSIA_SETTLE_CYCLES);
    if (status & CELOSIA_STATUS_BUSY) set(device, CELOSIA_REG_CONTROL, CELOSIA_CONTROL_ABORT);
    for (;;) {
        int end = late(device, &patience);
        if (!(get(device, CELOSIA_REG_STATUS) & (CELOSIA_STATUS_BUSY | CELOSIA_STATUS_STUCK))) return 0;
        if (end) return CELOSIA_STUCK;
        pause(device, CELOSIA_POLL_MICROSECONDS);
    }
}

/* The registers that are locked while a run is under way. */
static const uint32_t setup_registers[SETUPS] = {
    CELOSIA_REG_DMA_BASE_LO, CELOSIA_REG_DMA_BASE_HI, CELOSIA_REG_DMA_SIZE, CELOSIA_REG_INSTR_ADDR,
    CELOSIA_REG_INSTR_COUNT,
};

static void prepare(celosia_state *state, const uint32_t *setup) {
    const celosia_device *device = state->device;
    for (int i = 0; i < SETUPS; i++) set(device, setup_registers[i], setup[i]);
    set(device, CELOSIA_REG_WATCHDOG, CELOSIA_WATCHDOG_CYCLES);
    set(device, CELOSIA_REG_LEASE, CELOSIA_LEASE_CYCLES);
    set(device, CELOSIA_REG_IRQ_ENABLE, device->interrupt ? 1 : 0);
    state->number = get(device, CELOSIA_REG_RUNS) + 1; /* after all writes: who starts another run is found out */
}

/* Whether the run that has ended is the one that was prepared: one has begun since, with these registers. */
static int ours(const celosia_state *state, const uint32_t *setup) {
    if (get(state->device, CELOSIA_REG_RUNS) != state->number) return 0;
    for (int i = 0; i < SETUPS; i++)
        if (get(state->device, setup_registers[i]) != setup[i]) return 0;
    return 1;
}

static int until_done(const celosia_device *device, uint64_t cycles) {
    limit patience = limit_of(device, cycles);
    for (;;) {
        int end = late(device, &patience); /* before the look at the status: a host that slept is not the device's fault */
        uint32_t status = get(device, CELOSIA_REG_STATUS);
        if ((status & (CELOSIA_STATUS_BUSY | CELOSIA_STATUS_DONE)) == CELOSIA_STATUS_DONE) return 0;
        if (end) return CELOSIA_TIMEOUT;
        set(device, CELOSIA_REG_LEASE, CELOSIA_LEASE_CYCLES);
        pause(device, device->interrupt ? CELOSIA_INTERRUPT_MICROSECONDS : CELOSIA_POLL_MICROSECONDS);
    }
}

static int run(celosia_state *state, const celosia_image *image, uint32_t address, uint32_t count) {
    const celosia_device *device = state->device;
    const uint32_t setup[SETUPS] = {
        (uint32_t)device->base, (uint32_t)(device->base >> 32), state->memory_size, address, count,
    };
    int code = check_hardware(device, image); /* others may have loaded another bitstream */
    if (!code) code = settle(device);
    if (code) return code;
    prepare(state, setup);
    set(device, CELOSIA_REG_CONTROL, CELOSIA_CONTROL_START);
    code = until_done(device, CELOSIA_CYCLES_PER_INSTRUCTION * ((uint64_t)count + 1));
    if (code) {
        if (ours(state, setup)) settle(device); /* what it would still write may be the memory of others soon */
        return code;
    }
    state->status = get(device, CELOSIA_REG_STATUS);
    uint64_t cycles = get(device, CELOSIA_REG_CYCLES_LO);
    cycles |= (uint64_t)get(device, CELOSIA_REG_CYCLES_HI) << 32;
    state->instruction = get(device, CELOSIA_REG_ERROR_INDEX);
    if (!ours(state, setup)) return CELOSIA_NOT_OURS; /* after all that is read of it */
    state->cycles += cycles;
    return (int)(state->status >> CELOSIA_STATUS_ERROR_SHIFT & 0xff);
}

static int locked(const celosia_device *device) {
    return device->lock && device->lock(device->context) ? CELOSIA_IN_USE : 0;
}

static void unlocked(const celosia_device *device) {
    if (device->unlock) device->unlock(device->context);
}

int celosia_launch(celosia_state *state, const celosia_image *image, uint32_t address, uint32_t count) {
    if (!count) return 0;
    int code = locked(state->device);
    if (code) return code;
    code = run(state, image, address, count);
    unlocked(state->device);
    return code;
}

int celosia_open(celosia_state *state, const celosia_device *device, const celosia_image *image) {
    memset(state, 0, sizeof *state);
    if (image->memory_size) {
        if (device->base % 4096) return CELOSIA_UNALIGNED_BASE;
        if (device->size < image->memory_size) return CELOSIA_LITTLE_MEMORY;
        int code = locked(device);
        if (code) return code;
        code = check_hardware(device, image);
        if (!code) code = settle(device); /* late writes of an earlier run would arrive in what is not its memory */
        unlocked(device);
        if (code) return code;
        memcpy(device->memory + image->address, image->bytes, image->size);
        if (device->flush) device->flush(device->context, device->memory + image->address, image->size);
    }
    state->device = device;
    state->memory_size = image->memory_size;
    return 0;
}

int celosia_close(celosia_state *state) {
    const celosia_device *device = state->device;
    int code = 0;
    state->device = NULL;
    if (device && state->memory_size && get(device, CELOSIA_REG_RUNS) == state->number) {
        code = locked(device);
        if (code) return code;
        code = settle(device);
        unlocked(device);
    }
    return code;
}

/* Tensors --------------------------------------------------------------------------------------------------------- */

static size_t stored_bytes(const celosia_form *form) {
    size_t blocks = (form->images + form->batch - 1) / form->batch;
    return blocks * form->batch * form->groups * form->group * form->height * form->width;
}

/* The first byte of a channel of the storage; its pixels are batch * group bytes apart. */
static size_t stored_at(const celosia_form *form, uint32_t image, uint32_t channel) {
    size_t pixels = (size_t)form->height * form->width, block = (size_t)(image / form->batch) * form->groups;
    return ((block + channel / form->group) * pixels * form->batch + image % form->batch) * form->group +
           channel % form->group;
}

/* A row of a channel in the tensor: its element at column 0, the column of its first pixel, and whether it is there. */
typedef struct {
    size_t start;
    int32_t column;
    int there;
} line;

static line line_of(const celosia_form *form, uint32_t image, uint32_t channel, uint32_t y) {
    uint32_t tap = channel % form->taps;
    int32_t row = (int32_t)y * form->step[0] + (int32_t)(tap / form->tap_columns) * form->dilation[0] - form->before[0];
    line found = {0, (int32_t)(tap % form->tap_columns) * form->dilation[1] - form->before[1],
                  row >= 0 && row < form->bounds[0]};
    if (found.there)
        found.start = (size_t)image * form->apart[0] + (size_t)(channel / form->taps) * form->apart[1] +
                      (size_t)row * form->apart[2];
    return found;
}

void celosia_pack(celosia_state *state, const celosia_form *form, uint32_t address, const void *tensor) {
    const uint8_t *from = tensor;
    const celosia_device *device = state->device;
    const size_t apart = (size_t)form->batch * form->group, size = stored_bytes(form);
    memset(device->memory + address, 0, size);
    for (uint32_t image = 0; image < form->images; image++)
        for (uint32_t channel = 0; channel < form->channels; channel++) {
            uint8_t *to = device->memory + address + stored_at(form, image, channel);
            for (uint32_t y = 0; y < form->height; y++) {
                line row = line_of(form, image, channel, y);
                for (uint32_t x = 0; x < form->width; x++, to += apart, row.column += form->step[1]) {
                    int there = row.there && row.column >= 0 && row.column < form->bounds[1];
                    uint8_t value = form->pad;
                    if (there) value = from[row.start + (size_t)row.column * form->apart[3]] ^ form->flip;
                    *to = value ^ form->invert;
                }
            }
        }
    if (device->flush) device->flush(device->context, device->memory + address, size);
}

void celosia_unpack(celosia_state *state, const celosia_form *form, uint32_t address, void *tensor) {
    uint8_t *to = tensor;
    const celosia_device *device = state->device;
    const size_t apart = (size_t)form->batch * form->group;
    if (device->invalidate) device->invalidate(device->context, device->memory + address, stored_bytes(form));
    for (uint32_t image = 0; image < form->images; image++)
        for (uint32_t channel = 0; channel < form->channels; channel++) {
            const uint8_t *from =
                device->memory + address + stored_at(form, image, channel + form->first * form->group);
            for (uint32_t y = 0; y < form->height; y++) {
                line row = line_of(form, image, channel, y);
                for (uint32_t x = 0; x < form->width; x++, from += apart, row.column += form->step[1])
                    if (row.there && row.column >= 0 && row.column < form->bounds[1])
                        to[row.start + (size_t)row.column * form->apart[3]] = *from ^ form->flip;
            }
        }
}

int celosia_check(const void *const *tensors, const size_t *bytes, const size_t *wanted, size_t count, int code) {
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] != wanted[i]) return code;
        if (!tensors[i] && wanted[i]) return CELOSIA_NO_TENSOR;
    }
    return 0;
}

/* Words ----------------------------------------------------------------------------------------------------------- */

const char *celosia_text(int code) {
    switch (code) {
        CELOSIA_HARDWARE_TEXTS
        case CELOSIA_NO_ACCELERATOR: return "there is no Celosia accelerator at these registers; load its bitstream";
        case CELOSIA_OTHER_CONFIG: return "the accelerator has another Config than the model was exported for";
        case CELOSIA_OTHER_SOURCES: return "the bitstream is of other hardware sources than the model was exported for";
        case CELOSIA_LITTLE_MEMORY: return "the device has less memory than the model needs";
        case CELOSIA_UNALIGNED_BASE: return "the device's memory does not begin at a multiple of 4096";
        case CELOSIA_UNALIGNED_INSTANCE: return "the instance does not lie at a multiple of its alignment";
        case CELOSIA_NOT_OPEN: return "the instance is not open";
        case CELOSIA_INPUT_SIZE: return "an input has another size than the model's";
        case CELOSIA_OUTPUT_SIZE: return "an output has another size than the model's";
        case CELOSIA_NO_TENSOR: return "an input or output is a null pointer";
        case CELOSIA_STUCK: return "memory has not answered what an earlier run asked of it; restart the board";
        case CELOSIA_TIMEOUT: return "the run has not ended in time";
        case CELOSIA_NOT_OURS: return "another process has used the accelerator during this run";
        case CELOSIA_IN_USE: return "another process holds the accelerator";
    }
    return "an unknown code";
}
