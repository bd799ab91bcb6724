// All layers of one stage of a CIFAR ResNet in training, in one launch: relu(batch_norm(convolution) + shortcut), layer
// after layer, and their gradients. `resnet_training.py` builds each KERNEL (0 to 4) with the macros CHANNELS, WIDTH, ROWS
// and HALF, and launches `forward` and `backward` cooperatively: every block runs at the same time as all others.
//
// A block computes two images, whose activations stay in shared memory. What batch norm needs of all images crosses the
// GPU through `pairs`: each block publishes two numbers per channel and reads those of all blocks, in the same order, so
// that every block computes the same bits. A pair carries its own signal that it is there: see `publish`.
//
// A buffer is [2 images][planes of 8 channels][pixels] as in `resnet_stage.cu`. A warp computes ROWS rows of 16 pixels
// (of 8 pixels of both images where a row has 8) and 16 channels out. A thread holds [ROWS][2 tiles of 8 channels][4]
// numbers of them; what only this kernel reads again is stored in this order, as [ROWS][threads] of 16 bytes.

typedef unsigned long long u64;

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int PLANES = CHANNELS / 8, PITCH = WIDTH + 1, PIXELS = (WIDTH + 2) * PITCH + 1, BUFFER = 2 * PLANES * PIXELS;
constexpr int GROUPS = CHANNELS / 16, COLUMNS = WIDTH < 16 ? 1 : WIDTH / 16, BANDS = WIDTH / ROWS;
constexpr int STEPS = CHANNELS / 16, PHASES = 3 * STEPS, LAYER = PHASES * 3 * 32;  // 16 bytes of weights of a group
constexpr int PIXEL = 16, ROW = PITCH * PIXEL, PLANE = PIXELS * PIXEL;             // bytes
constexpr int COUNT = WIDTH * WIDTH * PLANES;                                      // 16 bytes of an image
constexpr int PARTS = THREADS / CHANNELS, MOST = 160 / PARTS, MERGE = 2 * CHANNELS + 2;  // at most 160 blocks
constexpr int MASKS = ROWS * 8 / 32 > 0 ? ROWS * 8 / 32 : 1;
static_assert(GROUPS * COLUMNS * BANDS * (WIDTH == 8 ? 1 : 2) == WARPS, "warps must cover two images");

#ifndef ON_A_CPU  // where tests emulate these
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ u32 part_of(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }
__device__ __forceinline__ float shuffle(float value, int step) { return __shfl_xor_sync(~0u, value, step); }
__device__ __forceinline__ u64 load_for_all(const u64* at) { u64 v; asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory"); return v; }
__device__ __forceinline__ void store_for_all(u64* at, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(at), "l"(v) : "memory"); }
__device__ __forceinline__ u32 bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float of_bits(u32 value) { return __uint_as_float(value); }
__device__ __forceinline__ void pause() {}
#define SHARED_MEMORY(name) extern __shared__ uint4 name[]
__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void fetch(uint4* to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void close_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int open> __device__ __forceinline__ void wait_for_fetches() { asm volatile("cp.async.wait_group %0;" :: "n"(open) : "memory"); }
#endif

__device__ __forceinline__ int position(int row, int column) { return (row + 1) * PITCH + column + 1; }

// The sums of a 3x3 convolution at the pixels of this warp. `next` holds the weights of the first phase.
__device__ __forceinline__ void convolve(float (&sums)[ROWS][2][4], u32 source, const uint4* weight, uint4 (&next)[3]) {
#pragma unroll
    for (int i = 0; i < ROWS * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll 1
    for (int phase = 0; phase < PHASES; phase++) {  // a column of taps, and 16 channels in
        const uint4 now[3] = {next[0], next[1], next[2]};
        weight += 96;
        if (phase + 1 < PHASES) next[0] = weight[0], next[1] = weight[32], next[2] = weight[64];
        const u32 from = source + phase / STEPS * PIXEL + phase % STEPS * 2 * PLANE;
        u32 input[2][4];
        load_matrices(input[0], from);
#pragma unroll
        for (int row = 0; row < ROWS + 2; row++) {
            if (row < ROWS + 1) load_matrices(input[(row + 1) % 2], from + (row + 1) * ROW);
#pragma unroll
            for (int tap = 0; tap < 3; tap++)
                if (row - tap >= 0 && row - tap < ROWS) {
                    multiply(sums[row - tap][0], input[row % 2], now[tap].x, now[tap].y);
                    multiply(sums[row - tap][1], input[row % 2], now[tap].z, now[tap].w);
                }
        }
    }
}

// Two images [WIDTH][WIDTH][CHANNELS] into a buffer, or back.
__device__ __forceinline__ void read_images(uint4* buffer, const uint4* from, int images = 2) {
    for (int i = threadIdx.x; i < images * COUNT; i += THREADS) {
        const int pixel = i / PLANES % (WIDTH * WIDTH), plane = i % PLANES + i / COUNT * PLANES;
        buffer[plane * PIXELS + position(pixel / WIDTH, pixel % WIDTH)] = from[(size_t)blockIdx.x * 2 * COUNT + i];
    }
}

__device__ __forceinline__ void write_images(uint4* to, const uint4* buffer, int images = 2) {
    for (int i = threadIdx.x; i < images * COUNT; i += THREADS) {
        const int pixel = i / PLANES % (WIDTH * WIDTH), plane = i % PLANES + i / COUNT * PLANES;
        to[(size_t)blockIdx.x * 2 * COUNT + i] = buffer[plane * PIXELS + position(pixel / WIDTH, pixel % WIDTH)];
    }
}

__device__ __forceinline__ float half_of(u32 both, int e) { return number(both >> 16 * e & 0xffff); }

// What a warp computes, in the order of its threads: read from a buffer; with what a shortcut takes back added; and the
// gradients of x and the shortcut written at the end.
__device__ __forceinline__ void read_numbers(float (&sums)[ROWS][2][4], u32 at) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        u32 values[4];
        load_matrices(values, at + row * ROW);
#pragma unroll
        for (int i = 0; i < 8; i++) sums[row][i / 4][i % 4] = half_of(values[i / 2], i % 2);
    }
}

__device__ __forceinline__ void add_carried(float (&sums)[ROWS][2][4], const uint4* carried) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const uint4 more = carried[row * THREADS + threadIdx.x];
#pragma unroll
        for (int i = 0; i < 8; i++) sums[row][i / 4][i % 4] += half_of(part_of(more, i / 2), i % 2);
    }
}

__device__ __forceinline__ void write_gradients(const float (&sums)[ROWS][2][4], const uint4* carried, u32 at, uint4* memory,
                                                uint4* for_x, uint4* for_shortcut, int has_shortcut, int images) {
    for (int output = 0; output < 1 + has_shortcut; output++) {
        __syncthreads();
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const uint4 more = carried[row * THREADS + threadIdx.x];
            u32 result[4];
#pragma unroll
            for (int m = 0; m < 4; m++)
                result[m] = output ? part_of(more, m) : pack(sums[row][m / 2][m % 2 * 2], sums[row][m / 2][m % 2 * 2 + 1]);
            store_matrices(at + row * ROW, result);
        }
        __syncthreads();
        write_images(output ? for_shortcut : for_x, memory, images);
    }
}

// Blocks exchange pairs [2][blocks][CHANNELS], in turn by the first index. The two lowest bits of a pair's second number
// are 1, 2 or 3 by the number of the exchange: a reader waits until it finds them. They are 0 at first.
__device__ __forceinline__ u32 tag_of(int exchange) { return 1 + exchange / 2 % 3; }

__device__ __forceinline__ void publish(u64* pairs, int exchange, int c, float first, float second) {
    const u32 tagged = (bits(second) & ~3u) | tag_of(exchange);
    store_for_all(pairs + (exchange % 2 * gridDim.x + blockIdx.x) * CHANNELS + c, (u64)tagged << 32 | bits(first));
}

// The pairs of channel threadIdx.x % CHANNELS from the blocks part, part + PARTS, ...; returns how many there are.
__device__ __forceinline__ int receive(float (&first)[MOST], float (&second)[MOST], const u64* pairs, int exchange) {
    const int c = threadIdx.x % CHANNELS, part = threadIdx.x / CHANNELS, count = (gridDim.x - part + PARTS - 1) / PARTS;
    const u32 tag = tag_of(exchange);
    const u64* from = pairs + (exchange % 2 * gridDim.x + part) * CHANNELS + c;
    u64 got[MOST];
#pragma unroll
    for (int i = 0; i < MOST; i++) got[i] = i < count ? 0 : (u64)tag << 32;
    // One at first: asking for all again and again would take bandwidth from the blocks that are not there yet.
    while ((got[0] >> 32 & 3) != tag) got[0] = load_for_all(from), pause();
    for (bool missing = true; missing;) {
        missing = false;
#pragma unroll
        for (int i = 1; i < MOST; i++)
            if ((got[i] >> 32 & 3) != tag) got[i] = load_for_all(from + i * PARTS * CHANNELS);
#pragma unroll
        for (int i = 1; i < MOST; i++) missing |= (got[i] >> 32 & 3) != tag;
        if (missing) pause();
    }
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        first[i] = i < count ? of_bits((u32)got[i]) : 0;
        second[i] = i < count ? of_bits((u32)(got[i] >> 32) & ~3u) : 0;
    }
    return count;
}

// The two numbers of thread part * CHANNELS + c go to thread c * PARTS + part, so that those of a channel are in one warp.
__device__ __forceinline__ void by_channel(float* merge, float& one, float& other) {
    float* to = merge + threadIdx.x / CHANNELS * MERGE + threadIdx.x % CHANNELS * 2;
    to[0] = one, to[1] = other;
    __syncthreads();
    const float* from = merge + threadIdx.x % PARTS * MERGE + threadIdx.x / PARTS * 2;
    one = from[0], other = from[1];
}

__device__ __forceinline__ float sum_of_parts(float value) {
#pragma unroll
    for (int step = 1; step < PARTS; step *= 2) value += shuffle(value, step);
    return value;
}

#if !defined(KERNEL) || KERNEL == 0
// x [n][WIDTH][WIDTH][CHANNELS] and, if has_shortcut, what the first layer adds; weights [GROUPS][layers][PHASES][3][32
// lanes] of 16 bytes. Writes the outputs of all layers outs [layers][n][WIDTH][WIDTH][CHANNELS]; for `backward`, the
// convolutions ys [layers][blocks][ROWS][THREADS] of 16 bytes and masks [layers][blocks][MASKS][THREADS] of open ReLUs;
// and statistics [layers][3][CHANNELS]: mean, 1 / sqrt(variance + epsilon), unbiased variance.
// pairs: see `publish`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const uint4* x, const uint4* shortcut, const uint4* weights, const float* gammas, const float* betas,
        uint4* outs, uint4* ys, u32* masks, float* statistics, u64* pairs, int layers, int has_shortcut,
        float epsilon) {
    SHARED_MEMORY(memory);
    const u32 shared = shared_address(memory);
    float* scratch = (float*)(memory + 2 * BUFFER);  // [WARPS][16][2]
    float* merge = scratch + WARPS * 32;             // [PARTS][MERGE]
    float* factors = merge + PARTS * MERGE;          // [2][CHANNELS]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, blocks = gridDim.x;
    const int group = warp % GROUPS, column = warp / GROUPS % COLUMNS, rest = warp / (GROUPS * COLUMNS);
    const int top = rest % BANDS * ROWS, image = rest / BANDS;

    for (int i = threadIdx.x; i < 2 * BUFFER; i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    read_images(memory + has_shortcut * BUFFER, x);
    if (has_shortcut) read_images(memory, shortcut);

    const u32 offset = shared + (lane % 8) * PIXEL + matrix / 2 * PLANE + matrix % 2 * (WIDTH == 8 ? PLANES * PLANE : 8 * PIXEL)
                       + image * PLANES * PLANE + (top * PITCH + column * 16) * PIXEL;
    const uint4* weight = weights + (size_t)group * layers * LAYER + lane;
    uint4 next[3] = {weight[0], weight[32], weight[64]};
    const size_t outputs = (size_t)blocks * 2 * COUNT;

    for (int layer = 0; layer < layers; layer++) {
        // Even layers of a stage read the first buffer, odd ones the second, and add what they overwrite.
        const int place = layer + has_shortcut;
        const bool adds = place % 2 == 1;
        const u32 source = offset + (place & 1) * BUFFER * PIXEL;
        const u32 target = offset + (~place & 1) * BUFFER * PIXEL + ROW + PIXEL + group * 2 * PLANE;
        __syncthreads();
        if (layer > 0) write_images(outs + (layer - 1) * outputs, memory + (place & 1) * BUFFER);

        float sums[ROWS][2][4];
        convolve(sums, source, weight, next);
        if (layer + 1 < layers) {
            weight += LAYER;
            next[0] = weight[0], next[1] = weight[32], next[2] = weight[64];
        }
        u32 y[ROWS][4];
#pragma unroll
        for (int i = 0; i < ROWS * 4; i++) y[i / 4][i % 4] = pack(sums[i / 4][i % 4 / 2][i % 2 * 2], sums[i / 4][i % 4 / 2][i % 2 * 2 + 1]);

        // Means and sums of squared differences from them: of a thread, a warp, the block, all blocks.
#pragma unroll
        for (int k = 0; k < 4; k++) {  // tile k / 2, number k % 2 of a pair
            float mean = 0, apart = 0, count = ROWS * 2;
#pragma unroll
            for (int i = 0; i < ROWS * 2; i++) mean += half_of(y[i / 2][k / 2 * 2 + i % 2], k % 2);
            mean /= count;
#pragma unroll
            for (int i = 0; i < ROWS * 2; i++) {
                const float difference = half_of(y[i / 2][k / 2 * 2 + i % 2], k % 2) - mean;
                apart += difference * difference;
            }
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                const float other = shuffle(mean, step), difference = other - mean;
                apart += shuffle(apart, step) + difference * difference * count / 2;
                mean = (mean + other) / 2, count *= 2;
            }
            if (lane < 4) {
                float* to = scratch + (warp * 16 + k / 2 * 8 + lane * 2 + k % 2) * 2;
                to[0] = mean, to[1] = apart;
            }
        }
        __syncthreads();
        if (threadIdx.x < CHANNELS) {
            const float* from = scratch + threadIdx.x / 16 * 32 + threadIdx.x % 16 * 2;
            float mean = 0, apart = 0;
#pragma unroll
            for (int i = 0; i < WARPS / GROUPS; i++) mean += from[i * GROUPS * 32];
            mean /= WARPS / GROUPS;
#pragma unroll
            for (int i = 0; i < WARPS / GROUPS; i++) {
                const float difference = from[i * GROUPS * 32] - mean;
                apart += from[i * GROUPS * 32 + 1] + difference * difference * (16 * ROWS);
            }
            publish(pairs, layer, threadIdx.x, mean, apart);
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            ys[(((size_t)layer * blocks + blockIdx.x) * ROWS + row) * THREADS + threadIdx.x] = make_uint4(y[row][0], y[row][1], y[row][2], y[row][3]);
        {
            const int c = threadIdx.x / PARTS;
            const float gamma = gammas[layer * CHANNELS + c], beta = betas[layer * CHANNELS + c], count = 2 * WIDTH * WIDTH;
            float means[MOST], aparts[MOST], mean = 0, squares = 0;
            const int received = receive(means, aparts, pairs, layer);
#pragma unroll
            for (int i = 0; i < MOST; i++) mean += means[i];
            mean /= max(received, 1);
#pragma unroll
            for (int i = 0; i < MOST; i++)
                if (i < received) squares += aparts[i] + count * (means[i] - mean) * (means[i] - mean);
            by_channel(merge, mean, squares);
            const float of_part = (blocks - (int)threadIdx.x % PARTS + PARTS - 1) / PARTS;
            const float all = sum_of_parts(mean * of_part) / blocks;
            squares = sum_of_parts(squares + count * of_part * (mean - all) * (mean - all));
            const float inverse = 1 / sqrtf(squares / (count * blocks) + epsilon), factor = gamma * inverse;
            if (threadIdx.x % PARTS == 0) {
                factors[c] = factor, factors[CHANNELS + c] = beta - all * factor;
                if (blockIdx.x == 0) {
                    float* to = statistics + layer * 3 * CHANNELS + c;
                    to[0] = all, to[CHANNELS] = inverse, to[2 * CHANNELS] = squares / (count * blocks - 1);
                }
            }
        }
        __syncthreads();
        u32 open[MASKS] = {0};
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            u32 added[4] = {0}, result[4];
            if (adds) load_matrices(added, target + row * ROW);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const int c = group * 16 + m / 2 * 8 + lane % 4 * 2;
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    value[e] = half_of(y[row][m], e) * factors[c + e] + factors[CHANNELS + c + e] + half_of(added[m], e);
                    const int bit = row * 8 + m * 2 + e;
                    if (value[e] > 0) open[bit / 32] |= 1u << bit % 32;
                }
                result[m] = pack_relu(value[0], value[1]);
            }
            store_matrices(target + row * ROW, result);
        }
#pragma unroll
        for (int i = 0; i < MASKS; i++)
            masks[(((size_t)layer * blocks + blockIdx.x) * MASKS + i) * THREADS + threadIdx.x] = open[i];
    }
    __syncthreads();
    write_images(outs + (layers - 1) * outputs, memory + (layers + has_shortcut) % 2 * BUFFER);
}

#endif

#if !defined(KERNEL) || KERNEL == 1
// gradient [n][WIDTH][WIDTH][CHANNELS] of the last output; ys, masks and statistics from `forward`; weights as there, of
// the transposed convolutions. Writes the gradients of all convolutions' outputs for_ys [layers][n][WIDTH][WIDTH]
// [CHANNELS], of x and the shortcut, and of beta and gamma, totals [layers][2][CHANNELS].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const uint4* gradient, const uint4* ys, const u32* masks, const float* statistics, const float* gammas,
         const uint4* weights, uint4* for_ys, uint4* for_x, uint4* for_shortcut, float* totals, u64* pairs, int layers,
         int has_shortcut) {
    SHARED_MEMORY(memory);
    const u32 shared = shared_address(memory);
    uint4* carried = memory + BUFFER;                          // [ROWS][THREADS], what a shortcut takes back
    uint4* y = carried + ROWS * THREADS;                       // [ROWS][THREADS] of this layer
    float* known = (float*)(y + ROWS * THREADS);               // [4][CHANNELS]: the layer's statistics and gamma
    float* factors = known + 4 * CHANNELS;                     // [4][CHANNELS]
    float* scratch = factors + 4 * CHANNELS;                   // [WARPS][16][2]
    float* merge = scratch + WARPS * 32;                       // [PARTS][MERGE]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, blocks = gridDim.x;
    const int group = warp % GROUPS, column = warp / GROUPS % COLUMNS, rest = warp / (GROUPS * COLUMNS);
    const int top = rest % BANDS * ROWS, image = rest / BANDS;

    for (int i = threadIdx.x; i < BUFFER; i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    read_images(memory, gradient);
    __syncthreads();

    const u32 source = shared + (lane % 8) * PIXEL + matrix / 2 * PLANE + matrix % 2 * (WIDTH == 8 ? PLANES * PLANE : 8 * PIXEL)
                       + image * PLANES * PLANE + (top * PITCH + column * 16) * PIXEL;
    const u32 target = source + ROW + PIXEL + group * 2 * PLANE;
    const uint4* group_weights = weights + (size_t)group * layers * LAYER + lane;
    const uint4* weight = group_weights + (size_t)(layers - 1) * LAYER;
    uint4 next[3] = {weight[0], weight[32], weight[64]};
    const size_t outputs = (size_t)blocks * 2 * COUNT;

    u32 open[MASKS];
    const auto fetch_layer = [&](int layer) {
        const size_t place = (size_t)layer * blocks + blockIdx.x;
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            fetch(y + row * THREADS + threadIdx.x, ys + (place * ROWS + row) * THREADS + threadIdx.x);
        if (threadIdx.x < CHANNELS) {
            const int i = threadIdx.x * 4, of_statistics = 3 * CHANNELS;
            const float* from = i < of_statistics ? statistics + layer * of_statistics + i : gammas + layer * CHANNELS + i - of_statistics;
            fetch((uint4*)(known + i), (const uint4*)from);
        }
        close_fetches();
#pragma unroll
        for (int i = 0; i < MASKS; i++) open[i] = masks[(place * MASKS + i) * THREADS + threadIdx.x];
    };
    fetch_layer(layers - 1);
    float sums[ROWS][2][4];
    read_numbers(sums, target);
    for (int layer = layers - 1; layer >= 0; layer--) {
        const bool adds = (layer + has_shortcut) % 2 == 1;
        wait_for_fetches<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS * 8; i++)
            if (!(open[i / 32] >> i % 32 & 1)) sums[i / 8][i / 4 % 2][i % 4] = 0;
        const float* statistic = known + group * 16 + lane % 4 * 2;
#pragma unroll
        for (int k = 0; k < 4; k++) {  // tile k / 2, number k % 2 of a pair
            const float mean = statistic[k / 2 * 8 + k % 2], inverse = statistic[CHANNELS + k / 2 * 8 + k % 2];
            float first = 0, second = 0;
#pragma unroll
            for (int i = 0; i < ROWS * 2; i++) {
                const float value = sums[i / 2][k / 2][i % 2 * 2 + k % 2];
                first += value;
                second += value * (half_of(part_of(y[i / 2 * THREADS + threadIdx.x], k / 2 * 2 + i % 2), k % 2) - mean);
            }
            second *= inverse;
#pragma unroll
            for (int step = 4; step < 32; step *= 2) first += shuffle(first, step), second += shuffle(second, step);
            if (lane < 4) {
                float* to = scratch + (warp * 16 + k / 2 * 8 + lane * 2 + k % 2) * 2;
                to[0] = first, to[1] = second;
            }
        }
        __syncthreads();
        const int exchange = layers - 1 - layer;
        if (threadIdx.x < CHANNELS) {
            const float* from = scratch + threadIdx.x / 16 * 32 + threadIdx.x % 16 * 2;
            float first = 0, second = 0;
#pragma unroll
            for (int i = 0; i < WARPS / GROUPS; i++) first += from[i * GROUPS * 32], second += from[i * GROUPS * 32 + 1];
            publish(pairs, exchange, threadIdx.x, first, second);
        }
        if (adds)
#pragma unroll
            for (int row = 0; row < ROWS; row++)
                carried[row * THREADS + threadIdx.x] = make_uint4(
                    pack(sums[row][0][0], sums[row][0][1]), pack(sums[row][0][2], sums[row][0][3]),
                    pack(sums[row][1][0], sums[row][1][1]), pack(sums[row][1][2], sums[row][1][3]));
        {
            const int c = threadIdx.x / PARTS;
            float firsts[MOST], seconds[MOST], first = 0, second = 0;
            receive(firsts, seconds, pairs, exchange);
#pragma unroll
            for (int i = 0; i < MOST; i++) first += firsts[i], second += seconds[i];
            by_channel(merge, first, second);
            first = sum_of_parts(first), second = sum_of_parts(second);
            if (threadIdx.x % PARTS == 0) {
                const float mean = known[c], inverse = known[CHANNELS + c], factor = known[3 * CHANNELS + c] * inverse;
                const float count = 2.0f * WIDTH * WIDTH * blocks;
                // The gradient of y is factor * g - slope * (y - mean) - constant.
                factors[c] = factor, factors[CHANNELS + c] = factor * inverse * second / count;
                factors[2 * CHANNELS + c] = mean, factors[3 * CHANNELS + c] = factor * first / count;
                if (blockIdx.x == 0) totals[layer * 2 * CHANNELS + c] = first, totals[(layer * 2 + 1) * CHANNELS + c] = second;
            }
        }
        __syncthreads();
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const uint4 of_row = y[row * THREADS + threadIdx.x];
            u32 result[4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const int c = group * 16 + m / 2 * 8 + lane % 4 * 2;
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++)
                    value[e] = factors[c + e] * sums[row][m / 2][m % 2 * 2 + e] - factors[3 * CHANNELS + c + e]
                               - factors[CHANNELS + c + e] * (half_of(part_of(of_row, m), e) - factors[2 * CHANNELS + c + e]);
                result[m] = pack(value[0], value[1]);
            }
            store_matrices(target + row * ROW, result);
        }
        __syncthreads();
        if (layer > 0) fetch_layer(layer - 1);
        write_images(for_ys + layer * outputs, memory);
        convolve(sums, source, weight, next);
        if (layer > 0) {
            weight -= LAYER;
            next[0] = weight[0], next[1] = weight[32], next[2] = weight[64];
        }
        if (!adds && layer + 1 < layers) add_carried(sums, carried);
    }
    write_gradients(sums, carried, target, memory, for_x, for_shortcut, has_shortcut, 2);
}

#endif

#if !defined(KERNEL) || KERNEL == 2
constexpr int PAIRS = GROUPS * GROUPS, SHARES = WARPS / PAIRS, HEIGHT = WIDTH / (SHARES / COLUMNS);
constexpr int AT_ONCE = WIDTH == 8 ? 2 : 1, IMAGE_BUFFER = AT_ONCE * PLANES * PIXELS;  // images, 16 bytes
constexpr int FETCHED = WIDTH == 32 ? 3 : WIDTH == 16 ? 5 : 4;                          // passes in shared memory

__device__ __forceinline__ void fetch_images(uint4* buffer, const uint4* from) {
#pragma unroll
    for (int i = threadIdx.x; i < AT_ONCE * COUNT; i += THREADS) {
        const int pixel = i / PLANES % (WIDTH * WIDTH), plane = i % PLANES + i / COUNT * PLANES;
        fetch(buffer + plane * PIXELS + position(pixel / WIDTH, pixel % WIDTH), from + i);
    }
}

// Block (split, layer): the gradients of the layer's weights over some of the images, an even number of
// them. A warp takes 16 channels out, 16 channels in, all taps, and a share of the pixels: HEIGHT rows of 16. The layers'
// inputs are x, outs[0], outs[1], ... Writes sums [layers][splits * SHARES][channels out][3][3][channels in].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
weight_gradients(const uint4* x, const uint4* outs, const uint4* for_ys, float* sums, int images) {
    SHARED_MEMORY(memory);  // [FETCHED][layer's inputs, gradients][IMAGE_BUFFER]
    const u32 shared = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8;
    const int out = warp % GROUPS * 16, in = warp / GROUPS % GROUPS * 16, share = warp / PAIRS;
    const int column = share % COLUMNS, top = share / COLUMNS * HEIGHT, split = blockIdx.x, layer = blockIdx.y;
    const size_t outputs = (size_t)images * COUNT;
    const uint4* inputs = layer ? outs + (layer - 1) * outputs : x;
    const uint4* gradients = for_ys + layer * outputs;
    const int passes = images / AT_ONCE, each = (passes + gridDim.x - 1) / gridDim.x;
    const int first = split * each, end = min(first + each, passes);

    for (int i = threadIdx.x; i < FETCHED * 2 * IMAGE_BUFFER; i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    constexpr int SECOND = WIDTH == 8 ? PLANES * PLANE : 8 * PIXEL;  // from the first 8 of 16 pixels to the others
    const u32 corner = shared + (lane % 8) * PIXEL + (top * PITCH + column * 16) * PIXEL;
    const u32 input_at = corner + (in / 8 + matrix / 2) * PLANE + matrix % 2 * SECOND;
    const u32 gradient_at = corner + (out / 8 + matrix % 2) * PLANE + matrix / 2 * SECOND + IMAGE_BUFFER * PIXEL + ROW + PIXEL;
    float totals[9][2][4];
#pragma unroll
    for (int i = 0; i < 72; i++) totals[i / 8][i / 4 % 2][i % 4] = 0;

    const auto fetch_pass = [&](int pass) {
        if (pass < end) {
            uint4* to = memory + pass % FETCHED * 2 * IMAGE_BUFFER;
            fetch_images(to, inputs + (size_t)pass * AT_ONCE * COUNT);
            fetch_images(to + IMAGE_BUFFER, gradients + (size_t)pass * AT_ONCE * COUNT);
        }
        close_fetches();
    };
    for (int pass = first; pass < first + FETCHED - 1; pass++) fetch_pass(pass);
    for (int pass = first; pass < end; pass++) {
        wait_for_fetches<FETCHED - 2>();
        __syncthreads();
        fetch_pass(pass + FETCHED - 1);  // over the pass before, which all have read
        const u32 stage = pass % FETCHED * 2 * IMAGE_BUFFER * PIXEL;
        u32 gradient[3][4];
#pragma unroll
        for (int row = 0; row < HEIGHT + 2; row++) {
            if (row < HEIGHT) load_transposed(gradient[row % 3], gradient_at + stage + row * ROW);
#pragma unroll
            for (int across = 0; across < 3; across++) {
                u32 input[4];
                load_transposed(input, input_at + stage + row * ROW + across * PIXEL);
#pragma unroll
                for (int down = 0; down < 3; down++)
                    if (row - down >= 0 && row - down < HEIGHT) {
                        multiply(totals[down * 3 + across][0], gradient[(row - down) % 3], input[0], input[1]);
                        multiply(totals[down * 3 + across][1], gradient[(row - down) % 3], input[2], input[3]);
                    }
            }
        }
    }
    float* to = sums + ((size_t)(layer * gridDim.x + split) * SHARES + share) * CHANNELS * 9 * CHANNELS + in + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 36; i++) {  // tap, tile, half
        const float* total = &totals[i / 4][i / 2 % 2][i % 2 * 2];
        float* at = to + ((out + lane / 4 + i % 2 * 8) * 9 + i / 4) * CHANNELS + i / 2 % 2 * 8;
        at[0] = total[0], at[1] = total[1];
    }
}
#endif

#if !defined(KERNEL) || KERNEL == 3
// `forward` with batch norm in weights and biases [layers][CHANNELS], for any number of images. Writes the output of the
// last layer, out [n][WIDTH][WIDTH][CHANNELS], and masks.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
evaluation(const uint4* x, const uint4* shortcut, const uint4* weights, const float* biases, uint4* out, u32* masks,
           int layers, int has_shortcut, int images) {
    SHARED_MEMORY(memory);
    const u32 shared = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, blocks = gridDim.x;
    const int group = warp % GROUPS, column = warp / GROUPS % COLUMNS, rest = warp / (GROUPS * COLUMNS);
    const int top = rest % BANDS * ROWS, image = rest / BANDS, here = min(2, images - (int)blockIdx.x * 2);

    for (int i = threadIdx.x; i < 2 * BUFFER; i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    read_images(memory + has_shortcut * BUFFER, x, here);
    if (has_shortcut) read_images(memory, shortcut, here);

    const u32 offset = shared + (lane % 8) * PIXEL + matrix / 2 * PLANE + matrix % 2 * (WIDTH == 8 ? PLANES * PLANE : 8 * PIXEL)
                       + image * PLANES * PLANE + (top * PITCH + column * 16) * PIXEL;
    const uint4* weight = weights + (size_t)group * layers * LAYER + lane;
    uint4 next[3] = {weight[0], weight[32], weight[64]};
    for (int layer = 0; layer < layers; layer++) {
        const int place = layer + has_shortcut;
        const bool adds = place % 2 == 1;
        const u32 source = offset + (place & 1) * BUFFER * PIXEL;
        const u32 target = offset + (~place & 1) * BUFFER * PIXEL + ROW + PIXEL + group * 2 * PLANE;
        __syncthreads();
        float sums[ROWS][2][4];
        convolve(sums, source, weight, next);
        if (layer + 1 < layers) {
            weight += LAYER;
            next[0] = weight[0], next[1] = weight[32], next[2] = weight[64];
        }
        u32 open[MASKS] = {0};
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            u32 added[4] = {0}, result[4];
            if (adds) load_matrices(added, target + row * ROW);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const float* bias = biases + layer * CHANNELS + group * 16 + m / 2 * 8 + lane % 4 * 2;
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    value[e] = sums[row][m / 2][m % 2 * 2 + e] + bias[e] + half_of(added[m], e);
                    const int bit = row * 8 + m * 2 + e;
                    if (value[e] > 0) open[bit / 32] |= 1u << bit % 32;
                }
                result[m] = pack_relu(value[0], value[1]);
            }
            store_matrices(target + row * ROW, result);
        }
#pragma unroll
        for (int i = 0; i < MASKS; i++)
            masks[(((size_t)layer * blocks + blockIdx.x) * MASKS + i) * THREADS + threadIdx.x] = open[i];
    }
    __syncthreads();
    write_images(out, memory + (layers + has_shortcut) % 2 * BUFFER, here);
}
#endif

#if !defined(KERNEL) || KERNEL == 4
// The gradients of x and the shortcut through `evaluation`, by the weights of the transposed convolutions.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
evaluation_gradient(const uint4* gradient, const u32* masks, const uint4* weights, uint4* for_x, uint4* for_shortcut,
                    int layers, int has_shortcut, int images) {
    SHARED_MEMORY(memory);
    const u32 shared = shared_address(memory);
    uint4* carried = memory + 2 * BUFFER;  // [ROWS][THREADS], what a shortcut takes back
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, blocks = gridDim.x;
    const int group = warp % GROUPS, column = warp / GROUPS % COLUMNS, rest = warp / (GROUPS * COLUMNS);
    const int top = rest % BANDS * ROWS, image = rest / BANDS, here = min(2, images - (int)blockIdx.x * 2);

    for (int i = threadIdx.x; i < 2 * BUFFER; i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    read_images(memory, gradient, here);
    __syncthreads();
    const u32 offset = shared + (lane % 8) * PIXEL + matrix / 2 * PLANE + matrix % 2 * (WIDTH == 8 ? PLANES * PLANE : 8 * PIXEL)
                       + image * PLANES * PLANE + (top * PITCH + column * 16) * PIXEL;
    const u32 inside = ROW + PIXEL + group * 2 * PLANE;
    const uint4* weight = weights + ((size_t)group * layers + layers - 1) * LAYER + lane;
    uint4 next[3] = {weight[0], weight[32], weight[64]};
    float sums[ROWS][2][4];
    read_numbers(sums, offset + inside);
    for (int layer = layers - 1; layer >= 0; layer--) {
        const bool adds = (layer + has_shortcut) % 2 == 1;
        const u32 source = offset + layer % 2 * BUFFER * PIXEL;  // the other buffer may still be read
        u32 open[MASKS];
#pragma unroll
        for (int i = 0; i < MASKS; i++) open[i] = masks[(((size_t)layer * blocks + blockIdx.x) * MASKS + i) * THREADS + threadIdx.x];
        if (layer == layers - 1) __syncthreads();  // all have read the gradient
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            u32 result[4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const int bit = row * 8 + m * 2;
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++)
                    value[e] = open[(bit + e) / 32] >> (bit + e) % 32 & 1 ? sums[row][m / 2][m % 2 * 2 + e] : 0;
                result[m] = pack(value[0], value[1]);
            }
            store_matrices(source + inside + row * ROW, result);
            if (adds) carried[row * THREADS + threadIdx.x] = make_uint4(result[0], result[1], result[2], result[3]);
        }
        __syncthreads();
        convolve(sums, source, weight, next);
        if (layer > 0) {
            weight -= LAYER;
            next[0] = weight[0], next[1] = weight[32], next[2] = weight[64];
        }
        if (!adds && layer + 1 < layers) add_carried(sums, carried);
    }
    write_gradients(sums, carried, offset + inside, memory, for_x, for_shortcut, has_shortcut, here);
}
#endif
