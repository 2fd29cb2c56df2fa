// How the threads of a block share a part of a map for a norm: all P positions of an image, WIDTH channels, which are
// whole groups. A thread has four neighbouring channels, 8 bytes, at every PLACES-th position, so that all that a block
// reads is asked for at once, and read once.
//
// Given when this is compiled:
//   P, DEPTH          positions of a map, and channels
//   WIDTH, EACH       channels of a block, and of a group
//   HAS_FILM, BFLOAT

#pragma once
#include "warpgroups.cuh"

constexpr int QUADS = WIDTH / 4, PLACES = 64, THREADS = QUADS * PLACES, ITEMS = P / PLACES;
constexpr int ROUNDS = 8, LINE = 2 * WIDTH;  // of a sum over places; numbers that are added up
constexpr int SUMS = 4 * (PLACES + ROUNDS + 1) * LINE;  // bytes
static_assert(P % PLACES == 0 && DEPTH % WIDTH == 0 && WIDTH % EACH == 0 && WIDTH % 4 == 0, "shares");
static_assert(THREADS % 32 == 0 && THREADS <= 1024 && THREADS >= ROUNDS * LINE && PLACES % ROUNDS == 0, "threads");

// Sums over the positions of two numbers at each channel, in a fixed order: the result is at [0, WIDTH) and
// [WIDTH, 2 WIDTH) of what is returned, for all threads after the barrier with which this ends.
__device__ __forceinline__ const float* summed(unsigned char* memory, const float (&one)[4], const float (&other)[4]) {
    float* const each = (float*)memory;
    float* const rounds = each + PLACES * LINE;
    float* const total = rounds + ROUNDS * LINE;
    float* const mine = each + threadIdx.x / QUADS * LINE + threadIdx.x % QUADS * 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        mine[k] = one[k];
        mine[WIDTH + k] = other[k];
    }
    __syncthreads();
    if (threadIdx.x < ROUNDS * LINE) {
        const int column = threadIdx.x % LINE, round = threadIdx.x / LINE;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PLACES / ROUNDS; ++i) sum += each[(round * (PLACES / ROUNDS) + i) * LINE + column];
        rounds[round * LINE + column] = sum;
    }
    __syncthreads();
    if (threadIdx.x < LINE) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) sum += rounds[i * LINE + threadIdx.x];
        total[threadIdx.x] = sum;
    }
    __syncthreads();
    return total;
}

// The sum over the channels of the group of channel c.
__device__ __forceinline__ float of_group(const float* values, int c) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) sum += values[c / EACH * EACH + k];
    return sum;
}

__device__ __forceinline__ float sigmoid(float z) { return inverse(1 + power_of_2(-1.4426950408889634f * z)); }

// Four numbers of a map.
__device__ __forceinline__ void unpacked4(float (&to)[4], uint2 from) {
    to[0] = unpacked((half_bits)(from.x & 0xffff));
    to[1] = unpacked((half_bits)(from.x >> 16));
    to[2] = unpacked((half_bits)(from.y & 0xffff));
    to[3] = unpacked((half_bits)(from.y >> 16));
}

// Scale and shift of a channel, after the norm: gamma and beta, and what the film of this row makes of them.
struct Affine { float more, scale, shift; };
__device__ __forceinline__ Affine affine_of(const float* gamma, const float* beta, const half_bits* film, int channel) {
    Affine found = {1, gamma[channel], beta[channel]};
    if (HAS_FILM) {
        found.more += unpacked(film[channel]);
        found.shift = found.shift * found.more + unpacked(film[DEPTH + channel]);
        found.scale *= found.more;
    }
    return found;
}
