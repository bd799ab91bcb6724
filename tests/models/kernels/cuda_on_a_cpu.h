// Runs CUDA kernels on a CPU, slowly: a fiber per thread. Warps and blocks wait for each other where a GPU's would.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define ON_A_CPU
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads, blocks)
#define SHARED_MEMORY(name) uint4* name = (uint4*)shared_memory()
#define threadIdx (Place{current->thread, 0})
#define blockIdx (Place{current->block % columns, current->block / columns})
#define gridDim (Place{columns, rows_of_blocks})

typedef uint32_t u32;
typedef uint16_t u16;
struct uint4 { uint32_t x, y, z, w; };
struct Place { int x, y; };
struct Meeting { int arrived = 0; long number = 0; };
struct Warp : Meeting { uint32_t given[32][6]; };
struct Block : Meeting { std::vector<uint4> shared; Warp warps[16]; };
struct Fiber { ucontext_t context; jmp_buf place; int thread, block; bool started = false, done = false; std::vector<char> stack; };

static constexpr int BLOCK = 512;
static int columns, rows_of_blocks;
static Fiber* current;
static jmp_buf scheduler;
static std::vector<Block>* blocks_of_grid;
static std::function<void()> kernel;

inline Block& my_block() { return (*blocks_of_grid)[current->block]; }
inline Warp& my_warp() { return my_block().warps[current->thread / 32]; }
inline int my_lane() { return current->thread % 32; }
inline char* shared_memory() { return (char*)my_block().shared.data(); }
// Fibers are changed by jumps: swapcontext asks the system twice, which would be most of the time.
inline void pause() { if (!_setjmp(current->place)) _longjmp(scheduler, 1); }
inline void resume() {
    if (_setjmp(scheduler)) return;
    if (current->started) _longjmp(current->place, 1);
    current->started = true;
    setcontext(&current->context);
}
inline void meet(Meeting& meeting, int members) {
    const long number = meeting.number;
    if (++meeting.arrived == members) meeting.arrived = 0, meeting.number++;
    else while (meeting.number == number) pause();
}
inline void __syncwarp() { meet(my_warp(), 32); }
inline void __syncthreads() { meet(my_block(), BLOCK); }
inline unsigned long long load_for_all(const unsigned long long* at) { return *(volatile const unsigned long long*)at; }
inline void store_for_all(unsigned long long* at, unsigned long long value) { *at = value; }
inline void fetch(uint4* to, const uint4* from) { *to = *from; }
inline void close_fetches() {}
template <int open> inline void wait_for_fetches() {}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint32_t part_of(const uint4& four, int i) { return (&four.x)[i]; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline uint32_t shared_address(const void* at) { return (uint32_t)((const char*)at - shared_memory()); }
inline uint32_t bits(float value) { uint32_t found; memcpy(&found, &value, 4); return found; }
inline float of_bits(uint32_t value) { float found; memcpy(&found, &value, 4); return found; }
inline float number(uint16_t half) { const uint32_t all = (uint32_t)half << 16; float value; memcpy(&value, &all, 4); return value; }
inline uint32_t bf16(float value) { return value != value ? 0x7fff : (bits(value) + 0x7fff + (bits(value) >> 16 & 1)) >> 16; }
inline uint32_t pack(float low, float high) { return bf16(low) | bf16(high) << 16; }
inline uint32_t pack_relu(float low, float high) { return pack(low <= 0 ? 0 : low, high <= 0 ? 0 : high); }

inline float shuffle(float value, int step) {
    my_warp().given[my_lane()][0] = bits(value);
    __syncwarp();
    float found;
    memcpy(&found, &my_warp().given[my_lane() ^ step][0], 4);
    __syncwarp();
    return found;
}

// Tell the warp an address of 16 bytes in shared memory, and find the addresses of all lanes.
inline void give_address(uint32_t address) {
    if (address % 16 || address + 16 > my_block().shared.size() * 16) printf("address %u is outside\n", address), abort();
    my_warp().given[my_lane()][0] = address;
    __syncwarp();
}
inline char* row_of(int lane) { return shared_memory() + my_warp().given[lane][0]; }
inline void load_matrices(uint32_t (&to)[4], uint32_t address) {
    give_address(address);
    for (int i = 0; i < 4; i++) memcpy(&to[i], row_of(i * 8 + my_lane() / 4) + my_lane() % 4 * 4, 4);
    __syncwarp();
}
inline void load_transposed(uint32_t (&to)[4], uint32_t address) {
    give_address(address);
    for (int i = 0; i < 8; i++) memcpy((uint16_t*)to + i, row_of(i / 2 * 8 + my_lane() % 4 * 2 + i % 2) + my_lane() / 4 * 2, 2);
    __syncwarp();
}
inline void store_matrices(uint32_t address, const uint32_t (&from)[4]) {
    give_address(address);
    for (int i = 0; i < 4; i++) memcpy(row_of(i * 8 + my_lane() / 4) + my_lane() % 4 * 4, &from[i], 4);
    __syncwarp();
}
inline void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto& given = my_warp().given;
    const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(given[my_lane()], mine, sizeof mine);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int row = my_lane() / 4 + i / 2 * 8, column = my_lane() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const uint32_t left = given[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], right = given[column * 4 + k % 8 / 2][4 + k / 8];
            sum[i] += number(left >> k % 2 * 16) * number(right >> k % 2 * 16);
        }
    }
    __syncwarp();
}

static void run_fiber() {
    kernel();
    current->done = true;
    pause();
}

static void launch(int width, int height, int shared_bytes, std::function<void()> body) {
    columns = width, rows_of_blocks = height, kernel = body;
    std::vector<Block> blocks(width * height);
    const uint32_t nan = 0x7fc07fc0;  // memory is not zero at the start
    for (Block& block : blocks) block.shared.assign((shared_bytes + 15) / 16, uint4{nan, nan, nan, nan});
    blocks_of_grid = &blocks;
    std::vector<Fiber> fibers(blocks.size() * BLOCK);
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber& fiber = fibers[i];
        fiber.thread = i % BLOCK, fiber.block = i / BLOCK, fiber.stack.resize(32768);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool running = true; running;) {
        running = false;
        for (size_t first = 0; first < fibers.size(); first += 32) {
            const long& meetings = blocks[fibers[first].block].warps[fibers[first].thread / 32].number;
            for (long before = -1; before != meetings;) {  // a warp goes on until it waits for others
                before = meetings;
                for (size_t i = first; i < first + 32; i++)
                    if (!fibers[i].done) running = true, current = &fibers[i], resume();
            }
        }
    }
}
