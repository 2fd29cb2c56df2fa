// A 3x3 convolution of channels_last maps with 72 channels that keeps the side, in half precision:
//
//     y[p, n] = sum over taps and channels k of x[p + tap, k] w[n, tap, k]      (+ bias[n] + skip[p, n])
//
// and with TURNED its transpose, the gradient of the input: w[k, 8 - tap, n] in place of w[n, tap, k].
//
// A block keeps the weights for 72 channels of the result (blockIdx.y says which) in shared memory, and goes from band
// to band: ROWS lines of an image, with a border of zeros. While a band is computed the next one is copied; during the
// first one the weights arrive, tap by tap. A tap is an offset into the band, which is read once from global memory for
// all nine of them. The 72 channels of a tap are four products of 16 and a half; the halves of two taps make one.
//
// `all` is the number of bands. Given when this is compiled:
//   H, W, ROWS        lines, columns, lines of a band: 64 TILES GROUPS positions
//   OUTPUTS           channels of y, a multiple of 72
//   GROUPS, TILES     warpgroups of a block, and how often each of them has 64 positions
//   TURNED, HAS_BIAS, HAS_SKIP, BFLOAT

constexpr int THREADS = 128 * GROUPS;
#include "lines.cuh"

constexpr int POSITIONS = ROWS * W, AHEAD = 3;                                      // taps whose weights are under way
constexpr int TAP = EIGHTS * GROUP, WEIGHTS = 9 * TAP, BAND = (ROWS + 2) * LINE;  // bytes
static_assert(POSITIONS == 64 * TILES * GROUPS && H % ROWS == 0 && OUTPUTS % CHANNELS == 0, "shares");

__device__ __forceinline__ constexpr int offset_of(int tap) { return tap / 3 * LINE + tap % 3 * ROW; }

// The weights of a tap: in memory (OUTPUTS, 9, 72), or with TURNED (72, 9, OUTPUTS). Rows of squares are rows of
// memory. If these are the sum of the product, the last eight of a row share a square with those of the next tap.
__device__ __forceinline__ void copy_weights(word to, const half_bits* weight, int first, int tap) {
    const half_bits* from = TURNED ? weight + (8 - tap) * OUTPUTS + first : weight + (first * 9 + tap) * CHANNELS;
    constexpr int NEXT = 9 * (TURNED ? OUTPUTS : CHANNELS);
#pragma unroll
    for (int i = threadIdx.x; i < CHANNELS * 8; i += THREADS)
        copy16(to + tap * TAP + in_squares(row_of(i), eight_of(i)), from + row_of(i) * NEXT + eight_of(i) * 8);
    for (int row = threadIdx.x; row < CHANNELS; row += THREADS) {
        const int last = row / 8 * GROUP + 4 * SQUARE;
        copy16(to + (TURNED ? tap * TAP + last + half_of(row, 0) : tap / 2 * 2 * TAP + last + half_of(row, tap % 2)),
               from + row * NEXT + 64);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv3x3(const half_bits* __restrict__ x, const half_bits* __restrict__ weight, const float* __restrict__ bias,
        const half_bits* __restrict__ skip, half_bits* __restrict__ y, int all) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char* const bands = memory + WEIGHTS;
    const word weights = shared_address(memory), barriers = shared_address(bands + 2 * BAND);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.y * CHANNELS;
    constexpr int DEEPER = TURNED ? 2 * GROUP : SQUARE;  // from sixteen channels of the sum to the next

    auto fetch = [&](int turn, int band) {
        copy_lines(bands + turn * BAND, x, band / (H / ROWS), band % (H / ROWS) * ROWS - 1, ROWS + 2, barriers + 8 * turn);
    };
    if (threadIdx.x == 0) {
        make_barrier(barriers);
        make_barrier(barriers + 8);
    }
    __syncthreads();
    fetch(0, blockIdx.x);
    for (int tap = 0; tap < AHEAD; ++tap) {
        copy_weights(weights, weight, first, tap);
        end_copies();
    }
    clear_columns(bands, 2 * (ROWS + 2));
    if (!TURNED)  // beside the last eight of tap 8
        for (int row = threadIdx.x; row < CHANNELS; row += THREADS)
            clear16(memory + 8 * TAP + row / 8 * GROUP + 4 * SQUARE + half_of(row, 1));

    // Positions of this warp's rows: those of warp w of a group are 16 w to 16 w + 15 of each 64.
    int mine[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) mine[i] = (warp / 4 * TILES + i) * 64 + warp % 4 * 16;

    int count = 0;
    for (int band = blockIdx.x; band < all; band += gridDim.x, ++count) {
        const int turn = count % 2;
        const long long begin = (long long)band * POSITIONS;
        word at[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) at[i] = shared_address(bands + turn * BAND) + place(mine[i] + lane % 16);
        float total[TILES][36];
        word a[2][TILES][4];

        auto load = [&](int buffer, word low, word high) {  // channels at `low` and, the next eight, at `high`
#pragma unroll
            for (int i = 0; i < TILES; ++i) load_matrices<false>(a[buffer][i], at[i] + (lane < 16 ? low : high));
        };
        auto product = [&](int buffer, descriptor b, int keep) {
            begin_products();
#pragma unroll
            for (int i = 0; i < TILES; ++i) multiply<TURNED>(total[i], a[buffer][i], b, keep);
            end_products();
        };

        wait_turn(barriers + 8 * turn, count / 2 % 2);
        if (count == 0) __syncthreads();  // zeros of the border
        load(0, 0, 16);
#pragma unroll 1
        for (int tap = 0; tap < 9; ++tap) {
            if (count == 0) {
                if (tap + AHEAD < 9) copy_weights(weights, weight, first, tap + AHEAD);
                end_copies();
                wait_copies<AHEAD>();
                show();
                __syncthreads();  // the weights of this tap are there for all
            }
            if (tap == 2 && band + gridDim.x < all) {
                if (threadIdx.x == 0) wait_stores();
                fetch(1 - turn, band + gridDim.x);
            }
            const word offset = offset_of(tap), w = weights + tap * TAP;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                product(k % 2, described(w + k * DEEPER, SQUARE, GROUP), tap + k > 0);
                wait_products<1>();  // all but this one: the other registers are free
                if (k < 3)
                    load((k + 1) % 2, offset + 32 * (k + 1), offset + 32 * (k + 1) + 16);
                else if (tap < 8)
                    load(0, offset_of(tap + 1), offset_of(tap + 1) + 16);
                else
                    load(0, offset_of(0) + 128, offset_of(1) + 128);
            }
        }
        word more[TILES][EIGHTS][2];  // of the skip; asked for now, to be there in time
        if (HAS_SKIP)
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        const int p = mine[i] + 8 * k + lane / 4, c = first + 8 * j + lane % 4 * 2;
                        more[i][j][k] = *(const word*)(skip + (begin + p) * OUTPUTS + c);
                    }
        // Channels 64 to 71 of taps 0 and 1, 2 and 3, ... and of tap 8, beside which there are zeros.
#pragma unroll
        for (int pair = 0; pair < 5; ++pair) {
            if (pair == 4)
#pragma unroll
                for (int i = 0; i < TILES; ++i) a[0][i][2] = a[0][i][3] = 0;
            const word w = weights + 2 * pair * TAP + 4 * DEEPER;
            product(pair % 2, described(w, SQUARE, !TURNED ? GROUP : pair < 4 ? TAP : 0), 1);
            wait_products<1>();
            if (pair < 4) {
                const int next = 2 * pair + 2;
                load((pair + 1) % 2, offset_of(next) + 128, offset_of(next < 8 ? next + 1 : 8) + 128);
            }
        }
        wait_products<0>();

        // The result takes the place of the band's inner positions, and leaves in whole lines.
        __syncthreads();
        unsigned char* const inner = bands + turn * BAND + LINE + ROW;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int p = mine[i] + 8 * k + lane / 4, c = 8 * j + lane % 4 * 2;
                    float low = total[i][4 * j + 2 * k], high = total[i][4 * j + 2 * k + 1];
                    if (HAS_BIAS) {
                        low += bias[first + c];
                        high += bias[first + c + 1];
                    }
                    if (HAS_SKIP) {
                        low += unpacked((half_bits)(more[i][j][k] & 0xffff));
                        high += unpacked((half_bits)(more[i][j][k] >> 16));
                    }
                    *(word*)(inner + place(p) + c * 2) = packed(low, high);
                }
        show();
        __syncthreads();
        if (OUTPUTS == CHANNELS) {
            if (threadIdx.x == 0) {
                for (int line = 0; line < ROWS; ++line)
                    store_many(y + (begin + line * W) * OUTPUTS, shared_address(inner) + line * LINE, W * ROW);
                end_stores();
            }
        } else {
            for (int i = threadIdx.x; i < POSITIONS * EIGHTS; i += THREADS) {
                half_bits* to = y + (begin + i / EIGHTS) * OUTPUTS + first + i % EIGHTS * 8;
                *(uint4*)to = *(const uint4*)(inner + place(i / EIGHTS) + i % EIGHTS * 16);
            }
            __syncthreads();
        }
    }
    if (threadIdx.x == 0) wait_stores();  // shared memory goes with the block
}
