// SiLU((1 + s) (gamma norm(x + bias) + beta) + h) of a channels_last map in half precision, s and h being the halves of
// the row's film; see `maps.norm_silu`. What a block reads stays in its registers between statistics and result.
//
// blockIdx.x is the row, blockIdx.y says which channels. Given when this is compiled: what `norms.cuh` wants, HAS_BIAS.

#include "norms.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
norm_silu(const half_bits* __restrict__ x, const float* __restrict__ bias, const float* __restrict__ gamma,
          const float* __restrict__ beta, const half_bits* __restrict__ film, half_bits* __restrict__ y,
          float* __restrict__ stats, int film_stride) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int quad = threadIdx.x % QUADS * 4, first = blockIdx.y * WIDTH;
    const long long row = (long long)blockIdx.x * P * DEPTH + first, start = row + threadIdx.x / QUADS * DEPTH + quad;
    uint2 held[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) held[i] = *(const uint2*)(x + start + i * PLACES * DEPTH);

    // Sums of distances from the first position: the difference of two large numbers would lose the variance.
    float origin[4], once[4] = {0, 0, 0, 0}, twice[4] = {0, 0, 0, 0};
    unpacked4(origin, *(const uint2*)(x + row + quad));
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float u[4];
        unpacked4(u, held[i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u[k] -= origin[k];
            once[k] += u[k];
            twice[k] += u[k] * u[k];
        }
    }
    const float* const total = summed(memory, once, twice);
    float* const centres = (float*)(memory + SUMS);
    float* const spreads = centres + WIDTH;
    float* const scales = spreads + WIDTH;
    float* const shifts = scales + WIDTH;
    const int c = threadIdx.x, channel = first + c;
    float added = 0;
    if (c < WIDTH) {
        const float centre = total[c] / P;
        if (HAS_BIAS) added = bias[channel];
        centres[c] = centre + unpacked(x[row + c]) + added;
        spreads[c] = total[WIDTH + c] / P - centre * centre;
    }
    __syncthreads();
    if (c < WIDTH) {
        const float mean = of_group(centres, c) / EACH;
        float variance = 0;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const float centre = centres[c / EACH * EACH + k] - mean;
            variance += spreads[c / EACH * EACH + k] + centre * centre;
        }
        const float rstd = 1 / sqrtf(variance / EACH + 1e-5f);
        float* const kept = stats + (long long)blockIdx.x * 3 * DEPTH + channel;
        kept[0] = mean - added;  // of x without its bias
        kept[DEPTH] = rstd;
        kept[2 * DEPTH] = centres[c] - mean;
        const Affine after = affine_of(gamma, beta, film + (long long)blockIdx.x * film_stride, channel);
        scales[c] = after.scale * rstd;
        shifts[c] = after.shift - (mean - added) * (after.scale * rstd);
    }
    __syncthreads();
    float scale[4], shift[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        scale[k] = scales[quad + k];
        shift[k] = shifts[quad + k];
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float z[4];
        unpacked4(z, held[i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            z[k] = z[k] * scale[k] + shift[k];
            z[k] *= sigmoid(z[k]);
        }
        *(uint2*)(y + start + i * PLACES * DEPTH) = uint2{packed(z[0], z[1]), packed(z[2], z[3])};
    }
}
