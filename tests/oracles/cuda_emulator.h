// Runs one CUDA kernel on a CPU, thread by thread: what the tests hold a .cu file to without a GPU.
//
// Every CUDA thread is a fiber; the threads of a warp or of a block meet where the hardware makes them meet. Only what
// the kernels of `emoe.kernels` use is here. Include this file first, then the kernel, then call `launch`.

#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#define EMULATED 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)

struct Index { int x, y, z; };
struct float2 { float x, y; };
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
constexpr int SHARED = 227 * 1024;  // bytes that a block may have on Hopper
uint32_t limit = SHARED;            // bytes that this one has

alignas(1024) unsigned char memory[SHARED];
Index threadIdx, blockIdx, gridDim;

namespace emulator {
struct Meeting { int here = 0, turn = 0; };
struct Copy { uint32_t to; const void* from; int bytes; };
struct Bulk { uint32_t here; void* there; int bytes; };
struct Barrier { int turn = 0, expected = 0, asked = 0; bool told = false; std::vector<Bulk> copies; };
struct Product { float* c; const uint32_t* a; uint64_t b; int keep; bool by_rows; };
// Work that runs beside a thread: it is done as late as the hardware may do it, when its group is waited for.
template <class Work>
struct Groups {
    std::vector<std::vector<Work>> open = std::vector<std::vector<Work>>(1);  // the last one is not ended yet
    template <class Do>
    void wait(int left, Do perform) {
        while ((int)open.size() > left + 1) {
            for (auto& work : open.front()) perform(work);
            open.erase(open.begin());
        }
    }
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    Groups<Copy> copies;
    Groups<Product> products;
    Groups<Bulk> stores;
};
struct Warp { Meeting meeting; uint32_t address[32], a[32][4]; };

std::vector<Fiber> fibers;
std::vector<Warp> warps;
Meeting block;
std::map<uint32_t, Barrier> barriers;
ucontext_t scheduler;
int current;
const std::function<void()>* body;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }
inline void meet(Meeting& meeting, int count) {
    int turn = meeting.turn;
    if (++meeting.here == count) {
        meeting.here = 0;
        ++meeting.turn;
    } else
        while (meeting.turn == turn) yield();
}
inline Warp& warp() { return warps[threadIdx.x / 32]; }
inline void enter() {
    (*body)();
    fibers[current].done = true;
}

inline float widened(uint16_t bits) {
#if BFLOAT
    uint32_t wide = (uint32_t)bits << 16;
    float out;
    memcpy(&out, &wide, 4);
    return out;
#else
    int exponent = bits >> 10 & 31, digits = bits & 1023;
    float size = exponent == 31  ? (digits ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp((float)digits, -24)
                                 : std::ldexp((float)(1024 + digits), exponent - 25);
    return bits >> 15 ? -size : size;
#endif
}
inline uint16_t narrowed(float value) {
#if BFLOAT
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, ties to even
#else
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    float size = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    if (size < std::ldexp(1.f, -14)) return sign | (uint16_t)std::nearbyint(std::ldexp(size, 24));
    int exponent;
    float digits = std::nearbyint(std::ldexp(std::frexp(size, &exponent), 11));  // 1024 to 2048
    return sign | (uint16_t)(((exponent + 14) << 10) + (int)digits - 1024);
#endif
}
inline float part(uint32_t word, int which) { return widened((uint16_t)(which ? word >> 16 : word & 0xffff)); }
inline const unsigned char* inside(uint32_t address, int bytes) {
    if (address % bytes || address + bytes > limit) {
        fprintf(stderr, "shared memory: %d bytes at %u\n", bytes, address);
        abort();
    }
    return memory + address;
}

inline void launch(int grid_x, int grid_y, int grid_z, int threads, int shared, const std::function<void()>& kernel) {
    limit = (uint32_t)shared;
    body = &kernel;
    gridDim = {grid_x, grid_y, grid_z};
    for (int z = 0; z < grid_z; ++z)
      for (int y = 0; y < grid_y; ++y)
        for (int x = 0; x < grid_x; ++x) {
            memset(memory, 0x7f, SHARED);  // numbers that were never written must not count: NaN in both precisions
            fibers.assign(threads, {});
            warps.assign(threads / 32, {});
            block = {};
            barriers.clear();
            for (auto& fiber : fibers) {
                fiber.stack.resize(1 << 17);
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = fiber.stack.data();
                fiber.context.uc_stack.ss_size = fiber.stack.size();
                fiber.context.uc_link = &scheduler;
                makecontext(&fiber.context, enter, 0);
            }
            for (bool running = true; running;) {
                running = false;
                for (current = 0; current < threads; ++current) {
                    if (fibers[current].done) continue;
                    threadIdx = {current, 0, 0};
                    blockIdx = {x, y, z};
                    swapcontext(&scheduler, &fibers[current].context);
                    running = true;
                }
            }
        }
}
}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block, (int)emulator::fibers.size()); }
inline uint32_t shared_address(const void* p) { return (uint32_t)((const unsigned char*)p - memory); }
inline emulator::Fiber& here() { return emulator::fibers[emulator::current]; }
inline void copy8(uint32_t to, const void* from) { here().copies.open.back().push_back({to, from, 8}); }
inline void copy16(uint32_t to, const void* from) { here().copies.open.back().push_back({to, from, 16}); }
inline void end_copies() { here().copies.open.emplace_back(); }
inline void show() {}
inline void __syncwarp() { emulator::meet(emulator::warp().meeting, 32); }
template <int LEFT>
inline void wait_copies() {
    here().copies.wait(LEFT, [](const emulator::Copy& copy) {
        memcpy((unsigned char*)emulator::inside(copy.to, copy.bytes), copy.from, copy.bytes);
    });
}

inline unsigned char* many(uint32_t at, const void* there, int bytes) {
    if (at % 16 || bytes % 16 || (uintptr_t)there % 16 || bytes <= 0 || at + bytes > limit) {
        fprintf(stderr, "copy engine: %d bytes at %u\n", bytes, at);
        abort();
    }
    return memory + at;
}
inline void make_barrier(uint32_t at) { emulator::barriers[at] = {}; }
inline void expect(uint32_t barrier, int bytes) {
    auto& found = emulator::barriers.at(barrier);
    if (found.told) abort();  // one turn after the other
    found.told = true;
    found.expected = bytes;
}
inline void copy_many(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    many(to, from, bytes);
    auto& found = emulator::barriers.at(barrier);
    found.asked += bytes;
    found.copies.push_back({to, (void*)from, bytes});
}
inline void wait_turn(uint32_t barrier, int turn) {
    auto& found = emulator::barriers.at(barrier);
    while (found.turn % 2 == turn) {
        if (found.told && found.asked == found.expected) {
            for (auto& copy : found.copies) memcpy(many(copy.here, copy.there, copy.bytes), copy.there, copy.bytes);
            int next = found.turn + 1;
            found = {};
            found.turn = next;
        } else
            emulator::yield();
    }
}
inline void store_many(void* to, uint32_t from, int bytes) { here().stores.open.back().push_back({from, to, bytes}); }
inline void end_stores() { here().stores.open.emplace_back(); }
inline void wait_stores() {
    here().stores.wait(0, [](const emulator::Bulk& store) {
        memcpy(store.there, many(store.here, store.there, store.bytes), store.bytes);
    });
}

template <bool TRANSPOSED>
inline void load_matrices(uint32_t (&out)[4], uint32_t at) {
    auto& warp = emulator::warp();
    int lane = threadIdx.x % 32;
    warp.address[lane] = at;
    emulator::meet(warp.meeting, 32);
    for (int i = 0; i < 4; ++i) {
        if (TRANSPOSED) {
            uint16_t low, high;
            memcpy(&low, emulator::inside(warp.address[8 * i + lane % 4 * 2], 16) + lane / 4 * 2, 2);
            memcpy(&high, emulator::inside(warp.address[8 * i + lane % 4 * 2 + 1], 16) + lane / 4 * 2, 2);
            out[i] = low | (uint32_t)high << 16;
        } else
            memcpy(&out[i], emulator::inside(warp.address[8 * i + lane / 4], 16) + lane % 4 * 4, 4);
    }
    emulator::meet(warp.meeting, 32);
}

inline void begin_products() {}
inline void end_products() { here().products.open.emplace_back(); }
template <bool BY_ROWS>
inline void multiply(float (&c)[36], const uint32_t (&a)[4], uint64_t b, int keep) {
    here().products.open.back().push_back({c, a, b, keep, BY_ROWS});
}
template <int LEFT>
inline void wait_products() {
    here().products.wait(LEFT, [](const emulator::Product& product) {
        auto& warp = emulator::warp();
        int lane = threadIdx.x % 32;
        memcpy(warp.a[lane], product.a, 16);
        emulator::meet(warp.meeting, 32);
        uint32_t at = (product.b & 0x3fff) << 4;
        uint32_t square = (product.b >> 16 & 0x3fff) << 4, group = (product.b >> 32 & 0x3fff) << 4;
        if (product.b >> 62 != 3 || at % 256) abort();  // a swizzle of 32 bytes
        for (int i = 0; i < 36; ++i) {
            int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float total = product.keep ? product.c[i] : 0;
            for (int k = 0; k < 16; ++k) {
                int line = product.by_rows ? k : column, entry = product.by_rows ? column : k;
                uint32_t there = at + line / 8 * group + entry / 16 * square + line % 8 * 32 + entry % 16 / 8 * 16;
                uint16_t b;
                memcpy(&b, emulator::inside(there ^ (there >> 3 & 16), 16) + entry % 8 * 2, 2);
                total += emulator::part(warp.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * emulator::widened(b);
            }
            product.c[i] = total;
        }
        emulator::meet(warp.meeting, 32);
    });
}
inline uint32_t packed(float low, float high) {
    return emulator::narrowed(low) | (uint32_t)emulator::narrowed(high) << 16;
}
inline float unpacked(uint16_t value) { return emulator::widened(value); }
inline float power_of_2(float x) { return std::exp2(x); }
inline float inverse(float x) { return 1 / x; }
