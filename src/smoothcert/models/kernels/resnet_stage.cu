// One stage of a CIFAR ResNet in evaluation, with batch norm folded into weights and biases: all activations of an
// image stay in shared memory from the first layer of the stage to the last. `resnet_evaluation.py` builds and launches
// it, once per stage, with these macros: CHANNELS, WIDTH, ROWS, GROUP (channels out of a warp), RESIDENT (blocks per
// multiprocessor) and HALF (float16 instead of bfloat16). `matrix_instructions.cuh` goes before it.
//
// A block computes one image, or two where a row has 8 pixels. A buffer is [images][planes of 8 channels][pixels], so
// that 8 neighbouring pixels of a plane are 128 contiguous bytes: matrix loads have no bank conflicts, wherever they
// start. Rows are PITCH pixels apart. The pixel between two rows and the rows above and below the image stay zero.
//
// A warp computes ROWS rows of 16 pixels and GROUP channels out with 16x8x16 matrix products. An input row that it has
// loaded serves the three output rows that touch it.

constexpr int PLANES = CHANNELS / 8, PITCH = WIDTH + 1, PIXELS = (WIDTH + 2) * PITCH + 1;
constexpr int IMAGES = WIDTH == 8 ? 2 : 1, BUFFER = IMAGES * PLANES * PIXELS;
constexpr int GROUPS = CHANNELS / GROUP, COLUMNS = WIDTH < 16 ? 1 : WIDTH / 16;
constexpr int THREADS = 32 * GROUPS * COLUMNS * (WIDTH / ROWS);
constexpr int STEPS = CHANNELS / 16, PHASES = 3 * STEPS, TILES = GROUP / 8;
constexpr int PIXEL = 16, ROW = PITCH * PIXEL, PLANE = PIXELS * PIXEL;  // bytes

__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
}

__device__ __forceinline__ int position(int row, int column) { return (row + 1) * PITCH + column + 1; }

// weights: [GROUPS][layers][PHASES][3 rows of taps][TILES / 2][32 lanes], and one phase more; biases: [layers][CHANNELS].
// With `mean_and_scale` [2][3], x is an image [n][WIDTH][WIDTH][3], and the first layer is that of the network; else x
// is what the first layer adds, y its input, both [n][WIDTH][WIDTH][CHANNELS].
// Writes the next stage's y and x, by exit_weights [2 * CHANNELS / 16][10 taps][STEPS][32 lanes] (nine of the convolution
// with stride 2, one of the shortcut) and exit_biases [2][2 * CHANNELS]; or, with WIDTH 8, float32 logits [n][classes],
// by exit_weights [classes][CHANNELS] and exit_biases [classes], both float32.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
stage(const u16* x, const u16* y, const float* mean_and_scale, const uint4* weights, const float* biases, int layers,
      const uint4* exit_weights, const float* exit_biases, u32* next_y, u32* next_x, float* logits, int classes,
      int images) {
    extern __shared__ uint4 memory[];
    const u32 shared = (u32)__cvta_generic_to_shared(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8;
    const int group = warp % GROUPS, column = warp / GROUPS % COLUMNS, top = warp / (GROUPS * COLUMNS) * ROWS;
    const int first = blockIdx.x * IMAGES, here = min(IMAGES, images - first);

    for (int i = threadIdx.x; i < 2 * BUFFER; i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (WIDTH == 32) {  // "channels" of a pixel: those of the three rows around it
        for (int i = threadIdx.x; i < WIDTH * WIDTH; i += THREADS) {
            u32 values[8] = {0};
            for (int k = 0; k < 9; k++) {
                const int row = i / WIDTH + k / 3 - 1, at = (first * WIDTH * WIDTH + row * WIDTH + i % WIDTH) * 3 + k % 3;
                float value = 0;
                if (row >= 0 && row < WIDTH) value = (number(x[at]) - mean_and_scale[k % 3]) * mean_and_scale[3 + k % 3];
                values[k / 2] |= (pack(value, 0) & 0xffff) << (k % 2 * 16);
            }
            uint4* to = memory + BUFFER + position(i / WIDTH, i % WIDTH);
            to[0] = make_uint4(values[0], values[1], values[2], values[3]);
            to[PIXELS] = make_uint4(values[4], 0, 0, 0);
        }
    } else {
        constexpr int count = WIDTH * WIDTH * PLANES;
        for (int i = threadIdx.x; i < here * count; i += THREADS) {
            const int pixel = i / PLANES % (WIDTH * WIDTH), plane = i % PLANES + i / count * PLANES;
            uint4* to = memory + plane * PIXELS + position(pixel / WIDTH, pixel % WIDTH);
            to[0] = ((const uint4*)x)[(size_t)first * count + i];
            to[BUFFER] = ((const uint4*)y)[(size_t)first * count + i];
        }
    }

    // Of this lane in a load of 16 pixels and 16 channels, from the pixel above and left of the warp's first on.
    const u32 offset = shared + (lane % 8) * PIXEL + matrix / 2 * PLANE + matrix % 2 * (IMAGES == 2 ? PLANES * PLANE : 8 * PIXEL)
                       + (top * PITCH + column * 16) * PIXEL;
    const uint4* weight = weights + (size_t)group * layers * (PHASES * 3 * (TILES / 2) * 32) + lane;
    uint4 next[3][TILES / 2];
    for (int i = 0; i < 3 * (TILES / 2); i++) next[i / (TILES / 2)][i % (TILES / 2)] = weight[i * 32];

    for (int layer = 0; layer < layers; layer++) {
        // Even layers of a stage read the first buffer, odd ones the second, and add what they overwrite.
        const int place = WIDTH == 32 ? layer - 1 : layer + 1;
        const u32 source = offset + (place & 1) * BUFFER * PIXEL;
        const u32 target = offset + (~place & 1) * BUFFER * PIXEL + ROW + PIXEL + group * TILES * PLANE;
        const bool adds = place > 0 && place % 2 == 1;
        float sums[ROWS][TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float2 bias = *(const float2*)(biases + layer * CHANNELS + group * GROUP + tile * 8 + lane % 4 * 2);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                sums[row][tile][0] = sums[row][tile][2] = bias.x;
                sums[row][tile][1] = sums[row][tile][3] = bias.y;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int phase = 0; phase < PHASES; phase++) {  // a column of taps, and 16 channels in
            uint4 now[3][TILES / 2];
            weight += 3 * (TILES / 2) * 32;
#pragma unroll
            for (int i = 0; i < 3 * (TILES / 2); i++) {
                now[i / (TILES / 2)][i % (TILES / 2)] = next[i / (TILES / 2)][i % (TILES / 2)];
                next[i / (TILES / 2)][i % (TILES / 2)] = weight[i * 32];
            }
            const u32 from = source + phase / STEPS * PIXEL + phase % STEPS * 2 * PLANE;
            u32 input[2][4];
            load_matrices(input[0], from);
#pragma unroll
            for (int row = 0; row < ROWS + 2; row++) {
                if (row < ROWS + 1) load_matrices(input[(row + 1) % 2], from + (row + 1) * ROW);
#pragma unroll
                for (int tap = 0; tap < 3; tap++)
                    if (row - tap >= 0 && row - tap < ROWS)
#pragma unroll
                        for (int i = 0; i < TILES / 2; i++) {
                            multiply(sums[row - tap][2 * i], input[row % 2], now[tap][i].x, now[tap][i].y);
                            multiply(sums[row - tap][2 * i + 1], input[row % 2], now[tap][i].z, now[tap][i].w);
                        }
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int i = 0; i < TILES / 2; i++) {
                const u32 to = target + row * ROW + i * 2 * PLANE;
                u32 added[4] = {0}, result[4];
                if (adds) load_matrices(added, to);
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const float* sum = &sums[row][2 * i + m / 2][m % 2 * 2];
                    result[m] = pack_relu(sum[0] + number(added[m] & 0xffff), sum[1] + number(added[m] >> 16));
                }
                store_matrices(to, result);
            }
    }
    __syncthreads();

#if WIDTH == 8
    float* means = (float*)(memory + BUFFER);
    for (int i = threadIdx.x; i < IMAGES * CHANNELS; i += THREADS) {
        const u16* from = (const u16*)(memory + i / 8 * PIXELS) + i % 8;
        float sum = 0;
        for (int pixel = 0; pixel < WIDTH * WIDTH; pixel++) sum += number(from[position(pixel / WIDTH, pixel % WIDTH) * 8]);
        means[i] = sum / (WIDTH * WIDTH);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < here * classes; i += THREADS) {
        float sum = exit_biases[i % classes];
        for (int c = 0; c < CHANNELS; c++)
            sum += ((const float*)exit_weights)[i % classes * CHANNELS + c] * means[i / classes * CHANNELS + c];
        logits[first * classes + i] = sum;
    }
#else
    constexpr int HALF_WIDTH = WIDTH / 2, OUT = 2 * CHANNELS, PARTS = HALF_WIDTH * HALF_WIDTH / 64 * (OUT / 16);
    for (int part = warp; part < PARTS; part += THREADS / 32) {  // 64 pixels and 16 channels out
        const int channel = part % (OUT / 16) * 16, start = part / (OUT / 16) * 64;
        u32 from[4];
        for (int i = 0; i < 4; i++) {
            const int pixel = start + i * 16 + matrix % 2 * 8 + lane % 8;
            from[i] = shared + matrix / 2 * PLANE + (pixel / HALF_WIDTH * 2 * PITCH + pixel % HALF_WIDTH * 2) * PIXEL;
        }
        const uint4* w = exit_weights + channel / 16 * (10 * STEPS * 32) + lane;
#pragma unroll
        for (int output = 0; output < 2; output++) {  // the convolution, the shortcut
            float sums[4][2][4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float2 bias = *(const float2*)(exit_biases + output * OUT + channel + i % 2 * 8 + lane % 4 * 2);
                sums[i / 2][i % 2][0] = sums[i / 2][i % 2][2] = bias.x;
                sums[i / 2][i % 2][1] = sums[i / 2][i % 2][3] = bias.y;
            }
#pragma unroll 3
            for (int i = 0; i < (output ? 1 : 9) * STEPS; i++, w += 32) {
                const int tap = output ? 4 : i / STEPS;
                const u32 shift = tap / 3 * ROW + tap % 3 * PIXEL + i % STEPS * 2 * PLANE;
                const uint4 b = *w;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 a[4];
                    load_matrices(a, from[j] + shift);
                    multiply(sums[j][0], a, b.x, b.y);
                    multiply(sums[j][1], a, b.z, b.w);
                }
            }
            u32* out = output ? next_x : next_y;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float* sum = &sums[i / 4][i / 2 % 2][i % 2 * 2];
                const int pixel = start + i / 4 * 16 + i % 2 * 8 + lane / 4, c = channel + i / 2 % 2 * 8 + lane % 4 * 2;
                out[((size_t)first * HALF_WIDTH * HALF_WIDTH + pixel) * (OUT / 2) + c / 2] =
                    output ? pack(sum[0], sum[1]) : pack_relu(sum[0], sum[1]);
            }
        }
    }
#endif
}
