// Sums of products for the model of the array (array_model.py), in plain loops that a compiler vectorises.
//
// Compiled with -DBATCH, -DBLOCK_IN, -DBLOCK_OUT and -DGROUP of the Config. Vectors come as words of 32 bits, the lowest
// first, which on a little-endian machine is the order of their bytes.

#include <cstdint>
#include <cstring>

#include "svdpi.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the bytes of operands are taken in the order of a little-endian machine"
#endif

// inp: [BLOCK_IN/GROUP][BATCH][GROUP] int8. wgt: [BLOCK_OUT][BLOCK_IN] int8. sums: [BLOCK_OUT/GROUP][BATCH][GROUP] int32.
extern "C" void celosia_products(const svBitVecVal* inp, const svBitVecVal* wgt, svBitVecVal* sums) {
    const auto* pieces = reinterpret_cast<const int8_t*>(inp);
    const auto* weights = reinterpret_cast<const int8_t*>(wgt);
    for (int b = 0; b < BATCH; b++) {
        int8_t row[BLOCK_IN];
        for (int piece = 0; piece < BLOCK_IN / GROUP; piece++)
            std::memcpy(row + piece * GROUP, pieces + (piece * BATCH + b) * GROUP, GROUP);
        for (int o = 0; o < BLOCK_OUT; o++) {
            int32_t sum = 0;
            for (int i = 0; i < BLOCK_IN; i++) sum += row[i] * weights[o * BLOCK_IN + i];
            sums[(o / GROUP * BATCH + b) * GROUP + o % GROUP] = static_cast<uint32_t>(sum);
        }
    }
}
