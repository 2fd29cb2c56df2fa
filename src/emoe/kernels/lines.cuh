// Lines of a map in shared memory, with a border of zeros on both sides: what the taps of a 3x3 convolution read.
//
// Given by the file that includes this one: H, W and THREADS. The map has 72 channels, so a line lies together in memory.

#pragma once
#include "warpgroups.cuh"

constexpr int LINE = (W + 2) * ROW;  // bytes of a line with its border
static_assert(W % 16 == 0 || 16 % W == 0, "sixteen positions have a shape");

// Where position p lies, seen from the first one, which belongs to the border's corner for the first tap.
__device__ __forceinline__ constexpr int place(int p) { return p / W * LINE + p % W * ROW; }

// The border's columns: nothing else is ever written there.
__device__ __forceinline__ void clear_columns(unsigned char* lines, int count) {
    for (int i = threadIdx.x; i < count * 2 * EIGHTS; i += THREADS) {
        const int line = i / (2 * EIGHTS), part = i % (2 * EIGHTS);
        clear16(lines + line * LINE + (part < EIGHTS ? part * 16 : (W + 1) * ROW + (part - EIGHTS) * 16));
    }
}

// `count` lines of an image from line `begin` on, which may lie outside: then they are zeros. Called by all threads;
// one of them asks the copy engine, whose `barrier` is to be waited for.
__device__ __forceinline__ void copy_lines(unsigned char* lines, const half_bits* x, int image, int begin, int count,
                                           word barrier) {
    const int above = begin < 0 ? -begin : 0, below = begin + count > H ? begin + count - H : 0;
    for (int i = threadIdx.x; i < (above + below) * W * EIGHTS; i += THREADS) {
        const int line = i / (W * EIGHTS);
        clear16(lines + (line < above ? line : count - below + line - above) * LINE + ROW + i % (W * EIGHTS) * 16);
    }
    if (threadIdx.x > 0) return;
    expect(barrier, (count - above - below) * W * ROW);
    for (int line = above; line < count - below; ++line) {
        const long long from = (long long)(image * H + begin + line) * W * CHANNELS;
        copy_many(shared_address(lines) + line * LINE + ROW, x + from, W * ROW, barrier);
    }
}
