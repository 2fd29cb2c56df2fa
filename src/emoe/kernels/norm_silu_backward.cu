// The gradients of `norm_silu.cu`, from dy, and dskip, which is added to dx; see `maps.norm_silu`.
//
// x and dskip lie in shared memory, in places that only their own thread reads; dy, and what becomes of it before the
// norm, dz, in registers. So each is read once.
//
// `partial` (2 or 3, B, DEPTH) gets the gradients of gamma, beta and bias of each row, `dfilm` (B, 2 DEPTH) that of the film.
// blockIdx.x is the row, blockIdx.y says which channels. Given when this is compiled: what `norms.cuh` wants, HAS_BIAS,
// HAS_SKIP.

#include "norms.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
norm_silu_backward(const half_bits* __restrict__ x, const float* __restrict__ gamma, const float* __restrict__ beta,
                   const half_bits* __restrict__ film, const float* __restrict__ stats,
                   const half_bits* __restrict__ dy, const half_bits* __restrict__ dskip, half_bits* __restrict__ dx,
                   half_bits* __restrict__ dfilm, float* __restrict__ partial, int film_stride, int batch) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int quad = threadIdx.x % QUADS * 4, first = blockIdx.y * WIDTH;
    const long long start = ((long long)blockIdx.x * P + threadIdx.x / QUADS) * DEPTH + first + quad;
    uint2* const held = (uint2*)memory + threadIdx.x;  // one of x at every THREADS, then those of dskip
    const float* const kept = stats + (long long)blockIdx.x * 3 * DEPTH;
    film += (long long)blockIdx.x * film_stride;
    unsigned char* const sums = memory + (1 + HAS_SKIP) * ITEMS * THREADS * 8;

    uint2 slopes[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        copy8(shared_address(held + i * THREADS), x + start + i * PLACES * DEPTH);
        slopes[i] = *(const uint2*)(dy + start + i * PLACES * DEPTH);
    }
    end_copies();
    if (HAS_SKIP)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) copy8(shared_address(held + (ITEMS + i) * THREADS), dskip + start + i * PLACES * DEPTH);
    end_copies();

    float middle[4], slope[4], level[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const Affine after = affine_of(gamma, beta, film, first + quad + k);
        middle[k] = kept[first + quad + k];
        slope[k] = kept[DEPTH + first + quad + k] * after.scale;
        level[k] = after.shift;
    }
    float dz[ITEMS][4], ones[4] = {0, 0, 0, 0}, both[4] = {0, 0, 0, 0};
    wait_copies<1>();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float u[4];
        unpacked4(u, held[i * THREADS]);
        unpacked4(dz[i], slopes[i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u[k] -= middle[k];
            const float z = u[k] * slope[k] + level[k], gate = sigmoid(z), y = z * gate;
            dz[i][k] *= gate + y - y * gate;
            ones[k] += dz[i][k];
            both[k] += dz[i][k] * u[k];
        }
    }
    const float* const total = summed(sums, ones, both);
    float* const by_level = (float*)(sums + SUMS);
    float* const by_slope = by_level + WIDTH;
    float* const levels = by_slope + WIDTH;
    float* const slants = levels + WIDTH;
    const int c = threadIdx.x, channel = first + c;
    float rstd = 0, dshift = 0, dscale = 0;
    Affine after = {0, 0, 0};
    if (c < WIDTH) {
        rstd = kept[DEPTH + channel];
        after = affine_of(gamma, beta, film, channel);
        dshift = total[c];
        dscale = total[WIDTH + c] * rstd;
        by_level[c] = after.scale * dshift;
        by_slope[c] = after.scale * dscale;
    }
    __syncthreads();
    if (c < WIDTH) {
        const float mean_dz = of_group(by_level, c) / (P * EACH), mean_dz_unit = of_group(by_slope, c) / (P * EACH);
        levels[c] = -rstd * mean_dz;
        slants[c] = -rstd * rstd * mean_dz_unit;
        float* const row = partial + (long long)blockIdx.x * DEPTH + channel;
        row[0] = dscale * after.more;
        row[(long long)batch * DEPTH] = dshift * after.more;
        if (HAS_BIAS)  // the sum of dx over positions
            row[2ll * batch * DEPTH] =
                rstd * (after.scale * dshift - P * mean_dz - mean_dz_unit * P * rstd * kept[2 * DEPTH + channel]);
        if (HAS_FILM) {
            half_bits* const to = dfilm + (long long)blockIdx.x * 2 * DEPTH + channel;
            to[0] = (half_bits)packed(gamma[channel] * dscale + beta[channel] * dshift, 0);
            to[DEPTH] = (half_bits)packed(dshift, 0);
        }
    }
    __syncthreads();
    float slant[4], under[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        slant[k] = slants[quad + k];
        under[k] = levels[quad + k] - middle[k] * slant[k];
    }
    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float u[4], more[4] = {0, 0, 0, 0};
        unpacked4(u, held[i * THREADS]);
        if (HAS_SKIP) unpacked4(more, held[(ITEMS + i) * THREADS]);
#pragma unroll
        for (int k = 0; k < 4; ++k) u[k] = dz[i][k] * slope[k] + (u[k] * slant[k] + under[k]) + more[k];
        *(uint2*)(dx + start + i * PLACES * DEPTH) = uint2{packed(u[0], u[1]), packed(u[2], u[3])};
    }
}
