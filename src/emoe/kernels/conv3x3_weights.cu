// The gradient of the weights of a 3x3 convolution, in half precision, in parts:
//
//     partial[part, (tap, i), o] = sum over the positions p of a part of x[p + tap, i] dy[p, o]
//
// in single precision; and in one row more that of the bias, the sum of dy[p, o]. blockIdx.x is the part. A block has
// three taps, those of one line (blockIdx.y % 3), the 72 channels of x, and 72 of dy (blockIdx.y / 3 says which). It
// goes through its bands, ROWS lines of an image each, with a ring of STAGES. The three taps of a channel lie 72 channels apart in shared memory: they are 27 eights of
// rows of the product, one after the other, of which a warp takes two at a time. There is room for 32: one is of ones.
//
// `all` is the number of bands, `share` that of a part. Given when this is compiled:
//   H, W, ROWS        lines, columns, lines of a band
//   OUTPUTS           channels of dy, a multiple of 72
//   STAGES, BFLOAT

constexpr int GROUPS = 2, TILES = 2, THREADS = 128 * GROUPS;
#include "lines.cuh"

constexpr int POSITIONS = ROWS * W, STEPS = POSITIONS / 16;
constexpr int SLOPES = (ROWS * LINE + 255) / 256 * 256, STAGE = SLOPES + POSITIONS / 8 * GROUP;  // bytes
static_assert(H % ROWS == 0 && OUTPUTS % CHANNELS == 0 && STAGES >= 3, "shares");
static_assert(POSITIONS % 32 == 0, "an even number of products");
static_assert(8 * GROUPS * TILES >= 3 * EIGHTS && 16 * EIGHTS <= THREADS, "all taps of a line, all slopes of a step");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv3x3_weights(const half_bits* __restrict__ x, const half_bits* __restrict__ dy, float* __restrict__ partial,
                int all, int share) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const word ring = shared_address(memory), barriers = ring + STAGES * STAGE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int begin = blockIdx.x * share, count = all - begin < share ? all - begin : share;
    const half_bits* const slopes = dy + blockIdx.y / 3 * CHANNELS;

    auto fetch_lines = [&](int band) {
        if (band >= count) return;
        const int image = (begin + band) / (H / ROWS), line = (begin + band) % (H / ROWS) * ROWS;
        copy_lines(memory + band % STAGES * STAGE, x, image, line + (int)blockIdx.y % 3 - 1, ROWS,
                   barriers + 8 * (band % STAGES));
    };
    auto fetch_slopes = [&](int band, int step) {  // of sixteen positions
        if (band >= count || threadIdx.x >= 16 * EIGHTS) return;
        const bool last = threadIdx.x >= 16 * 8;
        const int p = step * 16 + (last ? threadIdx.x - 16 * 8 : row_of(threadIdx.x));
        const int eight = last ? 8 : eight_of(threadIdx.x);
        const word to = ring + band % STAGES * STAGE + SLOPES + in_squares(p, eight);
        copy16(to, slopes + ((long long)(begin + band) * POSITIONS + p) * OUTPUTS + eight * 8);
    };

    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; ++i) make_barrier(barriers + 8 * i);
    __syncthreads();
    for (int band = 0; band < STAGES - 2; ++band) {
        fetch_lines(band);
        for (int step = 0; step < STEPS; ++step) fetch_slopes(band, step);
        end_copies();
    }
    for (int i = 0; i < STAGES; ++i) clear_columns(memory + i * STAGE, ROWS);

    // Two eights of rows for each tile. What lies beyond the 27 and the ones is computed from the last, and not stored.
    int eight[TILES];
    word at[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        eight[i] = 2 * (4 * (warp / 4 * TILES + i) + warp % 4);
        const int named = eight[i] + lane / 8 % 2;
        at[i] = place(lane % 8 + lane / 16 * 8) + (named < 3 * EIGHTS ? named : 3 * EIGHTS - 1) * 16;
    }
    float total[TILES][36];
    word a[2][TILES][4];
    const word ones = packed(1, 1);
    auto load = [&](int buffer, word from) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            load_matrices<true>(a[buffer][i], from + at[i]);
            if (eight[i] + 1 == 3 * EIGHTS) a[buffer][i][1] = a[buffer][i][3] = ones;
        }
    };

#pragma unroll 1
    for (int band = 0; band < count; ++band) {
        wait_copies<STAGES - 3>();
        show();
        wait_turn(barriers + 8 * (band % STAGES), band / STAGES % 2);
        __syncthreads();  // all have this band, and are done with the one before the last, whose place is taken next
        fetch_lines(band + STAGES - 2);
        const word stage = ring + band % STAGES * STAGE;
        load(0, stage);
#pragma unroll 1
        for (int step = 0; step < STEPS; step += 2)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const descriptor b = described(stage + SLOPES + 2 * (step + odd) * GROUP, SQUARE, GROUP);
                begin_products();
#pragma unroll
                for (int i = 0; i < TILES; ++i) multiply<true>(total[i], a[odd][i], b, band + step + odd > 0);
                end_products();
                fetch_slopes(band + STAGES - 2, step + odd);
                wait_products<1>();  // all but this one: the other registers are free
                if (step + odd + 1 < STEPS) load(1 - odd, stage + place(16 * (step + odd + 1)));
            }
        end_copies();
    }
    wait_products<0>();

    float* to = partial + (long long)blockIdx.x * (9 * CHANNELS + 1) * OUTPUTS + blockIdx.y / 3 * CHANNELS;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int named = eight[i] + k, tap = blockIdx.y % 3 * 3 + named / EIGHTS;
            int row = tap * CHANNELS + named % EIGHTS * 8 + lane / 4;
            if (named == 3 * EIGHTS && blockIdx.y % 3 == 0 && lane < 4)
                row = 9 * CHANNELS;  // eight equal rows, of which one is stored
            else if (named >= 3 * EIGHTS)
                continue;
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) {
                const float2 pair = {total[i][4 * j + 2 * k], total[i][4 * j + 2 * k + 1]};
                *(float2*)(to + (long long)row * OUTPUTS + 8 * j + lane % 4 * 2) = pair;
            }
        }
}
