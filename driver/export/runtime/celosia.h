/* Runs models that `celosia export` has written on a Celosia accelerator. C11; no memory is allocated, and nothing is
   kept outside of what the caller gives. */

#ifndef CELOSIA_H
#define CELOSIA_H

#include <stddef.h>
#include <stdint.h>

#include "celosia_hardware.h"

#if __STDC_HOSTED__ || defined(__cplusplus)
#include <string.h>
#else /* what a compiler wants of any environment */
void *memcpy(void *restrict to, const void *restrict from, size_t size);
void *memset(void *to, int value, size_t size);
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weights and instructions are little-endian, and so must be the processor"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The accelerator and its memory, as a model reaches them. What may be NULL says so. `context` is given back to each
   function. Several models share an accelerator with a device each, that has a part of the memory; one runs at a time. */
typedef struct {
    void *context;
    uint32_t (*read)(void *context, uint32_t offset);                /* a register; offsets are bytes */
    void (*write)(void *context, uint32_t offset, uint32_t value);   /* returns when it is written */
    uint8_t *memory;    /* `size` bytes that the accelerator reaches, as this processor sees them */
    uint64_t base;      /* where they are for the accelerator: a multiple of 4096 */
    size_t size;
    /* NULL where the processor and the accelerator see the same bytes at once. What was written to `memory` reaches the
       accelerator with `flush`, and what that has written is seen after `invalidate`. */
    void (*flush)(void *context, const uint8_t *start, size_t size);
    void (*invalidate)(void *context, uint8_t *start, size_t size);
    /* Waits so long, or shorter; NULL: the status is looked at again at once. */
    void (*wait)(void *context, uint32_t microseconds);
    int interrupt;      /* whether `wait` ends with the accelerator's interrupt */
    /* Microseconds of a clock that never goes back. NULL: each look at the status is taken for a cycle, which it takes
       at least. */
    uint64_t (*now)(void *context);
    uint64_t clock_hz;  /* of the accelerator; 0: the slowest that a board may have */
    /* Held while a run uses the registers, where others may, too; 0 where it is. NULL: nobody else does. */
    int (*lock)(void *context);
    void (*unlock)(void *context);
} celosia_device;

/* What functions return: 0, an error of a run that the hardware tells (celosia_hardware.h), or one of these. */
enum celosia_error {
    CELOSIA_NO_ACCELERATOR = 256,
    CELOSIA_OTHER_CONFIG,
    CELOSIA_OTHER_SOURCES,
    CELOSIA_LITTLE_MEMORY,
    CELOSIA_UNALIGNED_BASE,
    CELOSIA_UNALIGNED_INSTANCE,
    CELOSIA_NOT_OPEN,
    CELOSIA_INPUT_SIZE,
    CELOSIA_OUTPUT_SIZE,
    CELOSIA_NO_TENSOR,
    CELOSIA_STUCK,
    CELOSIA_TIMEOUT,
    CELOSIA_NOT_OURS,
    CELOSIA_IN_USE
};

/* A code in words, without a full stop; never NULL. */
const char *celosia_text(int code);

/* A model's state on a device. Of the last launch: the code and number of the instruction that failed, the status, and
   its cycles. */
typedef struct {
    const celosia_device *device;
    uint32_t memory_size;   /* what the accelerator may reach */
    uint32_t number;        /* of the run that was prepared */
    uint32_t instruction;
    uint32_t status;
    uint64_t cycles;        /* of all launches of a run */
} celosia_state;

/* What a model needs of a device, and what it has in its memory from `address` on. */
typedef struct {
    uint32_t identity, sources, memory_size, address, size;
    const void *bytes;
} celosia_image;

/* A tensor of bytes, and how the accelerator stores it: [images / batch][groups][height][width][batch][group].

   Channel c of the storage, from group `first` on, is tap t = c % taps of the tensor's axis o = c / taps; its pixel
   y, x is the tensor's element `image * apart[0] + o * apart[1] + row * apart[2] + column * apart[3]`, with
   row = y * step[0] + t / tap_columns * dilation[0] - before[0], and columns alike. Outside of `bounds` it is `pad`;
   channels and images that the tensor has not are 0. */
typedef struct {
    uint32_t batch, group, groups, first;
    uint32_t images, channels, height, width;
    uint32_t taps, tap_columns;
    int32_t step[2], dilation[2], before[2], bounds[2];
    uint32_t apart[4];
    uint8_t flip, pad, invert;   /* flip: of the tensor's bytes; invert: of all that is stored, both by exclusive or */
} celosia_form;

/* What models call. Codes are those above. */
int celosia_open(celosia_state *state, const celosia_device *device, const celosia_image *image);
int celosia_close(celosia_state *state);
int celosia_launch(celosia_state *state, const celosia_image *image, uint32_t address, uint32_t count);
void celosia_pack(celosia_state *state, const celosia_form *form, uint32_t address, const void *tensor);
void celosia_unpack(celosia_state *state, const celosia_form *form, uint32_t address, void *tensor);
int celosia_check(const void *const *tensors, const size_t *bytes, const size_t *wanted, size_t count, int code);

#ifdef __cplusplus
}
#endif

#endif
