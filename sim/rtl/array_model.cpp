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

namespace {

constexpr int FEW = 32;  // products of a row that are added up beside those of all rows, in half the time of row by row

// terms: [BLOCK_OUT][WIDTH].
template <int WIDTH>
void add_up(const int32_t* __restrict terms, int32_t* __restrict sums) {
    if constexpr (WIDTH == 1) {
        std::memcpy(sums, terms, BLOCK_OUT * sizeof *sums);
    } else {
        int32_t halves[BLOCK_OUT * WIDTH / 2];
        for (int i = 0; i < BLOCK_OUT * WIDTH / 2; i++) halves[i] = terms[2 * i] + terms[2 * i + 1];
        add_up<WIDTH / 2>(halves, sums);
    }
}

}  // namespace

// inp: [BLOCK_IN/GROUP][BATCH][GROUP] int8. wgt: [BLOCK_IN/GROUP][BLOCK_OUT][GROUP] int8. sums: [BLOCK_OUT/GROUP][BATCH][GROUP] int32.
extern "C" void celosia_products(const svBitVecVal* inp, const svBitVecVal* wgt, svBitVecVal* sums) {
    const auto* pieces = reinterpret_cast<const int8_t*>(inp);
    const auto* weights = reinterpret_cast<const int8_t*>(wgt);
    [[maybe_unused]] int8_t rows[BLOCK_OUT * BLOCK_IN];  // weights of each output side by side, if wgt has several pieces
    if constexpr (GROUP < BLOCK_IN) {
        for (int piece = 0; piece < BLOCK_IN / GROUP; piece++)
            for (int o = 0; o < BLOCK_OUT; o++)
                std::memcpy(rows + o * BLOCK_IN + piece * GROUP, weights + (piece * BLOCK_OUT + o) * GROUP, GROUP);
        weights = rows;
    }
    for (int b = 0; b < BATCH; b++) {
        int8_t row[BLOCK_IN];
        for (int piece = 0; piece < BLOCK_IN / GROUP; piece++)
            std::memcpy(row + piece * GROUP, pieces + (piece * BATCH + b) * GROUP, GROUP);
        int32_t of_row[BLOCK_OUT] = {};
        if constexpr (BLOCK_IN <= FEW) {
            int32_t pairs[BLOCK_OUT * BLOCK_IN / 2];
            for (int o = 0; o < BLOCK_OUT; o++)
                for (int i = 0; i < BLOCK_IN / 2; i++)
                    pairs[o * BLOCK_IN / 2 + i] = row[2 * i] * weights[o * BLOCK_IN + 2 * i] +
                                                  row[2 * i + 1] * weights[o * BLOCK_IN + 2 * i + 1];
            add_up<BLOCK_IN / 2>(pairs, of_row);
        } else {
            for (int o = 0; o < BLOCK_OUT; o++)
                for (int i = 0; i < BLOCK_IN; i++) of_row[o] += row[i] * weights[o * BLOCK_IN + i];
        }
        for (int o = 0; o < BLOCK_OUT; o++) sums[(o / GROUP * BATCH + b) * GROUP + o % GROUP] = of_row[o];
    }
}
