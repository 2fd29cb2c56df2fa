// What the kernels here ask of a Hopper GPU: copies into shared memory, and products of matrices by warpgroups,
// four warps at once, that run beside everything else.
//
// `tests/oracles/cuda_emulator.h` gives the same functions on a CPU, which is how the kernels are tested without a GPU.
// BFLOAT says which half precision is meant, bfloat16 or float16.

#pragma once

typedef unsigned short half_bits;
typedef unsigned int word;
typedef unsigned long long descriptor;

constexpr int CHANNELS = 72;           // of one product's result, and of what a block reads at each position
constexpr int EIGHTS = CHANNELS / 8;   // 16 bytes are eight channels of a position, the unit of all that follows
constexpr int ROW = 2 * CHANNELS;      // bytes of a position: 9 * 16, so that eight positions lie in different banks

// A matrix in shared memory that products read lies in squares: 8 rows of 16 numbers, 32 bytes. In the last four rows
// the two halves have changed places, which is what the hardware calls a swizzle of 32 bytes. A row of 72 numbers has
// five squares, of the last one half. Copies of whole rows keep 32 bytes together, as the second-level cache does.
constexpr int SQUARE = 256, GROUP = 5 * SQUARE;  // bytes of eight rows of 16 and of 72 numbers
__device__ __forceinline__ constexpr int half_of(int row, int half) { return row % 8 * 32 + (half ^ (row / 4 % 2)) * 16; }
__device__ __forceinline__ constexpr int in_squares(int row, int eight) {
    return row / 8 * GROUP + eight / 2 * SQUARE + half_of(row, eight % 2);
}
// The order of copies of the first 64 of 72 numbers, eight at a time: a warp has 4 rows, and 8 threads fill 128 bytes.
__device__ __forceinline__ constexpr int row_of(int i) { return i / 32 * 4 + i / 2 % 4; }
__device__ __forceinline__ constexpr int eight_of(int i) { return i / 8 % 4 * 2 + i % 2; }

#ifndef EMULATED
__device__ __forceinline__ word shared_address(const void* p) { return (word)__cvta_generic_to_shared(p); }

// 8 or 16 bytes into shared memory; they are there when their group has been waited for.
__device__ __forceinline__ void copy8(word to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(word to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
// What this thread has written becomes visible to products and to the copy engine, after a barrier that follows.
__device__ __forceinline__ void show() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Many bytes at once, by the copy engine. A barrier in shared memory has turns: in each one thread says how many bytes
// it is to expect, and whoever waits for the turn (0, 1, 0, ...) sees them all.
__device__ __forceinline__ void make_barrier(word at) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(at) : "memory");
}
__device__ __forceinline__ void expect(word barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_many(word to, const void* from, int bytes, word barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_turn(word barrier, int turn) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}\n" ::"r"(barrier), "r"(turn) : "memory");
}
// And out of shared memory; what is to leave must have been shown. `wait_stores`: all has been read.
__device__ __forceinline__ void store_many(void* to, word from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Four 8x8 matrices; lane 8 i + j gives the address of row j of matrix i.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(word (&out)[4], word at) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at) : "memory");
}

#if BFLOAT
#define KIND "bf16"
#else
#define KIND "f16"
#endif
// Products of a group run one after the other, beside what follows; registers and shared memory that they read must
// stay as they are until the group has been waited for.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// c (64, 72) = c * keep + a (64, 16) b (16, 72): a in the registers of four warps, 16 rows each, b in squares. With
// BY_ROWS rows of squares are rows of b, otherwise its columns.
template <bool BY_ROWS>
__device__ __forceinline__ void multiply(float (&c)[36], const word (&a)[4], descriptor b, int keep) {
#define C(i) "+f"(c[i])
#define C4(i) C(i), C(i + 1), C(i + 2), C(i + 3)
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %41, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32." KIND "." KIND " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31,%32,%33,%34,%35}, {%36,%37,%38,%39}, %40, keep, 1, 1, %42;\n}\n"
        : C4(0), C4(4), C4(8), C4(12), C4(16), C4(20), C4(24), C4(28), C4(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(BY_ROWS ? 1 : 0));
#undef C4
#undef C
}

// Two numbers in one word, the first in its low half; and one of them back.
__device__ __forceinline__ word packed(float low, float high) {
    word out;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
__device__ __forceinline__ float unpacked(half_bits value) {
    float out;
#if BFLOAT
    out = __uint_as_float((word)value << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
#endif
    return out;
}
#undef KIND

// 2^x and 1 / x, to about the last bit.
__device__ __forceinline__ float power_of_2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ float inverse(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
#endif

// Zeros into 16 bytes of shared memory.
__device__ __forceinline__ void clear16(unsigned char* at) { *(uint4*)at = uint4{0, 0, 0, 0}; }

// b of a product: where its first square lies, and how far from each other squares are along rows and groups of rows.
__device__ __forceinline__ descriptor described(word at, int square, int group) {
    return (descriptor)(at >> 4 & 0x3fff) | (descriptor)(square >> 4) << 16 | (descriptor)(group >> 4) << 32 |
           (descriptor)3 << 62;
}
